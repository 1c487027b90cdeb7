"""Recognising a transformers model, and finding the adapter that can serve a call."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final

import torch

from unspool.cache import Cache
from unspool.config import GenerationConfig
from unspool.config.theirs import is_theirs
from unspool.errors import MissingExtraError, UnsupportedError
from unspool.models.adapters.columns import ColumnModel, has_codebooks, prepare_call, prepare_codebooks
from unspool.models.adapters.columns.own_settings import list_own_processors, overrides
from unspool.models.adapters.decoder import AdaptedDecoder
from unspool.models.adapters.description import (
    describe,
    describe_half,
    find_text_config,
    has_leading_streams,
    reads_states,
)
from unspool.models.adapters.hooks import check_followed, find_preparing_hook
from unspool.models.adapters.kept import find_kept
from unspool.models.adapters.modules import find_misplaced, walk
from unspool.models.adapters.pair import AdaptedHalf, AdaptedPair
from unspool.models.adapters.settings import ObjectSettings, convert_settings, name_static_kind
from unspool.models.adapters.twin import TwinAnswer, ask_twin, explain_change, keeps_states
from unspool.models.native import NativeModel
from unspool.plan import find_marking_pad

Adapted = AdaptedDecoder | AdaptedPair
NATIVE = "_unspool_runs_natively"  # attribute of a model that was attached: whether it runs natively
_FREE = ("logits_to_keep", "labels")  # inputs that change nothing about the answer
_STATIC = ("static", "offloaded_static", "hybrid")


def is_transformers_model(model: Any) -> bool:
    """Whether an object is a transformers model or a subclass of one; imports nothing."""
    return is_theirs(model, "PreTrainedModel")


def adapt(model: Any) -> Adapted:
    """The adapter of a transformers model: the same one every time, until its config changes."""
    seen = repr(getattr(model.config, "__dict__", None))  # windows, the attention implementation
    kept = find_kept(model)
    known = kept.get("adapter")
    if known is None or known[0] != seen:
        description = describe(model)
        kind = AdaptedPair if description.info.is_encoder_decoder else AdaptedDecoder
        known = kept["adapter"] = (seen, kind(model, description))
    adapter: Adapted = known[1]
    return adapter


def adapt_half(model: Any) -> AdaptedHalf | None:
    """The adapter of a decoder alone as a draft model that reads another model's encoder; None if it is not one."""
    if not reads_states(model):
        return None
    kept = find_kept(model)
    known: AdaptedHalf | None = kept.get("half")
    if known is None:
        known = kept["half"] = AdaptedHalf(model, describe_half(model))
    return known


def set_native(model: Any, native: bool | None) -> None:
    """Whether calls that do not say run a model natively; None: if they can."""
    model.__dict__.pop(NATIVE, None)
    if native is not None:
        model.__dict__[NATIVE] = native


def runs_natively(model: Any, native: bool | None) -> bool:
    """Whether a call may run an object natively: as it says, or as the object was attached."""
    return bool(model.__dict__.get(NATIVE, True) if native is None else native)


def find_mixin() -> Any:
    """The class of transformers whose `generate` all its models have."""
    try:
        from transformers.generation.utils import GenerationMixin
    except ImportError as error:
        raise MissingExtraError("transformers", "transformers", "attach()") from error
    return GenerationMixin


def find_adapter(model: Any) -> Adapted | None:
    """The adapter over our caches; None for a model that has none."""
    try:
        return adapt(model)
    except UnsupportedError:
        return None


def find_owner(model: Any) -> ObjectSettings:
    """What holds a transformers object's own settings."""
    return find_adapter(model) or ObjectSettings(model)


def has_own_loop(model: Any) -> bool:
    """Whether a model's class has a decoding loop of its own, which no other can take the place of."""
    return overrides(model, "_sample") or overrides(model, "_beam_search")


def ends_itself(model: Any) -> bool:
    """Whether a model's class ends texts by a criterion of its own, over what it counts itself after every pass."""
    return overrides(model, "_get_stopping_criteria") and not has_own_loop(model)


def runs_own_generate(model: Any) -> bool:
    """Whether a generate() of the model's own class is under way, and has called ours for a part of its work."""
    own = getattr(type(model), "generate", None)
    code = None if own is None else getattr(inspect.unwrap(own), "__code__", None)
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is code and frame.f_locals.get("self") is model:
            return True
        frame = frame.f_back
    return False


def list_inputs(model: Any) -> frozenset[str]:
    """The names of everything that a model's forward, its encoder's and its preparation of inputs take."""
    found: set[str] = {"logits_to_keep"}
    parts = [model, getattr(model, "encoder", None), getattr(model, "decoder", None)]
    base = getattr(model, getattr(model, "base_model_prefix", "") or "model", None)
    parts += [getattr(base, "encoder", None)]
    for part in parts:
        if part is not None and hasattr(part, "forward"):
            found |= set(inspect.signature(part.forward).parameters)
    decoder = getattr(model, "decoder", None) or getattr(base, "decoder", None)
    if getattr(model.config, "is_encoder_decoder", False) and decoder is not None:
        found |= {f"decoder_{name}" for name in inspect.signature(decoder.forward).parameters}
    if hasattr(model, "prepare_inputs_for_generation"):
        found |= set(inspect.signature(model.prepare_inputs_for_generation).parameters)
    return frozenset(found - {"self", "args", "kwargs", "model_kwargs", "return_dict", "past_key_values"})


def open_call(
    model: Any,
    inputs: Any,
    given: Mapping[str, Any],
    settings: GenerationConfig,
    native: bool | None = None,
) -> AdaptedDecoder | AdaptedPair | ColumnModel | NativeModel:
    """The model that serves a call: over our caches, or, if the call or the model needs it, over transformers' own.

    An object whose architecture has a native model runs natively on its own parameters, unless `native` is False; None
    means as it was attached.
    """
    check_followed(model, "call unspool.generate(model, …), which has that loop run, or model.generate(…)")
    if has_codebooks(model):
        return prepare_codebooks(model, inputs, given, settings)
    if has_own_loop(model):
        raise UnsupportedError(
            f"{type(model).__name__} has a decoding loop of its own, which chooses more than one token a step; use its "
            "own generate()"
        )
    if ends_itself(model):
        raise UnsupportedError(
            f"{type(model).__name__} ends its texts by a criterion of its own, which counts what its passes read; use "
            "its own generate()"
        )
    own = list_own_processors(model, settings)
    if own:
        raise UnsupportedError(
            f"{type(model).__name__} makes a {own[0]} of its settings, by a rule of its own; give one in "
            "`logits_processor` and leave these settings out, or use its own generate()"
        )
    is_pair = bool(getattr(model.config, "is_encoder_decoder", False))
    name_static_kind(settings, is_pair=is_pair)
    if given.get("inputs_embeds") is not None and not is_pair:
        settings.use_cache = True  # as transformers does: what follows embeddings is tokens
    native = runs_natively(model, native)
    why, found = _explain_call(model, given, settings), TwinAnswer(None)
    if why is None and native and keeps_states(model) and _hides_states(inputs, given, settings):
        found = ask_twin(model)
        if found.native is not None:
            return found.native
    why = why or _explain_adapter(model, inputs, given, settings)
    if why is not None and found.reason:
        why = f"{why}; {found.reason}"
    if why is None:
        reason = _explain_cache(model, inputs, given, settings) if native else ""
        found = ask_twin(model) if native and not reason else _find_change(model)
        if found.native is not None:
            return found.native
        adapter, reason = adapt(model), reason or found.reason
        why = _explain_parts(model) or _explain_keys(adapter, settings)
        if why is None and found.is_changed and _goes_in_columns(given, settings):
            why = found.reason
        if why is None:
            adapter.why_not_native = reason
            return adapter
    core = prepare_call(model, inputs, given, settings, why)
    core.call.is_changed = found.is_changed
    if settings.compile_config is not None or settings.compile:
        core.call.compiling = settings.compile_config
    return core


def _find_change(model: Any) -> TwinAnswer:
    """What of an object is not as its class says, where no native model is asked for."""
    reason = explain_change(model)
    return TwinAnswer(None, reason, is_changed=bool(reason))


def _goes_in_columns(given: Mapping[str, Any], settings: GenerationConfig) -> bool:
    """Whether an object that was changed can run as transformers runs it: code that was put into it may look at the
    columns of a batch, its mask, or its cache, which are others over ours. What transformers has no form of runs over
    ours all the same."""
    is_ours = isinstance(given.get("past_key_values"), Cache)
    is_theirs = settings.cache_implementation in (None, "dynamic", *_STATIC, "offloaded")
    return not is_ours and is_theirs and settings.prompt_logprobs is None and settings.prefill_chunk_size is None


def _explain_call(model: Any, given: Mapping[str, Any], settings: GenerationConfig) -> str | None:
    """Why a call runs over transformers' own cache, whatever the model is; None if it need not."""
    kind = type(model).__name__
    hook = find_preparing_hook(model)
    if hook is not None:
        return f"the {hook}() of this {kind} is not transformers' own"
    past = given.get("past_key_values")
    if past is not None and not isinstance(past, Cache | tuple | list):
        return f"past_key_values are transformers' {type(past).__name__}"
    extra = [
        name
        for name, value in given.items()
        if value is not None and name not in (*MODEL_INPUTS, "past_key_values", *_FREE)
    ]
    if extra:
        return f"{kind} is given {', '.join(sorted(extra))}"
    if settings.compile_config is not None:
        return f"{kind} is compiled by transformers"
    mask = given.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.dim() == 2 and not bool(mask.bool().any(dim=-1).all()):
        return "a row's attention_mask has no ones"
    is_pair = bool(getattr(model.config, "is_encoder_decoder", False))
    if is_pair and (settings.output_hidden_states or settings.output_attentions):
        return "an encoder's states are returned in the columns that it was given"
    if settings.output_hidden_states and has_leading_streams(find_text_config(model)):
        return f"the hidden states of {kind} have several streams"
    if settings.return_dict_in_generate and settings.cache_implementation in _STATIC:
        return "a static cache of transformers is returned"
    return None


def _hides_states(inputs: Any, given: Mapping[str, Any], settings: GenerationConfig) -> bool:
    """Whether no caller sees the states that a native model keeps, which have another form, and rows are whole."""
    is_seen = settings.return_dict_in_generate or settings.cache_implementation is not None
    is_begun = given.get("past_key_values") is not None or given.get("inputs_embeds") is not None
    return not (is_seen or is_begun or _has_padding(inputs, given, settings))


def _explain_adapter(model: Any, inputs: Any, given: Mapping[str, Any], settings: GenerationConfig) -> str | None:
    """Why a model runs over transformers' own cache; None if the adapter can give it ours."""
    kind = type(model).__name__
    try:
        core = adapt(model)
        if given.get("input_features") is not None and core.info.features is None:
            return f"{kind} is given input_features"
        if core.counts_columns and _has_padding(inputs, given, settings):
            return f"{kind} counts positions by columns, padding among them"
        if _has_uncounted(core, given):
            return f"{kind} does not count pad tokens among positions"
    except UnsupportedError as error:
        if not getattr(model, "can_generate", lambda: False)():
            raise
        return str(error).split(";")[0].split(". ")[0]
    return None


def _explain_parts(model: Any) -> str | None:
    """Why a model is run as transformers runs it that is more than a text decoder, whose code may ask a cache for
    anything, or one whose layers were moved; None if it is a text decoder as it was made."""
    config = model.config
    is_pair = bool(getattr(config, "is_encoder_decoder", False))  # whose text config may be a copy
    if getattr(type(config), "sub_configs", None) or not (is_pair or find_text_config(model) is config):
        return f"{type(model).__name__} has parts beside its text decoder"
    return find_misplaced(walk(model))  # a native model's object was looked through when it was made, and is the same


def _explain_keys(adapter: Adapted, settings: GenerationConfig) -> str | None:
    """Why a kind of cache that takes memory for keys of one shape must be transformers'; None if ours can be it."""
    is_kind_of_both = settings.cache_implementation in (*_STATIC, "offloaded", "offloaded_hybrid")
    if not is_kind_of_both or not isinstance(adapter, AdaptedDecoder) or adapter.has_even_keys:
        return None
    return f"the layers of {type(adapter.inner).__name__} have keys of different shapes"


def _explain_cache(model: Any, inputs: Any, given: Mapping[str, Any], settings: GenerationConfig) -> str:
    """Why the cache of a call must have keys in the object's own order, which a native model's have not."""
    if given.get("past_key_values") is not None:
        return "past_key_values are of its own forward"
    if settings.return_dict_in_generate and settings.cache_implementation not in (None, "dynamic"):
        return f"a {settings.cache_implementation} cache is returned"
    may_pad = settings.return_dict_in_generate and not _is_one_text(inputs, given, settings)
    if may_pad and adapt(model).description.uncounted_id is not None:
        return "a cache is returned, and rows that end first have no positions for the padding in it"
    return ""


def _is_one_text(inputs: Any, given: Mapping[str, Any], settings: GenerationConfig) -> bool:
    """Whether a call writes one text alone, behind whose end nothing is padded."""
    sources = [inputs, given.get("input_ids"), given.get("inputs_embeds")]
    rows = {len(one) for one in sources if isinstance(one, torch.Tensor)}
    return rows == {1} and settings.num_beams in (None, 1) and settings.num_return_sequences in (None, 1)


def _has_uncounted(core: Adapted, given: Mapping[str, Any]) -> bool:
    """Whether the beginning of a text holds a token that has no position."""
    uncounted, text = core.description.uncounted_id, given.get("decoder_input_ids")
    return uncounted is not None and isinstance(text, torch.Tensor) and bool(text.eq(uncounted).any())


def _has_padding(inputs: Any, given: Mapping[str, Any], settings: GenerationConfig) -> bool:
    """Whether tokens of the prompt are masked: by the mask or, without one, because they are pad tokens."""
    mask = given.get("attention_mask")
    if mask is not None:
        return isinstance(mask, torch.Tensor) and not bool(mask.bool().all())
    ids = given.get("input_ids") if inputs is None else inputs
    pad = find_marking_pad(settings)
    return pad is not None and isinstance(ids, torch.Tensor) and bool(ids.eq(pad).any())


# What a call is given for a model's forward, by the reference's names.
MODEL_INPUTS: Final = (
    "input_ids",
    "attention_mask",
    "inputs_embeds",
    "decoder_input_ids",
    "encoder_outputs",
    "input_features",
)


def find_settings(config: Any) -> GenerationConfig | None:
    """A transformers GenerationConfig as ours; None for anything else."""
    return convert_settings(config) if is_theirs(config, "GenerationConfig") else None
