"""One window: its features encoded, its language found, its tokens written and placed in time."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch

from unspool.config import GenerationConfig, find_unused
from unspool.decoding.reader import answer_at_once, encode_at_once
from unspool.decoding.run import Run
from unspool.decoding.speculative.sources import shares_encoder
from unspool.errors import SettingError
from unspool.logits import WhisperTimeStampLogitsProcessor
from unspool.outputs import GenerateOutput
from unspool.protocols import LAST, Ask, Encoded, Model, SourceAsk, Want
from unspool.speech.alignment import find_times
from unspool.speech.markers import Markers
from unspool.speech.picking import pick_row

Start = Callable[..., Run]
"""`unspool.api.starting.start`: checks a call and prepares its run."""


@dataclass
class Written:
    """What was written for one window."""

    prompt: list[int]
    tokens: list[int]  # the new ones, without the token that ends a text
    ended: list[int]  # with it
    temperature: float | None
    avg_logprob: float | None = None  # of the tokens and their end, if a threshold asked for it
    compression_ratio: float | None = None
    no_speech_prob: float | None = None
    times: list[float] = field(default_factory=list)  # seconds after the window's start at which each token is over
    output: GenerateOutput | None = None  # of the run, all rows
    row: int = 0  # in that output


@dataclass(frozen=True)
class Thresholds:
    """When a text is written anew at a higher temperature, and when a window is taken for silence."""

    compression_ratio: float | None = None
    logprob: float | None = None
    no_speech: float | None = None


@dataclass(frozen=True)
class Heard:
    """Windows as encoders have read them."""

    encoded: Encoded
    drafted: Encoded | None = None  # what a draft model's decoder reads

    def pick(self, rows: Sequence[int]) -> Heard:
        """Some of the windows."""
        return Heard(_pick(self.encoded, rows), None if self.drafted is None else _pick(self.drafted, rows))


@dataclass
class WindowDecoder:
    """A model of speech with the settings of a call."""

    model: Model
    start: Start
    markers: Markers
    has_timestamps: bool
    settings: Mapping[str, Any]  # of every run, in generate()'s names
    max_length: int | None = None  # tokens of a row without its prompt, as far as that is half of the context
    thresholds: Thresholds = Thresholds()
    processors: Sequence[Any] = ()
    assistant: Model | None = None  # a draft model, which `settings` name too
    num_passes: int = 0

    # --- the encoder and the first token -----------------------------------------------------------------
    @torch.no_grad()
    def encode(self, features: torch.Tensor) -> Heard:
        """The encoder's states of features (rows, mels, frames), and a draft model's."""
        features = features.to(self.model.device)
        asked = self.settings.get
        is_shown = bool(asked("return_dict_in_generate"))
        want = Want(
            hidden_states=is_shown and bool(asked("output_hidden_states")),
            attentions=is_shown and bool(asked("output_attentions")),
        )
        encoded = self._encode(self.model, features, want)
        if self.assistant is None:
            return Heard(encoded)
        return Heard(encoded, encoded if self._is_shared else self._encode(self.assistant, features))

    def _encode(self, model: Model, features: torch.Tensor, want: Want = LAST) -> Encoded:
        shape = model.info.features
        assert shape is not None
        self.num_passes += 1
        return encode_at_once(SourceAsk(model, None, [shape.positions] * len(features), want, features))

    @cached_property
    def _is_shared(self) -> bool:
        return self.assistant is not None and shares_encoder(self.assistant, self.model)

    @torch.no_grad()
    def find_languages(self, encoded: Encoded) -> list[int]:
        """The likeliest language token of every row."""
        known = torch.tensor(sorted(self.markers.languages.values()), device=self.model.device)
        logits = self._read(encoded, [[self.markers.start]] * len(encoded.lengths))
        return [int(token) for token in known[logits[:, known].argmax(-1)]]

    @torch.no_grad()
    def find_silence(self, encoded: Encoded, row: int, prompt: Sequence[int]) -> float:
        """The probability that a window holds no speech."""
        assert self.markers.no_speech is not None
        before = list(prompt[: prompt.index(self.markers.start) + 1])
        logits = self._read(_pick(encoded, [row]), [before])
        return float(logits.float().softmax(-1)[0, self.markers.no_speech])

    def _read(self, encoded: Encoded, prompts: Sequence[Sequence[int]], want: Want | None = None) -> Any:
        """The logits (rows, vocab) after prompts of one length, or all that a pass with `want` returns."""
        tokens = torch.tensor([list(prompt) for prompt in prompts], device=self.model.device)
        cache = self.model.new_cache("dynamic", len(prompts), tokens.shape[1], encoded=encoded)
        self.num_passes += 1
        if want is None:
            return answer_at_once(Ask(self.model, cache, tokens)).logits
        return answer_at_once(Ask(self.model, cache, tokens, want=want))

    # --- writing -------------------------------------------------------------------------------------------
    def check(self, prompt: list[int], temperatures: Sequence[float | None], longest: int) -> None:
        """Raise for settings that can't be, before a window is encoded; prompts may become `longest` tokens long."""
        room = None if self.assistant is None else self.assistant.info.max_context
        if room is not None and longest >= room:
            raise SettingError(
                f"a window's prompt may have {longest} tokens, those of earlier windows among them, and the context of "
                f"`assistant_model` ends at {room}; use condition_on_prev_tokens=False, or one with a longer context"
            )
        shape = self.model.info.features
        assert shape is not None
        heard = Heard(
            *(
                Encoded(
                    torch.zeros(1, shape.positions, model.info.hidden_size, dtype=model.dtype, device=model.device),
                    [shape.positions],
                )
                for model in (self.model, self.assistant)
                if model is not None
            )
        )
        for temperature in {bool(one): one for one in temperatures}.values():  # drawn, and not
            self._start(heard, [prompt], temperature)

    def write(self, heard: Heard, prompts: Sequence[list[int]], temperatures: Sequence[float | None]) -> list[Written]:
        """The text of every row, written anew at the next temperature while a threshold refuses it."""
        found: dict[int, Written] = {}
        waiting = list(range(len(prompts)))
        for temperature in temperatures:
            by_length: dict[int, list[int]] = {}
            for row in waiting:
                by_length.setdefault(len(prompts[row]), []).append(row)
            for rows in by_length.values():
                for row, written in zip(
                    rows, self._write(heard.pick(rows), [prompts[row] for row in rows], temperature), strict=True
                ):
                    found[row] = written
            waiting = [row for row in waiting if self._is_refused(found[row], heard.encoded, row)]
            if not waiting:
                break
        return [found[row] for row in range(len(prompts))]

    def is_silent(self, written: Written) -> bool:
        """Whether the thresholds take a window for silence, so that its text is dropped."""
        limits = self.thresholds
        return (
            limits.no_speech is not None
            and limits.logprob is not None
            and written.no_speech_prob is not None
            and written.avg_logprob is not None
            and written.avg_logprob < limits.logprob
            and written.no_speech_prob > limits.no_speech
        )

    def _is_refused(self, written: Written, encoded: Encoded, row: int) -> bool:
        limits, is_refused = self.thresholds, False
        if limits.compression_ratio is not None:
            written.compression_ratio = measure_compression(written.ended, self.model.info.vocab_size)
            is_refused = written.compression_ratio > limits.compression_ratio
        if limits.logprob is not None and written.avg_logprob is not None and written.avg_logprob < limits.logprob:
            is_refused = True
            if limits.no_speech is not None:
                written.no_speech_prob = self.find_silence(encoded, row, written.prompt)
                if self.is_silent(written):
                    return False
        return is_refused

    def _start(self, heard: Heard, prompts: Sequence[list[int]], temperature: float | None) -> Run:
        settings = self._choose_settings(len(prompts[0]), temperature)
        if self._needs_scores:
            settings |= {"return_dict_in_generate": True, "output_scores": True}
        if heard.drafted is not None:
            settings["assistant_encoder_outputs"] = heard.drafted.states
        processors = list(self.processors)
        if self.has_timestamps:
            processors.insert(0, self.make_rules(len(prompts[0])))
        return self.start(
            encoder_outputs=heard.encoded.states,
            decoder_input_ids=torch.tensor(prompts),
            logits_processor=processors or None,
            **settings,
        )

    @property
    def _needs_scores(self) -> bool:
        return self.thresholds.logprob is not None

    def _write(self, heard: Heard, prompts: Sequence[list[int]], temperature: float | None) -> list[Written]:
        run = self._start(heard, prompts, temperature)
        for _ in run:
            pass
        self.num_passes += run.stats.forward_passes
        output = run.output() if run.parts.returns_output else None
        if output is not None:  # it was given the last layer's states, and returns those of all layers
            for name in ("hidden_states", "attentions"):
                if (layers := getattr(heard.encoded, name)) is not None:
                    setattr(output, f"encoder_{name}", layers)
        made = []
        for row, (prompt, emitted) in enumerate(zip(prompts, run.emitted, strict=True)):
            tokens = emitted[:-1] if emitted and emitted[-1] in self.markers.ends else emitted
            written = Written(prompt, tokens, emitted, temperature, output=output, row=row)
            if self._needs_scores:
                written.avg_logprob = _average(output, row, emitted, temperature)
            made.append(written)
        return made

    def _choose_settings(self, num_prompt: int, temperature: float | None) -> dict[str, Any]:
        settings = dict(self.settings)
        most = self.model.info.max_context
        is_counted = settings.get("max_new_tokens") is not None
        if most is not None and (not is_counted or settings.get("max_length") is not None):  # asked for, both hold
            longest = most if self.max_length is None else self.max_length + min(most // 2 - 1, num_prompt)
            settings["max_length"] = min(longest, most)
        if most is not None and is_counted and settings["max_new_tokens"] + num_prompt > most:
            raise SettingError(
                f"`max_new_tokens`={settings['max_new_tokens']} and a prompt of {num_prompt} tokens (with those of "
                f"earlier windows) exceed the {most} positions of the model; use {most - num_prompt} or fewer"
            )
        return choose_temperature(settings, temperature)

    def make_rules(self, num_prompt: int) -> WhisperTimeStampLogitsProcessor:
        """The rules of timestamps for texts after a prompt of so many tokens."""
        markers = self.markers
        config = SimpleNamespace(
            no_timestamps_token_id=markers.no_timestamps,
            eos_token_id=markers.ends[0] if markers.ends else markers.pad,
            bos_token_id=markers.start,
            max_initial_timestamp_index=markers.first_limit,
        )
        return WhisperTimeStampLogitsProcessor(config, begin_index=num_prompt)

    # --- times ----------------------------------------------------------------------------------------------
    @torch.no_grad()
    def place(self, encoded: Encoded, row: int, written: Written, num_positions: int | None) -> None:
        """Find when each token of a row was spoken: one pass over all of them, with attentions."""
        if not self.markers.alignment_heads:
            raise SettingError(
                "times of words need `alignment_heads` in the model's generation_config.json, which has none; use "
                "return_timestamps=True for times of segments"
            )
        whole = written.prompt + written.ended
        forward = self._read(_pick(encoded, [row]), [whole[:-1]], Want("all", attentions=True))
        attentions = [layer[0] for layer in forward.cross_attentions]
        times = find_times(attentions, self.markers.alignment_heads, len(written.prompt), num_positions)
        # The last token is not read by the model any more: it has the time of the one before.
        written.times = [*times, times[-1]] if times else [0.0] * len(written.ended)


def choose_temperature(settings: Mapping[str, Any], temperature: float | None) -> dict[str, Any]:
    """A run's settings at a temperature, which says whether tokens are drawn; None leaves them as they are."""
    if temperature is None:
        return dict(settings)
    chosen = {**settings, "do_sample": temperature > 0}
    if temperature > 0:
        chosen |= {"temperature": temperature, "num_beams": 1}
    # The strategy may be another than the caller's: what belongs to the other one has nothing to do.
    return {name: value for name, value in chosen.items() if name not in find_unused(_as_config(chosen))}


def measure_compression(tokens: Sequence[int], vocab_size: int) -> float:
    """How much smaller zlib makes a text's tokens: a text that repeats itself shrinks much."""
    width = (max(1, vocab_size).bit_length() - 1) // 8 + 1
    content = b"".join(token.to_bytes(width, "little") for token in tokens)
    return len(content) / len(zlib.compress(content))


def _average(output: Any, row: int, tokens: Sequence[int], temperature: float | None) -> float:
    """The mean log-probability of a row's tokens under the scores that they were chosen by."""
    if not tokens:
        return 0.0
    steps = pick_row(output, row)["scores"][: len(tokens)]
    if steps[0].device.type == "cpu":  # a step's scores and what is made of them stay in the cache
        found = [_find_logprobs(step[None], [token], temperature) for step, token in zip(steps, tokens, strict=True)]
        return float(torch.cat(found).mean())
    return float(_find_logprobs(torch.stack(steps), tokens, temperature).mean())


def _find_logprobs(scores: torch.Tensor, tokens: Sequence[int], temperature: float | None) -> torch.Tensor:
    """The log-probabilities of the tokens that were chosen by these scores."""
    scores = scores.float()
    if temperature:
        scores = scores * temperature
    chosen = scores.gather(-1, torch.tensor(list(tokens), device=scores.device)[:, None])[:, 0]
    return chosen - scores.logsumexp(-1)


def _pick(encoded: Encoded, rows: Sequence[int]) -> Encoded:
    if list(rows) == list(range(len(encoded.lengths))):
        return encoded
    index = list(rows)
    hidden, weights = (
        None if of_all is None else tuple(layer[index] for layer in of_all)
        for of_all in (encoded.hidden_states, encoded.attentions)
    )
    return Encoded(encoded.states[index], [encoded.lengths[row] for row in rows], hidden, weights)


def _as_config(settings: Mapping[str, Any]) -> GenerationConfig:
    config = GenerationConfig()
    for name, value in settings.items():
        setattr(config, name, value)
    return config
