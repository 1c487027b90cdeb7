"""The front door in the reference's manner: `generate(model, **inputs, **settings)`, and the stream under it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import torch

from unspool.api.assistant import Assistant, follow_assistant, read_assistant
from unspool.api.core import as_model
from unspool.api.healing import heal_prompts
from unspool.cache import Cache, DynamicCache, EncoderDecoderCache, MambaCache
from unspool.config import GenerationConfig
from unspool.decoding.inputs import Inputs, read_prompts
from unspool.decoding.loop import Emitted
from unspool.decoding.preparation import Hooks
from unspool.decoding.prompts import Prompts
from unspool.decoding.run import Run
from unspool.errors import SettingError, UnsupportedError
from unspool.logits import UnbatchedClassifierFreeGuidanceLogitsProcessor
from unspool.models.adapters import find_settings
from unspool.outputs import Output
from unspool.plan import Plan, PromptShape, merge, settle
from unspool.protocols import Compilable, Model
from unspool.stopping import as_criteria_list
from unspool.streaming import StreamCancelled

_INPUT_NAMES = (
    "input_ids",
    "attention_mask",
    "inputs_embeds",
    "decoder_input_ids",
    "encoder_outputs",
    "negative_prompt_ids",
    "negative_prompt_attention_mask",
)
_UNBUILT = {
    "synced_gpus": "decoding over several GPUs",
    "custom_generate": "custom decoding methods",
}


def generate(
    model: Any,
    inputs: Any = None,
    generation_config: GenerationConfig | None = None,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    prefix_allowed_tokens_fn: Any = None,
    synced_gpus: bool | None = None,
    assistant_model: Any = None,
    streamer: Any = None,
    negative_prompt_ids: Any = None,
    negative_prompt_attention_mask: Any = None,
    use_model_defaults: bool | None = None,
    custom_generate: Any = None,
    **kwargs: Any,
) -> torch.Tensor | Output:
    """Generate token ids: a tensor (rows, length), or an output object with `return_dict_in_generate=True`.

    Beside these arguments it takes the model's inputs (`input_ids`, `attention_mask`, `inputs_embeds`, …), a
    `tokenizer` for `stop_strings` (and, with an `assistant_tokenizer`, for a draft model of another vocabulary),
    `past_key_values`, and every setting of `GenerationConfig`.
    """
    asked = {
        "synced_gpus": synced_gpus,
        "assistant_model": assistant_model,
        "negative_prompt_ids": negative_prompt_ids,
        "negative_prompt_attention_mask": negative_prompt_attention_mask,
        "custom_generate": custom_generate,
    }
    run = start(
        model,
        inputs,
        generation_config,
        logits_processor=logits_processor,
        stopping_criteria=stopping_criteria,
        prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
        use_model_defaults=use_model_defaults,
        **asked,
        **kwargs,
    )
    if run.tells_logprobs and not run.returns_output:
        raise SettingError(
            "log-probabilities were asked for, and only an output object can carry them; "
            "add return_dict_in_generate=True, or use lm.generate()"
        )
    if run.tells_beams and not run.returns_output:
        raise SettingError(
            "`return_beam_trace` was asked for, and only an output object can carry the trace; "
            "add return_dict_in_generate=True, or use lm.generate()"
        )
    if streamer is None:
        for _ in run:
            pass
    else:
        feed(streamer, run)
    return run.output() if run.returns_output else run.sequences()


def stream(
    model: Any, inputs: Any = None, generation_config: GenerationConfig | None = None, **kwargs: Any
) -> Iterator[Emitted]:
    """What `generate` does, step by step: each row's tokens as they are chosen. Closing the iterator stops the work."""
    run = start(model, inputs, generation_config, **kwargs)
    if run.tells_beams:
        raise SettingError(
            "`return_beam_trace` is told at the end, and a stream has no place for it: use generate(), or beams='all' "
            "for the table of beams at every step"
        )
    return iter(run)


def start(
    model: Any,
    inputs: Any = None,
    generation_config: GenerationConfig | None = None,
    *,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    prefix_allowed_tokens_fn: Any = None,
    tokenizer: Any = None,
    past_key_values: Any = None,
    use_model_defaults: bool | None = None,
    defaults: Mapping[str, Any] | None = None,
    hides_padding: bool = False,
    beams: str | None = None,
    owns_cache: bool = False,
    assistant_model: Any = None,
    assistant_tokenizer: Any = None,
    **kwargs: Any,
) -> Run:
    """Check everything and prepare a run; nothing is computed until it is iterated, but for token healing's one step.

    `hides_padding` tells the processors what is padding, so that no row depends on how long the others are; the
    reference's manner is to count it as tokens. `beams="all"` has every step tell the whole table of beams.
    `owns_cache` says that nobody reads past_key_values after the call, so that rows may leave it.
    """
    if beams not in (None, "all"):
        raise SettingError(f"beams={beams!r} is not known; beams='all' streams the whole table of beams")
    tokenizer = tokenizer if tokenizer is not None else getattr(model, "tokenizer", None)
    core = as_model(model)
    for name, feature in _UNBUILT.items():
        value = kwargs.pop(name, None)
        if value is not None and value is not False:
            raise UnsupportedError(f"`{name}` needs {feature}, which this version of unspool does not have yet")
    generation_config = _read_config(generation_config)
    given = Inputs(**{name: kwargs.pop(name) for name in _INPUT_NAMES if name in kwargs})
    if inputs is not None:
        if given.input_ids is not None:
            raise SettingError("`inputs` and `input_ids` are two names of the same argument; pass one")
        given.input_ids = inputs
    model_config = None if use_model_defaults is False else getattr(core, "generation_config", None)
    settings, origins = merge(model_config, generation_config, kwargs, defaults)
    assistant = _read_assistant(assistant_model, core, tokenizer, assistant_tokenizer)
    if assistant is not None:
        follow_assistant(settings, origins, assistant_model)
    drafts = () if assistant is None else (assistant.model.info, assistant.relation)
    prompts = replace(read_prompts(core, given, settings), hides_padding=hides_padding)
    cache = _as_cache(past_key_values, prompts, core)
    shape = _shape(prompts, cache)
    plan = settle(settings, origins, core.info, shape, *drafts)
    core = _compile(core, plan)
    if assistant is not None:
        assistant.check_tokens(plan.do_sample)
    if beams is not None and plan.num_beams == 1:
        raise SettingError("beams='all' streams the table of a beam search; add num_beams")
    if cache is not None:
        _check_room(cache, plan, shape)
    if settings.stop_strings is not None and tokenizer is None:
        raise SettingError("`stop_strings` are found in text: pass the model's `tokenizer` too")
    processors = [] if logits_processor is None else _as_processors(logits_processor)
    _refuse_guiding_twice(plan, processors)
    criteria = [] if stopping_criteria is None else list(as_criteria_list(stopping_criteria))
    hooks = Hooks(
        processors,
        criteria,
        tokenizer,
        cache,
        prefix_allowed_tokens_fn,
        None if assistant is None else assistant.model,
        None if assistant is None else assistant.vocabularies,
        shows_beams=beams is not None,
        owns_cache=owns_cache,
    )
    run = Run(core, prompts, plan, hooks)
    if not settings.token_healing:
        return run
    if cache is not None:
        raise SettingError("`token_healing` chooses the last token again, and past_key_values may hold it; give one")
    healed, added = heal_prompts(core, prompts, tokenizer, plan.pad_token_id)
    run = Run(core, healed, settle(settings, origins, core.info, _shape(healed, None), *drafts), hooks)
    run.added_texts = [text for text in added for _ in range(plan.num_return_sequences)]
    return run


def _read_config(config: Any) -> GenerationConfig | None:
    """The caller's settings: ours, or transformers' put into ours."""
    found = config if config is None or isinstance(config, GenerationConfig) else find_settings(config)
    if config is not None and found is None:
        raise SettingError(f"generation_config must be a GenerationConfig, not a {type(config).__name__}")
    return found


def _compile(core: Model, plan: Plan) -> Model:
    """The model with compiled steps, where the plan asks for them."""
    if plan.compiling is None:
        return core
    compilable = cast(Compilable, core)  # the plan knows that it can
    if compilable.fast_path is not None and not plan.compiling.is_forced:
        return core
    return compilable.compiled(plan.compiling.config)


def _read_assistant(assistant: Any, core: Model, tokenizer: Any, assistant_tokenizer: Any) -> Assistant | None:
    if assistant is not None:
        return read_assistant(assistant, core, tokenizer, assistant_tokenizer)
    if assistant_tokenizer is not None:
        raise SettingError(
            "`assistant_tokenizer` is a draft model's, and there is none; pass the model as assistant_model, or leave "
            "its tokenizer out"
        )
    return None


def _shape(prompts: Prompts, cache: Cache | None) -> PromptShape:
    lengths = [prompts.lengths] if prompts.source is None else [prompts.lengths, prompts.source.lengths]
    return PromptShape(
        prompts.num_rows,
        prompts.width,
        max(prompts.lengths),
        has_embeds=prompts.embeds is not None,
        has_cache=cache is not None,
        is_endless=cache is not None and cache.is_endless,
        cache_is_filled=cache is not None and any(cache.lengths),
        cache_is_plain=cache is None or ((places := cache.places()) is not None and places.is_plain),
        is_ragged=any(len(set(each)) > 1 for each in lengths),
        has_negative=prompts.negative is not None,
        longest_negative=max(prompts.negative.lengths) if prompts.negative and prompts.source is None else 0,
    )


def feed(streamer: Any, run: Run) -> None:
    """Give a streamer (`put` and `end`) the prompt, then every step's tokens: one a row, or one row's several."""
    pad = run.pad_token_id
    if run.num_rows > 1 and run.has_bursts:
        raise SettingError(
            f"a streamer takes one token of each row a step, and {run.num_rows} rows get different numbers of them "
            "from beams or a drafter; stream one row, or use stream() and lm.stream()"
        )
    try:
        streamer.put(run.prompt_ids.cpu())
        for emitted in run:
            if run.num_rows == 1:
                tokens = emitted.tokens.get(0, [])
            else:
                tokens = [emitted.tokens.get(row, [pad])[-1] for row in range(run.num_rows)]
            if tokens:
                streamer.put(torch.tensor(tokens))
    except StreamCancelled:
        pass
    except BaseException as error:
        # Whoever reads the stream in another thread must not wait for ever.
        if hasattr(streamer, "fail"):
            streamer.fail(error)
        else:
            streamer.end()
        raise
    streamer.end()


def _as_cache(cache: Any, prompts: Prompts, model: Model) -> Cache | None:
    if cache is None:
        return None
    info, lengths = model.info, prompts.lengths
    kind = EncoderDecoderCache if info.is_encoder_decoder else DynamicCache
    keeps_states = "state" in info.layer_kinds
    if keeps_states and not isinstance(cache, MambaCache):
        raise SettingError(
            f"past_key_values is a {type(cache).__name__}, and a {info.family} model keeps states: give the "
            "MambaCache that an earlier call returned, or one of model.new_cache()"
        )
    if isinstance(cache, MambaCache) and not keeps_states:
        raise SettingError(
            f"past_key_values is a MambaCache, which holds states, and a {info.family} model decodes with keys; "
            f"give a {kind.__name__}"
        )
    if isinstance(cache, tuple | list):
        try:
            cache = kind.from_legacy_cache(tuple(cache))
        except (TypeError, ValueError, IndexError, AttributeError) as error:
            raise SettingError(
                f"past_key_values as a tuple must hold each layer's keys and values, as {kind.__name__}"
                f".to_legacy_cache() gives them: {error}"
            ) from error
    if not isinstance(cache, Cache):
        raise SettingError(f"past_key_values must be a cache of unspool's, not a {type(cache).__name__}")
    if isinstance(cache, EncoderDecoderCache) != info.is_encoder_decoder:
        raise SettingError(
            f"past_key_values is a {type(cache).__name__}, and a {info.family} model decodes with a {kind.__name__}"
        )
    if isinstance(cache, EncoderDecoderCache) and not cache.source_lengths:
        raise SettingError(
            "past_key_values hold nothing of the encoder's states; leave them out (the cache comes back with "
            "return_dict_in_generate=True), or make them with model.new_cache(encoded=model.encode(…))"
        )
    shape = getattr(model, "key_shape", None)
    misfit = cache.find_misfit(shape) if shape is not None else None
    if misfit is not None:
        raise SettingError(
            f"past_key_values are of another model than this {info.family}: {misfit}; use the cache that this model "
            "filled, or a fresh one (model.new_cache())"
        )
    if cache.is_endless and not keeps_states and "shifted_keys" not in info.can:
        raise UnsupportedError(
            f"a {type(cache).__name__} moves keys to other positions, and a {info.family} model's are learned one by "
            "one; use a model with rotary positions or ALiBi, or a DynamicCache"
        )
    if cache.lengths and len(cache.lengths) != len(lengths):
        raise SettingError(f"past_key_values hold {len(cache.lengths)} rows and the prompt has {len(lengths)}")
    if prompts.source is not None:
        _check_sources(cache, prompts.source.lengths)
    for row, (held, length) in enumerate(zip(cache.lengths, lengths, strict=False)):
        if held >= length:
            raise SettingError(
                f"past_key_values hold {held} positions of row {row} and its prompt has {length} tokens; pass the "
                "whole sequence as input_ids, with at least one token after what the cache holds"
            )
    return cache


def _check_sources(cache: Cache, lengths: list[int]) -> None:
    assert isinstance(cache, EncoderDecoderCache)
    held = [length for length in cache.source_lengths for _ in range(cache.num_branches)]
    if len(held) != len(lengths):
        raise SettingError(
            f"past_key_values hold encoded texts for {len(held)} rows and the encoder's input has {len(lengths)}"
        )
    for row, (had, has) in enumerate(zip(held, lengths, strict=True)):
        if had != has:
            raise SettingError(
                f"past_key_values hold an encoded text of {had} positions for row {row} and the encoder's input has "
                f"{has}; pass the input that they were made from, with its attention_mask"
            )


def _check_room(cache: Cache, plan: Plan, shape: PromptShape) -> None:
    room = cache.room
    needed = shape.longest_read + plan.max_new_tokens - 1 + plan.num_candidates  # else the last token is never read
    num_rows, held_rows = 2 * shape.num_rows, getattr(cache, "max_batch_size", None)
    if plan.guidance_scale is not None and held_rows is not None and held_rows < num_rows:
        raise SettingError(
            f"past_key_values have room for {held_rows} rows, and guidance reads {num_rows}: every prompt's and its "
            "other one's; make a larger cache, or leave it out"
        )
    if room is not None and room < needed:
        raise SettingError(
            f"past_key_values have room for {room} positions, and a prompt of {shape.longest} tokens with "
            f"{plan.max_new_tokens} new ones needs {needed}, {needed - room} more; make a larger cache, or lower "
            "max_new_tokens"
        )


def _refuse_guiding_twice(plan: Plan, processors: list[Any]) -> None:
    own = next((p for p in processors if isinstance(p, UnbatchedClassifierFreeGuidanceLogitsProcessor)), None)
    if own is not None and plan.guidance_scale is not None:
        raise SettingError(
            f"`guidance_scale` and a {type(own).__name__} among the logits_processor ask for the same thing twice; "
            "give one of them"
        )


def _as_processors(given: Any) -> list[Any]:
    processors = list(given) if isinstance(given, list | tuple) else [given]
    for processor in processors:
        if not callable(processor):
            raise SettingError(
                f"`logits_processor` holds a {type(processor).__name__}, which can't be called. A processor is "
                "called with (input_ids, scores) and returns scores."
            )
    return processors
