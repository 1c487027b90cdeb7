"""From the arguments of generate() to one call's inputs, by the methods that transformers' own generate() uses."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from unspool.config import GenerationConfig
from unspool.errors import InputError, UnsupportedError
from unspool.models.adapters.adapted import find_device, name_failures
from unspool.models.adapters.columns.held import check_rows, count_held
from unspool.models.adapters.columns.model import CallInputs, ColumnModel
from unspool.models.adapters.columns.own_settings import find_end, follow_settings
from unspool.models.adapters.columns.state import CACHE_NAMES, Columns
from unspool.models.adapters.description import Description, describe_loosely
from unspool.protocols import PreparedRows

_ROWS = ("input_ids", "attention_mask", "decoder_input_ids")
_NEEDED = (
    "_prepare_model_inputs",
    "_prepare_special_tokens",
    "_prepare_attention_mask_for_generation",
    "_update_model_kwargs_for_generation",
    "_prepare_cache_for_generation",
    "_expand_inputs_for_generation",
)


@torch.no_grad()
def prepare_call(
    model: Any, inputs: Any, given: Mapping[str, Any], settings: GenerationConfig, why: str
) -> ColumnModel:
    """A model with one call's inputs; nothing but an embedding is computed.

    `inputs` is the caller's first argument, `given` every other input by name.
    """
    missing = [name for name in _NEEDED if not hasattr(model, name)]
    if missing:
        raise UnsupportedError(
            f"{why}, and this release of transformers has no {missing[0]} to prepare its inputs with; use "
            "transformers 5.0 or later"
        )
    kwargs = {name: value for name, value in given.items() if value is not None}
    inputs = _as_rows(inputs, "input_ids", model)
    kwargs |= {name: _as_rows(kwargs[name], name, model) for name in _ROWS if name in kwargs}
    description = describe_loosely(model)
    has_fixed_room = _has_fixed_room(kwargs, settings)
    if description.lacks_order and has_fixed_room:
        raise UnsupportedError(
            f"{type(model).__name__} would read the empty columns of a static cache as tokens; leave it out, or give a "
            "dynamic one"
        )
    config = make_config(settings)
    kwargs, theirs = follow_settings(model, kwargs, config, settings)
    call = _prepare_inputs(model, description, inputs, kwargs, config, why)
    end = find_end(model, theirs, settings, *call.main, call.rows.shown.shape[1])
    call.rows = replace(call.rows, end=end)
    call.has_fixed_room = has_fixed_room

    def prepare_text(ids: torch.Tensor, mask: torch.Tensor) -> CallInputs:
        with torch.no_grad():
            return _prepare_inputs(model, description, ids, {"attention_mask": mask}, config, why)

    call.prepare_text = prepare_text
    return ColumnModel(model, description, call)


def _prepare_inputs(
    model: Any, description: Description, inputs: Any, kwargs: dict[str, Any], config: Any, why: str
) -> CallInputs:
    is_pair = description.info.is_encoder_decoder
    if "cache_params" in description.arguments and "past_key_values" in kwargs:
        kwargs["cache_params"] = kwargs.pop("past_key_values")
    if "state" in description.arguments and "past_key_values" not in description.arguments:
        kwargs.pop("past_key_values", None)  # the state that an answer returned; its text is read again
    has_mask = "attention_mask" in kwargs
    for unread in ("logits_to_keep", "labels"):  # what is computed follows from what is asked
        kwargs.pop(unread, None)
    with name_failures(model):
        value, name, kwargs = model._prepare_model_inputs(inputs, _as_tensor(config.bos_token_id, model), kwargs)
        rows = value.shape[0]
        call_known(
            model._prepare_special_tokens,
            config,
            kwargs_has_attention_mask=True,  # or it warns of what is found out below
            device=value.device,
            batch_size=rows,
        )
        reads_tokens = isinstance(value, torch.Tensor) and value.dim() == 2 and "encoder_outputs" not in kwargs
        if not has_mask and (reads_tokens or not is_pair) and "attention_mask" in description.arguments:
            kwargs["attention_mask"] = model._prepare_attention_mask_for_generation(value, config, kwargs)
        source: tuple[Any, str] | None = None
        if is_pair:
            source = None if "encoder_outputs" in kwargs else (value, name)
            if "encoder_outputs" in kwargs:
                kwargs["encoder_outputs"] = _as_output(kwargs["encoder_outputs"])
            given_mask = kwargs.get("decoder_attention_mask")
            ids, kwargs = call_known(
                model._prepare_decoder_input_ids_for_generation,
                batch_size=rows,
                model_input_name=name,
                model_kwargs=kwargs,
                decoder_start_token_id=_find_start(config, model),
                device=value.device,
            )
            mask = kwargs.get("decoder_attention_mask", given_mask)
        else:
            ids = value if name == "input_ids" else kwargs.pop("input_ids")
            mask = kwargs.get("attention_mask")
        prompt, shown = _lay_out(model, description, ids, mask, kwargs, is_pair)
    made = _make_rows(prompt, shown, value, name, kwargs, is_pair)
    return CallInputs(prompt, kwargs, made, config, (value, name), source, why=why)


def _has_fixed_room(kwargs: Mapping[str, Any], settings: GenerationConfig) -> bool:
    """Whether a call's cache takes its memory at once."""
    given = kwargs.get("past_key_values")
    given = getattr(given, "self_attention_cache", given)
    if given is not None:
        return any("Static" in type(layer).__name__ for layer in getattr(given, "layers", ()))
    return settings.cache_implementation in ("static", "hybrid", "offloaded_static", "offloaded_hybrid")


def _lay_out(
    model: Any, description: Description, ids: torch.Tensor, mask: Any, kwargs: dict[str, Any], is_pair: bool
) -> tuple[Columns, torch.Tensor]:
    """The prompt's columns, and what returned sequences begin with."""
    rows, shown = ids.shape[0], ids
    past = next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)
    held = count_held(past)
    check_rows(past, rows)
    embeds = None if is_pair else kwargs.get("inputs_embeds")
    width = ids.shape[1] if embeds is None else embeds.shape[1]
    if isinstance(mask, torch.Tensor) and mask.dim() == 2 and mask.shape[1] > width:
        if past is None:
            mask = mask[:, -width:]  # of a longer text, whose end the tokens are
        else:
            width = mask.shape[1]  # the mask is over what the cache holds too
    elif held >= width:
        width = held + ids.shape[1]
    if mask is None or mask.dim() != 2 or mask.shape[1] != width:
        if mask is not None and mask.dim() != 2:
            raise InputError("`attention_mask` must have the shape (rows, length)")
        extra = 0 if mask is None else width - mask.shape[1]
        known = torch.ones(rows, width, dtype=torch.bool, device=ids.device)
        if mask is not None and extra > 0:
            known[:, extra:] = mask.bool()
        mask = known
    mask = mask.bool().to(ids.device)
    if mask.shape[0] != rows:
        mask = mask.expand(rows, width)
    mask = mask | ~mask.any(dim=-1, keepdim=True)  # a row without ones has nothing else to go on from
    if ids.shape[1] < width:
        ids = torch.cat((ids.new_zeros(rows, width - ids.shape[1]), ids), dim=1)
    if not is_pair and "attention_mask" in kwargs:
        kwargs["attention_mask"] = mask.long()
    name = "decoder_position_ids" if is_pair else "position_ids"
    positions = kwargs.pop(name, None)
    if positions is None and not is_pair and "position_ids" in description.arguments:
        has_tokens = embeds is None or shown.shape[1] > 0
        positions = call_known(model._prepare_position_ids_for_generation, ids if has_tokens else embeds, kwargs)
    if positions is not None and positions.dim() == 1:
        positions = positions[None]
    if positions is not None and positions.shape[-1] < width:  # the caller's, of the new columns alone
        lead = torch.zeros(*positions.shape[:-1], width - positions.shape[-1], dtype=torch.long, device=ids.device)
        positions = torch.cat((lead, positions), dim=-1)
    return Columns(ids, mask, positions, min(held, width - 1) if held else 0), shown


def _make_rows(
    prompt: Columns, shown: torch.Tensor, value: Any, name: str, kwargs: Mapping[str, Any], is_pair: bool
) -> PreparedRows:
    lengths = prompt.lengths
    order = prompt.mask.long().argsort(dim=-1, stable=True)
    ids = prompt.ids.gather(1, order)
    has_tokens = isinstance(value, torch.Tensor) and value.dim() == 2 and not value.is_floating_point()
    is_hidden = not is_pair and shown.shape[1] == 0
    source = None
    if is_pair:
        source = value if has_tokens and name == "input_ids" and "encoder_outputs" not in kwargs else None
    embeds = None if is_pair else kwargs.get("inputs_embeds")
    return PreparedRows(
        ids=ids[:, :0] if is_hidden else ids,
        lengths=lengths,
        shown=shown,
        embeds=embeds if embeds is None else embeds[:, -max(lengths) :],
        source_ids=source,
        num_sources=value.shape[0] if is_pair else 0,
        num_hidden=prompt.width if is_hidden and embeds is not None else 0,
    )


def make_config(settings: GenerationConfig) -> Any:
    """transformers' settings for what its methods look at."""
    from transformers import GenerationConfig as TheirConfig

    made: Any = TheirConfig()
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"):
        value = getattr(settings, name)
        setattr(made, name, None if isinstance(value, int) and value < 0 else value)
    made.use_cache = settings.use_cache is not False
    made.max_cache_len = settings.max_cache_len
    made.num_beams = settings.num_beams or 1
    made.num_return_sequences = settings.num_return_sequences or 1
    return made


def _find_start(config: Any, model: Any) -> torch.Tensor:
    start = getattr(config, "_decoder_start_token_tensor", None)
    if start is None:
        start = _as_tensor(config.bos_token_id, model)
    if start is None:
        raise InputError(
            "the model names no decoder_start_token_id and no bos_token_id; pass decoder_start_token_id or "
            "decoder_input_ids"
        )
    return start


def _as_rows(given: Any, name: str, model: Any) -> Any:
    """Rows of numbers that were given as lists, as the tensor that transformers' methods take."""
    if not isinstance(given, list | tuple):
        return given
    try:
        return torch.tensor(given, dtype=torch.long, device=find_device(model))
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"`{name}` must be rows of whole numbers, all of one length: {error}") from error


def _as_tensor(value: Any, model: Any) -> torch.Tensor | None:
    return None if value is None else torch.as_tensor(value, device=find_device(model), dtype=torch.long)


def _as_output(made: Any) -> Any:
    """What an encoder returned, as the object that transformers' decoders take."""
    if isinstance(made, Mapping):
        return made
    from transformers.modeling_outputs import BaseModelOutput

    states: Any = made if isinstance(made, torch.Tensor) else getattr(made, "last_hidden_state", None)
    if states is None and isinstance(made, list | tuple) and made:
        return BaseModelOutput(*made[:3])
    return BaseModelOutput(last_hidden_state=states)


def call_known(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a method of transformers with those of the arguments that its release has."""
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    known: Mapping[str, inspect.Parameter] = inspect.signature(function).parameters
    for kind in type(owner).__mro__ if owner is not None else ():
        if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values()) and name in vars(kind):
            known = inspect.signature(
                vars(kind)[name]
            ).parameters  # it passes on what the method that it overrides takes
    return function(*args, **{name: value for name, value in kwargs.items() if name in known})
