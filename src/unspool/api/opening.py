"""The model, inputs and settings of a call, out of what `generate()` was given."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from unspool.api.core import as_model, find_object
from unspool.config import PARAMETERS, GenerationConfig
from unspool.config.speech import SPEECH_FIELDS
from unspool.decoding.inputs import Inputs
from unspool.errors import SettingError
from unspool.kernels.presence import refuse_forked
from unspool.models.adapters import (
    MODEL_INPUTS,
    ColumnModel,
    drop_unknown_tokens,
    find_adapter,
    find_settings,
    fold_settings,
    list_inputs,
    list_unread,
    open_call,
    prepare_call,
    read_settings,
    runs_natively,
    runs_own_generate,
)
from unspool.models.adapters.pictures import PICTURE_INPUTS, EmbeddedPrompts, PictureReader, embed_call
from unspool.plan import Origin, merge
from unspool.plan.origins import refuse_unread
from unspool.protocols import Model

INPUT_NAMES = (
    *MODEL_INPUTS,
    "negative_prompt_ids",
    "negative_prompt_attention_mask",
    "assistant_encoder_outputs",
)

_GIVEN = "the generation_config"


@dataclass(frozen=True, slots=True)
class OpenedCall:
    """A call's model, and what it was given, each in our form."""

    model: Model
    given: Inputs
    settings: GenerationConfig
    origins: dict[str, Origin]
    assistant_model: Any
    past_key_values: Any


def open_model(
    model: Any,
    inputs: Any,
    generation_config: Any,
    kwargs: dict[str, Any],
    *,
    use_model_defaults: bool | None,
    defaults: Mapping[str, Any] | None,
    assistant_model: Any,
    past_key_values: Any,
    native: bool | None,
) -> OpenedCall:
    """Read the inputs out of `kwargs`, merge what is left of them with the settings, and open the model."""
    theirs, config = find_object(model), read_config(generation_config, model)
    given = Inputs(**{name: kwargs.pop(name) for name in INPUT_NAMES if name in kwargs})
    if inputs is not None and given.input_ids is not None:
        raise SettingError("`inputs` and `input_ids` are two names of the same argument; pass one")
    extra = {} if theirs is None else _take_extra(theirs, kwargs, given)
    own = as_model(model) if theirs is None else None
    pictured = _take_pictures(model, own, inputs, kwargs, given)
    model_config = read_settings(theirs if own is None else own)
    model_config = None if use_model_defaults is False else model_config
    if config is not None and config is not generation_config:  # of transformers
        model_config, config = fold_settings(model_config, config, keeps_length=bool(defaults) or theirs is None)
    settings, origins = merge(model_config, config, kwargs, defaults)
    device = getattr(theirs if own is None else own, "device", None)
    if isinstance(device, torch.device):
        refuse_forked(device)
    if own is None:
        extra |= {"past_key_values": past_key_values, "native": native}
        core, assistant, cache = _open_object(theirs, inputs, given, extra, settings, assistant_model)
        return OpenedCall(core, given, settings, origins, assistant, cache)
    if native is not None:
        raise SettingError("`native` says how a transformers object is run, and this model is unspool's; leave it out")
    if inputs is not None:
        given.input_ids = inputs
    if isinstance(given.inputs_embeds, EmbeddedPrompts):
        _take_embedded(given, given.inputs_embeds)
    elif pictured is not None:
        _take_embedded(given, pictured)
    return OpenedCall(own, given, settings, origins, assistant_model, past_key_values)


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
    everything = {name: getattr(given, name) for name in MODEL_INPUTS} | dict(extra)
    if assistant is None and runs_natively(model, everything["native"]):  # a draft model has no such embeddings
        seen = embed_call(model, inputs, {**everything, "native": None}, settings)
        if seen is not None:
            native, prompts = seen
            _take_embedded(given, prompts)
            drop_unknown_tokens(settings, native.info.vocab_size)
            return native, assistant, None
    core = open_call(model, inputs, everything, settings, everything.pop("native"))
    drop_unknown_tokens(settings, core.info.vocab_size)
    if not isinstance(core, ColumnModel):
        if inputs is not None:
            setattr(given, "input_features" if core.info.features is not None else "input_ids", inputs)
        return core, assistant, everything["past_key_values"]
    given.prepared = core.prepared
    settings.compile_config = settings.compile = None  # transformers compiles it
    if (drafting := find_object(assistant)) is not None:
        others = {**everything, "past_key_values": None}
        if given.encoder_outputs is not None and drafting is not model:
            others["encoder_outputs"] = given.assistant_encoder_outputs
        assistant = prepare_call(drafting, inputs, others, settings, core.call.why)
    return core, assistant, core.given_cache


def _take_pictures(
    model: Any, own: Model | None, inputs: Any, kwargs: dict[str, Any], given: Inputs
) -> EmbeddedPrompts | None:
    """What a processor made of pictures, out of the call's arguments, as a native model reads it; None without any."""
    reader: PictureReader | None = getattr(model, "pictures", None)
    if own is None or reader is None or not reader.is_native:
        return None
    held: dict[str, Any] = {name: kwargs.pop(name) for name in PICTURE_INPUTS if name in kwargs}
    if held.get("pixel_values") is None:
        return None
    ids = given.input_ids if inputs is None else inputs
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        raise SettingError("pixel_values stand beside input_ids, a tensor (rows, length) as processors return it")
    return reader.embed(own, {**held, "input_ids": ids, "attention_mask": given.attention_mask})  # type: ignore[arg-type]


def _take_embedded(given: Inputs, prompts: EmbeddedPrompts) -> None:
    """Let the inputs be prompts whose pictures were read."""
    given.input_ids, given.attention_mask = prompts.ids, prompts.mask
    given.inputs_embeds, given.seats = prompts.embeds, prompts.seats


def read_config(config: Any, model: Any = None) -> GenerationConfig | None:
    """The caller's settings: ours, or transformers' converted to ours. Names that `model` would not read are refused,
    unless its own settings have them too: files hold more than settings, and a caller may have copied one."""
    found = config if config is None or isinstance(config, GenerationConfig) else find_settings(config)
    if config is not None and found is None:
        raise SettingError(
            f"generation_config must be a GenerationConfig, not a {type(config).__name__}; make one of its settings: "
            "unspool.GenerationConfig(max_new_tokens=20)"
        )
    if model is None:
        refuse_unread(_list_unread(config), _GIVEN)
        return found
    theirs = find_object(model)
    own = getattr(as_model(model) if theirs is None else theirs, "generation_config", None)
    known: Collection[str] = () if own is None else [name for name, value in vars(own).items() if value is not None]
    refuse_unread([name for name in _list_unread(config) if name not in known], _GIVEN)
    if own is not config:
        refuse_unread(_list_unread(own, is_own=True), "the model's generation_config")
    of_speech = [] if found is None else [name for name in SPEECH_FIELDS if name in found.explicit]
    if of_speech and find_speech(model) is None:
        known = known if theirs is None else list_inputs(theirs)
        refuse_unread([name for name in of_speech if name not in known], _GIVEN)
    return found


def _list_unread(config: Any, *, is_own: bool = False) -> list[str]:
    if config is None:
        return []
    return config.unread if isinstance(config, GenerationConfig) else list_unread(config, is_own=is_own)


def find_speech(model: Any) -> Model | None:
    """The model, if it reads sound and its windows are ours to cut; a transformers object's own generate() may."""
    theirs = find_object(model)
    if theirs is None:
        core = as_model(model)
    elif runs_own_generate(theirs) or (adapted := find_adapter(theirs)) is None:
        return None
    else:
        core = adapted
    return core if core.info.features is not None else None
