"""The entry points in the reference's form: `generate(model, **inputs, **settings)`, and `stream`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch

from unspool.api.assistant import Assistant, follow_assistant, read_assistant
from unspool.api.core import as_model, find_object
from unspool.api.healing import heal_prompts
from unspool.api.precedence import follow_criteria
from unspool.api.recipes import run_recipe
from unspool.api.speech import generate_speech, prepare_window
from unspool.cache import Cache
from unspool.config import PARAMETERS, GenerationConfig
from unspool.config.pairs import ConfigFacts, check_methods
from unspool.decoding.inputs import Inputs, read_prompts
from unspool.decoding.loop import Emitted
from unspool.decoding.observer import Observer
from unspool.decoding.preparation import Hooks
from unspool.decoding.prompts import Prompts, continue_prompts
from unspool.decoding.run import Run
from unspool.errors import SettingError, UnsupportedError
from unspool.logits import UnbatchedClassifierFreeGuidanceLogitsProcessor
from unspool.models.adapters import (
    ColumnModel,
    convert_values,
    dress_output,
    drop_unknown_tokens,
    find_adapter,
    find_preparing,
    find_settings,
    fold_settings,
    list_inputs,
    open_call,
    prepare_call,
    prepare_with,
    read_settings,
    run_own_loop,
    runs_own_generate,
    wants_own_loop,
)
from unspool.outputs import Output
from unspool.plan import Plan, PromptShape, merge, settle
from unspool.plan.pairs import Facts
from unspool.plan.past_keys import check_room, read_cache
from unspool.plan.tables.calls import OF_CALL, OF_SEQUENCES, OF_STREAM
from unspool.protocols import Compilable, Model
from unspool.stopping import as_criteria_list
from unspool.streaming import StreamCancelled

_INPUT_NAMES = (
    "input_ids",
    "attention_mask",
    "inputs_embeds",
    "decoder_input_ids",
    "encoder_outputs",
    "input_features",
    "negative_prompt_ids",
    "negative_prompt_attention_mask",
)
_MODEL_INPUTS = _INPUT_NAMES[:6]  # those that a model's forward takes
_UNBUILT = {"synced_gpus": "decoding over several GPUs"}


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
    `past_key_values`, and every setting of `GenerationConfig`. `custom_generate` (or `recipe`) is a decoding method of
    somebody's own: a folder, a hub id, a shipped recipe's name, or a function; see docs/recipes.md.
    """
    if isinstance(inputs, Mapping):  # what a tokenizer or a feature extractor returned, with all its names
        kwargs, inputs = {**inputs, **kwargs}, None
    recipe = kwargs.pop("recipe", None)
    if recipe is not None and custom_generate is not None:
        raise SettingError("`recipe` and `custom_generate` are two names of one argument; give one")
    recipe = custom_generate if recipe is None else recipe
    if recipe is not None:
        usual = {
            "logits_processor": logits_processor,
            "stopping_criteria": stopping_criteria,
            "prefix_allowed_tokens_fn": prefix_allowed_tokens_fn,
            "assistant_model": assistant_model,
            "streamer": streamer,
            "negative_prompt_ids": negative_prompt_ids,
            "negative_prompt_attention_mask": negative_prompt_attention_mask,
        }
        return run_recipe(recipe, generate, start, model, inputs, generation_config, usual, kwargs)  # type: ignore[no-any-return]  # a recipe returns what it likes
    theirs = find_object(model)
    speech = _find_speech(model)
    preparing = None if theirs is None or speech is not None else find_preparing(theirs)
    if preparing is not None or (theirs is not None and wants_own_loop(theirs, generation_config, kwargs)):
        told = {
            "generation_config": generation_config,
            "logits_processor": logits_processor,
            "stopping_criteria": stopping_criteria,
            "prefix_allowed_tokens_fn": prefix_allowed_tokens_fn,
            "synced_gpus": synced_gpus,
            "assistant_model": assistant_model,
            "streamer": streamer,
            "negative_prompt_ids": negative_prompt_ids,
            "negative_prompt_attention_mask": negative_prompt_attention_mask,
            "use_model_defaults": use_model_defaults,
        }
        if preparing is None:
            return run_own_loop(theirs, inputs, told, kwargs)  # type: ignore[no-any-return]  # its own
        settings = {name: value for name, value in told.items() if value is not None} | kwargs
        first = [] if inputs is None else [inputs]
        return prepare_with(preparing, theirs, generate, *first, **settings)  # type: ignore[no-any-return]  # its own
    if speech is not None:
        given = {
            "generation_config": _read_config(generation_config),
            "logits_processor": logits_processor,
            "stopping_criteria": stopping_criteria,
            "prefix_allowed_tokens_fn": prefix_allowed_tokens_fn,
            "assistant_model": assistant_model,
            "use_model_defaults": use_model_defaults,
            "synced_gpus": synced_gpus,
            **kwargs,
        }
        if inputs is not None:
            given["input_features"] = inputs
        use = partial(_use, streamer)
        made: torch.Tensor | Output = generate_speech(
            speech, partial(start, model), given, use, is_streamed=streamer is not None
        )
        return made
    asked = {
        "synced_gpus": synced_gpus,
        "assistant_model": assistant_model,
        "negative_prompt_ids": negative_prompt_ids,
        "negative_prompt_attention_mask": negative_prompt_attention_mask,
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
    _use(streamer, run)
    finish = run.model.finish if isinstance(run.model, ColumnModel) else None
    if not run.returns_output:
        return run.sequences() if finish is None else finish(run.sequences())
    output = run.output()
    if finish is not None:
        output.sequences = finish(output.sequences)  # type: ignore[attr-defined]  # all outputs have them
    if find_object(model) is not None:
        return dress_output(output, run.model, run.prompt_mask)  # type: ignore[no-any-return]  # transformers' class
    return output


def _find_speech(model: Any) -> Model | None:
    """The model, if it reads sound and its windows are ours to cut; a transformers object's own generate() may."""
    theirs = find_object(model)
    if theirs is None:
        core = as_model(model)
    elif runs_own_generate(theirs) or (adapted := find_adapter(theirs)) is None:
        return None
    else:
        core = adapted
    return core if core.info.features is not None else None


def _use(streamer: Any, run: Run) -> None:
    """Iterate a run to its end, with the caller's streamer if there is one."""
    check_methods(ConfigFacts(run.settings), OF_SEQUENCES)
    if streamer is None:
        for _ in run:
            pass
    else:
        feed(streamer, run)


def stream(
    model: Any, inputs: Any = None, generation_config: GenerationConfig | None = None, **kwargs: Any
) -> Iterator[Emitted]:
    """What `generate` does, step by step: each row's tokens as they are chosen. Closing the iterator stops the work."""
    run = start(model, inputs, generation_config, **kwargs)
    check_methods(ConfigFacts(run.settings), OF_STREAM)
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
    observer: Observer | None = None,
    prefix_ids: Sequence[int] = (),
    assistant_model: Any = None,
    assistant_tokenizer: Any = None,
    native: bool | None = None,
    **kwargs: Any,
) -> Run:
    """Check everything and prepare a run; nothing is computed until it is iterated, except token healing's one step.

    `hides_padding` shows the processors what is padding, so that no row depends on the length of the others; the
    reference counts padding as tokens. With `beams="all"` every step reports the whole table of beams. `owns_cache`
    means that past_key_values is not read after the call, so that rows may leave it. An `observer` is shown what
    happens in the call. `prefix_ids` are tokens that count as written after the one prompt. A transformers object runs
    natively on its own parameters if its architecture has a native model; `native=False` prevents it.
    """
    if beams not in (None, "all"):
        raise SettingError(f"beams={beams!r} is not known; beams='all' streams the whole table of beams")
    tokenizer = tokenizer if tokenizer is not None else getattr(model, "tokenizer", None)
    theirs = find_object(model)
    if isinstance(inputs, Mapping):  # what a tokenizer returned, with all its names
        kwargs, inputs = {**inputs, **kwargs}, None
    kwargs = convert_values(kwargs)
    for name, feature in _UNBUILT.items():
        value = kwargs.pop(name, None)
        if value is not None and value is not False:
            raise UnsupportedError(f"`{name}` needs {feature}, which this version of unspool does not have yet")
    for name in ("custom_generate", "recipe"):
        if kwargs.pop(name, None) is not None:
            raise SettingError(f"`{name}` replaces the whole loop: call unspool.generate(model, input_ids, {name}=…)")
    given_config, generation_config = generation_config, _read_config(generation_config)
    speech = _find_speech(model)
    if speech is not None:
        logits_processor = prepare_window(
            speech,
            kwargs,
            generation_config,
            logits_processor,
            use_model_defaults=use_model_defaults,
            defaults=defaults,
            start=partial(start, model),
        )
    given = Inputs(**{name: kwargs.pop(name) for name in _INPUT_NAMES if name in kwargs})
    if inputs is not None and given.input_ids is not None:
        raise SettingError("`inputs` and `input_ids` are two names of the same argument; pass one")
    extra = {} if theirs is None else _take_extra(theirs, kwargs, given)
    own = as_model(model) if theirs is None else None
    model_config = read_settings(theirs) if own is None else getattr(own, "generation_config", None)
    model_config = None if use_model_defaults is False else model_config
    if theirs is not None and generation_config is not None and generation_config is not given_config:
        model_config, generation_config = fold_settings(model_config, generation_config), None
    settings, origins = merge(model_config, generation_config, kwargs, defaults)
    core = own
    if own is not None and native is not None:
        raise SettingError("`native` says how a transformers object is run, and this model is unspool's; leave it out")
    if core is None:
        extra |= {"past_key_values": past_key_values}
        extra |= {"native": native}
        core, assistant_model, past_key_values = _open_object(theirs, inputs, given, extra, settings, assistant_model)
    elif inputs is not None:
        given.input_ids = inputs
    assistant = _read_assistant(assistant_model, core, tokenizer, assistant_tokenizer)
    if assistant is not None:
        follow_assistant(settings, origins, assistant_model)
    drafts = () if assistant is None else (assistant.model.info, assistant.relation)
    prompts = read_prompts(core, given, settings, hides_padding=hides_padding)
    sources = None if prompts.source is None else prompts.source.lengths
    cache = past_key_values
    if given.prepared is None:
        cache = read_cache(past_key_values, prompts.lengths, sources, core)
    shape = _shape(prompts, cache)
    criteria = [] if stopping_criteria is None else list(as_criteria_list(stopping_criteria))
    follow_criteria(settings, origins, criteria, prompts)
    plan = settle(settings, origins, core.info, shape, *drafts)
    core = _compile(core, plan)
    if assistant is not None:
        assistant.check_tokens(plan.do_sample)
    if cache is not None:
        check_room(cache, plan, shape)
    processors = [] if logits_processor is None else _as_processors(logits_processor)
    guide = next((one for one in processors if isinstance(one, UnbatchedClassifierFreeGuidanceLogitsProcessor)), None)
    arguments = {"beams": beams, "tokenizer": tokenizer, "guide": None if guide is None else type(guide).__name__}
    check_methods(Facts(settings, core.info, shape, given=arguments), *OF_CALL)
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
        observer=observer,
    )
    if prefix_ids:
        if settings.token_healing or cache is not None:
            name = "token_healing" if settings.token_healing else "past_key_values"
            raise SettingError(f"`prefix_ids` go on after a prompt as it is, and `{name}` changes it; leave one out")
        prompts = continue_prompts(prompts, prefix_ids, core.info.vocab_size, plan.max_new_tokens)
    run = Run(core, prompts, plan, hooks)
    if settings.token_healing:
        healed, added = heal_prompts(core, prompts, tokenizer, plan.pad_token_id)
        run = Run(core, healed, settle(settings, origins, core.info, _shape(healed, None), *drafts), hooks)
        run.added_texts = [text for text in added for _ in range(plan.num_return_sequences)]
    if observer is not None:
        run.settle_seed()
        observer.begin(run)
    return run


def _take_extra(model: Any, kwargs: dict[str, Any], given: Inputs) -> dict[str, Any]:
    """What a transformers object's forward takes beside the usual inputs, out of the call's arguments."""
    names = list_inputs(model) - set(PARAMETERS)
    if given.input_features is not None and "input_features" not in names:
        raise SettingError(f"generate() has no setting 'input_features' for a {type(model).__name__}")
    return {name: kwargs.pop(name) for name in list(kwargs) if name in names}


def _open_object(
    model: Any, inputs: Any, given: Inputs, extra: Mapping[str, Any], settings: GenerationConfig, assistant: Any
) -> tuple[Model, Any, Any]:
    """The model, the drafting model and the cache of a call with a transformers object."""
    everything = {name: getattr(given, name) for name in _MODEL_INPUTS} | dict(extra)
    core = open_call(model, inputs, everything, settings, everything.pop("native"))
    drop_unknown_tokens(settings, core.info.vocab_size)
    if not isinstance(core, ColumnModel):
        if inputs is not None:
            setattr(given, "input_features" if core.info.features is not None else "input_ids", inputs)
        return core, assistant, everything["past_key_values"]
    given.prepared = core.prepared
    settings.compile_config = settings.compile = None  # transformers compiles it
    if (drafting := find_object(assistant)) is not None:
        assistant = prepare_call(drafting, inputs, {**everything, "past_key_values": None}, settings, core.call.why)
    return core, assistant, core.given_cache


def _read_config(config: Any) -> GenerationConfig | None:
    """The caller's settings: ours, or transformers' converted to ours."""
    found = config if config is None or isinstance(config, GenerationConfig) else find_settings(config)
    if config is not None and found is None:
        raise SettingError(f"generation_config must be a GenerationConfig, not a {type(config).__name__}")
    return found


def _compile(core: Model, plan: Plan) -> Model:
    """The model with compiled steps, if the plan asks for them."""
    if plan.compiling is None:
        return core
    compilable = cast(Compilable, core)  # the plan has checked it
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


def feed(streamer: Any, run: Run, steps: Iterable[Emitted] | None = None) -> None:
    """Give a streamer (`put` and `end`) the prompt, then every step's tokens: one per row, or several of one row.

    The steps are the run's own, or those that somebody else drives.
    """
    pad = run.pad_token_id
    if run.num_rows > 1 and run.has_bursts:
        raise SettingError(
            f"a streamer takes one token of each row a step, and {run.num_rows} rows get different numbers of them "
            "from beams or a drafter; stream one row, or use stream() and lm.stream()"
        )
    try:
        streamer.put(run.prompt_ids.cpu())
        for emitted in run if steps is None else steps:
            if run.num_rows == 1:
                tokens = emitted.tokens.get(0, [])
            else:
                tokens = [emitted.tokens.get(row, [pad])[-1] for row in range(run.num_rows)]
            if tokens:
                streamer.put(torch.tensor(tokens))
    except StreamCancelled:
        pass
    except BaseException as error:
        # A reader in another thread must not wait for ever.
        if hasattr(streamer, "fail"):
            streamer.fail(error)
        else:
            streamer.end()
        raise
    streamer.end()


def _as_processors(given: Any) -> list[Any]:
    processors = list(given) if isinstance(given, list | tuple) else [given]
    for processor in processors:
        if not callable(processor):
            raise SettingError(
                f"`logits_processor` holds a {type(processor).__name__}, which can't be called. A processor is "
                "called with (input_ids, scores) and returns scores."
            )
    return processors
