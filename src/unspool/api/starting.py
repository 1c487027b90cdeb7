"""From what a call was given to a run that is ready: everything is checked, nothing is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, cast

from unspool.api.assistant import Assistant, follow_assistant, read_assistant, read_source
from unspool.api.core import find_object
from unspool.api.healing import heal_prompts
from unspool.api.opening import OpenedCall, find_speech, open_model, read_config
from unspool.api.precedence import follow_criteria
from unspool.api.speech import prepare_window
from unspool.cache import Cache
from unspool.callbacks import check_tokenizer
from unspool.config import GenerationConfig
from unspool.config.pairs import check_methods
from unspool.decoding.inputs import check_counted, read_prompts
from unspool.decoding.observer import Observer
from unspool.decoding.preparation import Hooks
from unspool.decoding.prompts import Prompts, continue_prompts
from unspool.decoding.run import Run
from unspool.errors import SettingError, UnsupportedError
from unspool.logits import UnbatchedClassifierFreeGuidanceLogitsProcessor
from unspool.plan import Plan, PromptShape, settle
from unspool.plan.pairs import Facts
from unspool.plan.past_keys import check_room, check_texts, read_cache
from unspool.plan.tables.calls import OF_CALL
from unspool.protocols import Compilable, Model
from unspool.stopping import as_criteria_list
from unspool.thoughts.places import require_marks

UNBUILT = {"synced_gpus": "decoding over several GPUs"}


class CallObserver(Observer, Protocol):
    """An observer that is shown the call too."""

    def begin(self, run: Run) -> None:
        """Called when the call is prepared, before its first pass."""
        ...


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
    shows_rows_alone: bool = False,
    beams: str | None = None,
    owns_cache: bool = False,
    observer: CallObserver | None = None,
    prefix_ids: Sequence[int] = (),
    assistant_model: Any = None,
    assistant_tokenizer: Any = None,
    native: bool | None = None,
    **kwargs: Any,
) -> Run:
    """Check everything and prepare a run; nothing is computed until it is iterated, except what the prompt follows
    from: token healing's one step, and a language that is found from the sound.

    `hides_padding` shows the processors what is padding, so that no row depends on the length of the others; the
    reference counts padding as tokens. With `shows_rows_alone` the caller's own functions see each prompt's rows by
    themselves, without padding; the reference's see the whole batch. With `beams="all"` every step reports the whole
    table of beams. `owns_cache` means that past_key_values is not read after the call, so that rows may leave it. An
    `observer` is shown what happens in the call. `prefix_ids` are tokens that count as written after the one prompt. A
    transformers object runs natively on its own parameters if its architecture has a native model; `native=False`
    prevents it.
    """
    if beams not in (None, "all"):
        raise SettingError(f"beams={beams!r} is not known; beams='all' streams the whole table of beams")
    if isinstance(inputs, Mapping):  # what a tokenizer returned, with all its names
        kwargs, inputs = {**inputs, **kwargs}, None
    kwargs = _check_names(kwargs)
    if (speech := find_speech(model)) is not None:
        again = partial(
            start,
            model,
            inputs,
            generation_config,
            stopping_criteria=stopping_criteria,
            prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
            tokenizer=tokenizer,
            past_key_values=past_key_values,
            use_model_defaults=use_model_defaults,
            defaults=defaults,
            beams=beams,
            prefix_ids=prefix_ids,
            assistant_model=assistant_model,
            assistant_tokenizer=assistant_tokenizer,
            native=native,
        )
        logits_processor = prepare_window(
            speech,
            kwargs,
            read_config(generation_config, model),
            logits_processor,
            use_model_defaults=use_model_defaults,
            defaults=defaults,
            assistant_model=assistant_model,
            start=again,
        )
    check_tokenizer(tokenizer)
    hooks = Hooks(
        _as_processors(logits_processor),
        [] if stopping_criteria is None else list(as_criteria_list(stopping_criteria)),
        tokenizer if tokenizer is not None else getattr(model, "tokenizer", None),
        prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
        shows_beams=beams is not None,
        owns_cache=owns_cache,
        keeps_padding=find_object(model) is not None,
        observer=observer,
        sees_rows_alone=shows_rows_alone,
    )
    opened = open_model(
        model,
        inputs,
        generation_config,
        kwargs,
        use_model_defaults=use_model_defaults,
        defaults=defaults,
        assistant_model=assistant_model,
        past_key_values=past_key_values,
        native=native,
    )
    run = _prepare(opened, hooks, prefix_ids, assistant_tokenizer, hides_padding=hides_padding)
    if observer is not None:
        run.settle_seed()
        observer.begin(run)
    return run


def _prepare(
    opened: OpenedCall, hooks: Hooks, prefix_ids: Sequence[int], assistant_tokenizer: Any, *, hides_padding: bool
) -> Run:
    """The run of a call whose model and settings are known."""
    assistant = _read_assistant(opened, hooks.tokenizer, assistant_tokenizer)
    if assistant is not None:
        hooks.assistant, hooks.vocabularies = assistant.model, assistant.vocabularies
        hooks.drafting_owner = assistant.owner
    _lead_from_nothing(opened, hooks.tokenizer)
    prompts = read_prompts(opened.model, opened.given, opened.settings, hides_padding=hides_padding)
    hooks.cache = _read_cache(opened, prompts)
    prepared = opened.given.prepared
    shape = replace(_shape(prompts, hooks.cache), end=None if prepared is None else prepared.end)
    follow_criteria(opened.settings, opened.origins, hooks.criteria, prompts, counts_rows_alone=hooks.sees_rows_alone)
    plan = _settle(opened, shape, assistant)
    if plan.settings.thoughts:
        require_marks("thoughts", hooks.tokenizer)
    prompts = read_source(prompts, opened.given, assistant, opened.model)
    if hooks.cache is not None:
        check_room(hooks.cache, plan, shape)
    core = _compile(opened.model, plan)
    _check_call(opened.settings, core, shape, hooks)
    if prompts.source is not None:
        held = 0 if hooks.cache is None else max(hooks.cache.lengths, default=0)
        check_counted(prompts, core.info, held, plan.settings.prefill_chunk_size)
    if prefix_ids:
        prompts = _continue(prompts, prefix_ids, core, plan, hooks)
    run = Run(core, prompts, plan, hooks)
    return _heal(run, opened, assistant) if plan.settings.token_healing else run


def _lead_from_nothing(opened: OpenedCall, tokenizer: Any) -> None:
    """Give guidance of an encoder-decoder without a negative prompt an empty text, as the tokenizer encodes it."""
    given, info = opened.given, opened.model.info
    scale = opened.settings.guidance_scale
    if scale in (None, 1) or not info.is_encoder_decoder or info.features is not None or tokenizer is None:
        return
    is_silent = given.negative_prompt_ids is None and given.negative_prompt_attention_mask is None
    if is_silent and given.prepared is None:
        around = tokenizer("")["input_ids"]
        given.negative_prompt_ids = [list(around)] if len(around) else None  # an encoder reads at least one token


def _check_names(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The call's other arguments, without those that would change nothing; raises for those that can't be applied."""
    for name, feature in UNBUILT.items():
        value = kwargs.pop(name, None)
        if value is not None and value is not False:
            raise UnsupportedError(f"`{name}` needs {feature}, which this version of unspool does not have yet")
    for name in ("custom_generate", "recipe"):
        if kwargs.pop(name, None) is not None:
            raise SettingError(f"`{name}` replaces the whole loop: call unspool.generate(model, input_ids, {name}=…)")
    return kwargs


def _read_assistant(opened: OpenedCall, tokenizer: Any, assistant_tokenizer: Any) -> Assistant | None:
    """The draft model, whose own drafting settings hold if the call has none."""
    given = opened.assistant_model
    if given is not None:
        assistant = read_assistant(given, opened.model, tokenizer, assistant_tokenizer)
        follow_assistant(opened.settings, opened.origins, assistant)
        return assistant
    if assistant_tokenizer is not None:
        raise SettingError(
            "`assistant_tokenizer` is a draft model's, and there is none; pass the model as assistant_model, or leave "
            "its tokenizer out"
        )
    return None


def _read_cache(opened: OpenedCall, prompts: Prompts) -> Any:
    """The cache that was given, checked; a model that runs in its own columns reads it itself."""
    if opened.given.prepared is not None:
        return opened.past_key_values
    sources = None if prompts.source is None else prompts.source.lengths
    cache = read_cache(opened.past_key_values, prompts.lengths, sources, opened.model)
    if cache is not None and sources is None and min(prompts.lengths) < prompts.width:
        check_texts(cache, prompts.list_tokens())
    return cache


def _settle(opened: OpenedCall, shape: PromptShape, assistant: Assistant | None) -> Plan:
    drafts = () if assistant is None else (assistant.model.info, assistant.relation)
    plan = settle(opened.settings, opened.origins, opened.model.info, shape, *drafts)
    if assistant is not None:
        assistant.check_tokens(plan.do_sample)
    return plan


def _check_call(settings: GenerationConfig, core: Model, shape: PromptShape, hooks: Hooks) -> None:
    """Raise for arguments of the call that can't be combined with its settings."""
    guides = [one for one in hooks.processors if isinstance(one, UnbatchedClassifierFreeGuidanceLogitsProcessor)]
    guide = type(guides[0]).__name__ if guides else None
    arguments = {"beams": "all" if hooks.shows_beams else None, "tokenizer": hooks.tokenizer, "guide": guide}
    check_methods(Facts(settings, core.info, shape, given=arguments), *OF_CALL)


def _continue(prompts: Prompts, prefix_ids: Sequence[int], core: Model, plan: Plan, hooks: Hooks) -> Prompts:
    """The prompts with `prefix_ids` after them."""
    if plan.settings.token_healing or hooks.cache is not None:
        name = "token_healing" if plan.settings.token_healing else "past_key_values"
        raise SettingError(f"`prefix_ids` go on after a prompt as it is, and `{name}` changes it; leave one out")
    return continue_prompts(prompts, prefix_ids, core.info.vocab_size, plan.max_new_tokens)


def _heal(run: Run, opened: OpenedCall, assistant: Assistant | None) -> Run:
    """The run over prompts whose last tokens were chosen again."""
    parts = run.parts
    healed, added = heal_prompts(parts.model, parts.prompts, parts.hooks.tokenizer, parts.plan.pad_token_id)
    again = Run(parts.model, healed, _settle(opened, _shape(healed, None), assistant), parts.hooks)
    again.added_texts = [text for text in added for _ in range(parts.plan.num_return_sequences)]
    return again


def _compile(core: Model, plan: Plan) -> Model:
    """The model with compiled steps, if the plan asks for them."""
    if plan.compiling is None:
        return core
    compilable = cast(Compilable, core)  # the plan has checked it
    if compilable.fast_path is not None and not plan.compiling.is_forced:
        return core
    return compilable.compiled(plan.compiling.config)


def _shape(prompts: Prompts, cache: Cache | None) -> PromptShape:
    lengths = [prompts.lengths] if prompts.source is None else [prompts.lengths, prompts.source.lengths]
    return PromptShape(
        prompts.num_rows,
        prompts.width,
        max(prompts.lengths),
        has_embeds=prompts.embeds is not None,
        is_whole=prompts.is_whole,
        has_cache=cache is not None,
        is_endless=cache is not None and cache.is_endless,
        cache_is_filled=cache is not None and any(cache.lengths),
        cache_is_plain=cache is None or ((places := cache.places()) is not None and places.is_plain),
        is_ragged=any(len(set(each)) > 1 for each in lengths),
        has_negative=prompts.negative is not None,
        longest_negative=max(prompts.negative.lengths) if prompts.negative and prompts.source is None else 0,
        hidden=prompts.num_hidden,
    )


def _as_processors(given: Any) -> list[Any]:
    if given is None:
        return []
    processors = list(given) if isinstance(given, list | tuple) else [given]
    for processor in processors:
        if isinstance(processor, type):
            name = processor.__name__
            raise SettingError(f"`logits_processor` holds the class {name}; give an object of it: {name}(…)")
        if not callable(processor):
            raise SettingError(
                f"`logits_processor` holds a {type(processor).__name__}, which can't be called. A processor is "
                "called with (input_ids, scores) and returns scores."
            )
    return processors
