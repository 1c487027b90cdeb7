"""Models of speech under generate(): what a window begins with, and long sounds window by window."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from unspool.api.assistant import find_drafting
from unspool.callbacks import check_callback
from unspool.config import PARAMETERS, GenerationConfig
from unspool.config.speech import ONE_WINDOW, WINDOWS
from unspool.decoding.inputs import Inputs, read_prompts
from unspool.decoding.prompts import EncoderInput
from unspool.decoding.run import Run
from unspool.errors import InputError, SettingError, UnsupportedError
from unspool.numeric import is_number
from unspool.plan import merge
from unspool.protocols import Encoded, Model
from unspool.speech.arguments import SpeechArguments, check_draws, read_arguments, take_arguments
from unspool.speech.decoder import Start, WindowDecoder, Written, choose_temperature
from unspool.speech.markers import begin, needs_detection
from unspool.speech.picking import pick_row
from unspool.speech.windows import Course, FeatureRow, SoundCursor, WindowResult, decode_windows

_SOURCES = ("input_features", "encoder_outputs")


def merge_speech(
    core: Model, config: GenerationConfig | None, kwargs: Mapping[str, Any], use_model_defaults: bool | None = None
) -> GenerationConfig:
    """The settings of a call, with what the model's file says about its tokens."""
    of_model = None if use_model_defaults is False else getattr(core, "generation_config", None)
    known = {name: value for name, value in kwargs.items() if name in PARAMETERS}
    return merge(of_model, config, known)[0]


# --- one window ------------------------------------------------------------------------------------------


def prepare_window(
    core: Model,
    kwargs: dict[str, Any],
    config: GenerationConfig | None,
    processors: Any,
    *,
    use_model_defaults: bool | None = None,
    defaults: Mapping[str, Any] | None = None,
    assistant_model: Any = None,
    start: Start,
) -> Any:
    """Put what a window's text begins with into a call's arguments; returns its processors.

    `start` prepares a run with these arguments and processors. Nothing is computed unless a language is to be found:
    then the call is checked before, with any language in that one's place.
    """
    asked = take_arguments(kwargs)
    extra = [name for name, value in asked.items() if name not in ONE_WINDOW and value not in (None, False)]
    if extra:
        raise SettingError(
            f"`{extra[0]}` is for sounds that are read window by window; use unspool.generate(), lm.generate() or "
            "lm.transcribe()"
        )
    settings = merge_speech(core, config, kwargs, use_model_defaults)
    kwargs["input_features"] = _fill_window(core, kwargs.get("input_features"))
    kwargs["forced_decoder_ids"] = None  # what it forces stands in the prompt
    if kwargs.get("decoder_input_ids") is not None or not any(kwargs.get(name) is not None for name in _SOURCES):
        return processors
    speech = read_arguments(asked, settings, core.info)
    assistant = None if assistant_model is None else find_drafting(assistant_model, core)
    decoder = WindowDecoder(core, start, speech.markers, speech.has_timestamps, {}, assistant=assistant)
    given = Inputs(**{name: kwargs[name] for name in _SOURCES if kwargs.get(name) is not None})
    source = read_prompts(core, given, settings).source
    assert source is not None
    languages = speech.spread(len(source.lengths))
    needs_language = any(needs_detection(speech.markers, language, speech.task) for language in languages)
    known = next(iter(speech.markers.languages.values())) if needs_language else None
    prompt = _write_prompts(speech, languages, [known] * len(languages))
    kwargs["decoder_input_ids"] = prompt
    _bound_length(core, speech, kwargs, settings, prompt.shape[1], defaults)
    if speech.has_timestamps:
        own = [] if processors is None else list(processors) if isinstance(processors, list | tuple) else [processors]
        processors = [decoder.make_rules(prompt.shape[1]), *own]
    if needs_language:
        start(logits_processor=processors, **kwargs)
        is_shown = bool(settings.output_attentions or settings.output_hidden_states)
        found = decoder.find_languages(_hear(decoder, source, kwargs, is_shown))
        kwargs["decoder_input_ids"] = _write_prompts(speech, languages, found)
    return processors


def _fill_window(core: Model, features: Any) -> Any:
    """Features with zeros behind them, if they are shorter than a window, as in the reference."""
    shape = core.info.features
    assert shape is not None
    if not isinstance(features, torch.Tensor) or features.dim() != 3 or not 0 < features.shape[2] < shape.frames:
        return features
    return F.pad(features, (0, shape.frames - features.shape[2]))


def _write_prompts(
    speech: SpeechArguments, languages: Sequence[str | None], found: Sequence[int | None]
) -> torch.Tensor:
    """Each row's prompt (rows, length), with the language that was given or found."""
    before = list(speech.prompt_ids or ())
    return torch.tensor(
        [
            before + begin(speech.markers, language, token, speech.task, speech.has_timestamps)
            for language, token in zip(languages, found, strict=True)
        ]
    )


def _hear(decoder: WindowDecoder, source: EncoderInput, kwargs: dict[str, Any], is_shown: bool) -> Encoded:
    """The encoder's states, which replace the features among a call's arguments unless its layers are to be shown."""
    if source.encoded is not None:
        return source.encoded
    assert source.embeds is not None
    heard = decoder.encode(source.embeds)
    if is_shown:
        return heard.encoded
    kwargs["input_features"], kwargs["encoder_outputs"] = None, heard.encoded.states
    kwargs["attention_mask"] = None  # of the frames
    if heard.drafted is not None:
        kwargs["assistant_encoder_outputs"] = heard.drafted.states
    return heard.encoded


def _bound_length(
    core: Model,
    speech: SpeechArguments,
    kwargs: dict[str, Any],
    settings: GenerationConfig,
    num_prompt: int,
    defaults: Mapping[str, Any] | None,
) -> None:
    """Leave out of a length what a prompt takes, and keep it within the model's positions."""
    most = core.info.max_context
    if most is None or (settings.max_new_tokens is not None and kwargs.get("max_length") is None):
        return
    if settings.max_new_tokens is None and defaults and "max_new_tokens" in defaults:
        kwargs["max_new_tokens"] = min(defaults["max_new_tokens"], most - num_prompt)
    else:
        longest = most if speech.max_length is None else speech.max_length + min(most // 2 - 1, num_prompt)
        kwargs["max_length"] = min(longest, most)


def needs_windows(core: Model, prompt: Any, settings: Mapping[str, Any]) -> bool:
    """Whether a call asks for more than one plain run over one window."""
    shape, given = core.info.features, prompt if isinstance(prompt, Mapping) else settings
    features = given.get("input_features")
    assert shape is not None
    is_long = isinstance(features, torch.Tensor) and features.dim() == 3 and features.shape[2] > shape.frames
    names = ("return_timestamps", *WINDOWS)
    asks = any(settings.get(name) not in (None, False) for name in names)
    return is_long or asks or isinstance(settings.get("temperature"), list | tuple)


# --- windows ---------------------------------------------------------------------------------------------


def generate_speech(
    core: Model,
    start: Start,
    arguments: dict[str, Any],
    use: Callable[[Run], None],
    finish: Callable[[Run], Any],
    *,
    is_streamed: bool,
) -> Any:
    """What generate() returns for a model of speech: the reference's tokens, output object, or dict of segments.

    `use` iterates a single run, with the caller's streamer, and `finish` says what it returns.
    """
    config = arguments.get("generation_config")
    rest = dict(arguments)
    asked = take_arguments(rest)
    if is_number(rest.get("temperature")):  # as in the reference, it says whether tokens are drawn
        asked["temperature"] = rest.pop("temperature")
        check_draws(rest.get("do_sample"), asked["temperature"])
    settings = merge_speech(core, config, rest, rest.get("use_model_defaults"))
    features = rest.get("input_features")
    shape = core.info.features
    assert shape is not None
    others = [name for name in ("input_ids", "inputs_embeds", "encoder_outputs") if rest.get(name) is not None]
    if features is not None and others:
        raise InputError(f"input_features and {others[0]} are two sources; give one of them")
    is_long = isinstance(features, torch.Tensor) and features.dim() == 3 and features.shape[2] > shape.frames
    if is_long:
        if asked.get("return_timestamps") is False:
            raise SettingError(
                f"input_features has more than {shape.frames} frames, and a sound of several windows is followed by "
                "its timestamps; leave return_timestamps=False out, or give one window"
            )
        asked["return_timestamps"] = True
    watch = asked.get("monitor_progress")
    check_callback("monitor_progress", watch, "frames")
    if rest.get("decoder_input_ids") is None:
        speech = read_arguments(asked, settings, core.info)
        # As in the reference, tokens alone are those of windows, which timestamps in a text divide.
        is_one = is_streamed or settings.return_dict_in_generate or (settings.num_return_sequences or 1) > 1
        if (is_long or speech.needs_windows or not is_one) and not speech.is_single and features is not None:
            return _generate_windows(core, start, rest, speech, asked)
        asked = {name: value for name, value in asked.items() if name in ONE_WINDOW}
        rest = choose_temperature(rest, speech.temperatures[0])
        is_whole = speech.is_single
    else:
        is_whole = True
    run = start(**rest, **asked)
    if watch is not None:
        frames = shape.frames if features is None else features.shape[2]
        watch(torch.tensor([[0, frames]] * run.parts.prompts.num_rows))
    use(run)
    return finish(run) if is_whole or run.parts.returns_output else _strip(run, settings)


def _strip(run: Run, settings: GenerationConfig) -> torch.Tensor:
    """The new tokens alone, without the one that ends a text: (rows, longest)."""
    ends = settings.eos_token_id
    ends = ends if isinstance(ends, list | tuple) else [ends]
    rows = [tokens[:-1] if tokens and tokens[-1] in ends else tokens for tokens in run.emitted]
    return pad_rows(rows, run.parts.plan.pad_token_id)


def pad_rows(rows: Sequence[Sequence[int]], pad: int) -> torch.Tensor:
    """Rows of tokens (rows, longest), padded on the right."""
    longest = max((len(row) for row in rows), default=0)
    return torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows], dtype=torch.int64)


def _generate_windows(
    core: Model, start: Start, rest: dict[str, Any], speech: SpeechArguments, asked: Mapping[str, Any]
) -> Any:
    features = rest.pop("input_features", None)
    if features is None:
        raise InputError(f"windows are read from input_features: {', '.join(_SOURCES[1:])} can't be cut; give those")
    sources = _cut_rows(core, features, rest.pop("attention_mask", None), speech)
    if (rest.get("num_return_sequences") or 1) > 1:
        raise UnsupportedError(
            "`num_return_sequences` above 1 is not known where windows follow each other; call again with another seed"
        )
    processors = rest.pop("logits_processor", None)
    wants_output = bool(rest.get("return_dict_in_generate"))
    if wants_output and speech.wants_times:
        rest["output_scores"] = True  # as in the reference
    for name in ("encoder_outputs", "model"):
        rest.pop(name, None)
    decoder = WindowDecoder(
        core,
        start,
        speech.markers,
        speech.has_timestamps,
        {name: value for name, value in rest.items() if value is not None},
        speech.max_length,
        speech.thresholds,
        () if processors is None else processors if isinstance(processors, list | tuple) else (processors,),
        None if (drafts := rest.get("assistant_model")) is None else find_drafting(drafts, core),
    )
    course = Course(
        speech.spread(len(sources)),
        speech.task,
        speech.temperatures,
        speech.conditions,
        speech.prompt_ids,
        speech.prompts_all,
        speech.wants_times,
        batch_size=len(sources),
    )
    watch = asked.get("monitor_progress")
    report = None if watch is None else partial(_report, watch, sources)
    results = list(decode_windows(decoder, sources, course, report))
    return _gather(results, len(sources), speech, wants_output)


def _cut_rows(core: Model, features: Any, mask: Any, speech: SpeechArguments) -> list[FeatureRow]:
    shape = core.info.features
    assert shape is not None
    if not isinstance(features, torch.Tensor) or features.dim() != 3 or not features.is_floating_point():
        raise InputError(
            f"input_features must be a floating-point tensor of the shape (rows, {shape.channels}, frames)"
        )
    rows, channels, frames = features.shape
    if channels != shape.channels or frames == 0 or rows == 0:
        raise InputError(f"input_features has the shape {tuple(features.shape)}; give (rows, {shape.channels}, frames)")
    if not bool(torch.isfinite(features).all()):
        raise InputError("input_features holds NaN or infinite values")
    real: list[int] | None = None
    if mask is not None:
        mask = torch.as_tensor(mask)
        if tuple(mask.shape) != (rows, frames):
            raise InputError(f"attention_mask has the shape {tuple(mask.shape)} for features of {(rows, frames)}")
        real = [int(one) for one in mask.sum(-1)]
    is_long = frames > shape.frames
    if is_long and rows > 1 and real is None:
        raise InputError("several long sounds need an attention_mask (rows, frames) that says where each ends")
    ends = real if real is not None and is_long and rows > 1 else [frames] * rows
    known = real if real is not None and speech.wants_times else [None] * rows
    return [
        FeatureRow(row, shape.frames, end, count, shape.stride)
        for row, end, count in zip(features, ends, known, strict=True)
    ]


def _report(watch: Any, sources: Sequence[FeatureRow], cursors: Sequence[SoundCursor]) -> None:
    seeks = [source.num_frames for source in sources]
    for cursor in cursors:
        seeks[cursor.index] = cursor.seek
    watch(torch.tensor([[seek, source.num_frames] for seek, source in zip(seeks, sources, strict=True)]))


def _gather(results: Sequence[WindowResult], num_rows: int, speech: SpeechArguments, wants_output: bool) -> Any:
    """The rows of all windows in the reference's forms."""
    segments: list[list[dict[str, Any]]] = [[] for _ in range(num_rows)]
    for result in results:
        written = result.written
        for one in result.slices if written is not None else ():
            assert written is not None
            offset = len(written.prompt)
            tokens = torch.tensor(written.tokens[one.first : one.stop])
            segment = {
                "start": torch.tensor(one.start, dtype=torch.float64),
                "end": torch.tensor(one.end, dtype=torch.float64),
                "tokens": tokens,
                "idxs": (offset + one.first, offset + one.stop),
                "result": _keep_result(written, speech.wants_times),
            }
            if speech.wants_times:
                times = torch.tensor(written.times[one.first : one.stop], dtype=torch.float64)
                segment["token_timestamps"] = times + result.seek / 100
            segments[result.index].append(segment)
    rows = [[int(token) for one in row for token in one["tokens"]] for row in segments]
    sequences = pad_rows(rows, speech.markers.pad)
    if wants_output and speech.wants_times and speech.is_plain:
        return _gather_whole([result.written for result in results if result.seek == 0])
    if not (wants_output or speech.wants_segments or speech.wants_times):
        return sequences
    output: dict[str, Any] = {"sequences": sequences}
    if speech.wants_times:
        spoken = [[float(one) for segment in row for one in segment["token_timestamps"]] for row in segments]
        longest = sequences.shape[1]
        padded = [row + [row[-1] if row else 0.0] * (longest - len(row)) for row in spoken]
        output["token_timestamps"] = torch.tensor(padded)
    if wants_output or speech.wants_segments:
        output["segments"] = segments
    return output


def _gather_whole(rows: Sequence[Written | None]) -> dict[str, Any]:
    """The output of the one run that wrote all of these, with the times of its tokens."""
    written = [row for row in rows if row is not None]
    output = written[0].output
    assert output is not None and output.sequences is not None
    found = {name: value for name, value in output.items() if name != "past_key_values"}
    times = torch.zeros(output.sequences.shape)
    for row in written:
        spoken = torch.tensor(row.times)
        times[row.row, len(row.prompt) :] = spoken[-1]
        times[row.row, len(row.prompt) : len(row.prompt) + len(spoken)] = spoken
    return found | {"token_timestamps": times}


def _keep_result(written: Written, wants_times: bool) -> Any:
    """What the run of a segment's window returned: its tokens, or a dict of the row's part of the output."""
    tokens = torch.tensor(written.prompt + written.ended)
    if written.output is None and not wants_times:
        return tokens
    kept = {"sequences": tokens} if written.output is None else pick_row(written.output, written.row)
    if wants_times:
        kept["token_timestamps"] = torch.tensor([0.0] * len(written.prompt) + written.times)
    return kept
