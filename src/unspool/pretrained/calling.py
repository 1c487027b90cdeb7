"""Calling a native model with what transformers' callers pass beside its own arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from unspool.cache import Cache, EncoderDecoderCache
from unspool.errors import InputError, UnsupportedError


def call_decoder(core: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a decoder, or a model with states; `cache_position` must say what the cache says."""
    positions = kwargs.pop("cache_position", None)
    if positions is not None:
        past = kwargs.get("past_key_values", kwargs.get("cache_params"))
        held = max(past.lengths, default=0) if isinstance(past, Cache) else 0
        given = torch.as_tensor(positions).flatten().tolist()
        is_whole = "state" in core.info.layer_kinds  # its callers number the inside of the convolution
        if not is_whole and given != list(range(held, held + len(given))):
            raise UnsupportedError(
                f"cache_position is {given} and the cache holds {held} positions: a key's index is its position here, "
                "so leave cache_position out"
            )
    return core(*args, **kwargs)


def call_pair(core: Any, input_ids: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Call an encoder-decoder. Without decoder ids it reads one start token per row, as a first step does."""
    outputs = kwargs.get("encoder_outputs")
    if outputs is not None:
        kwargs["encoder_outputs"] = (_read_states(outputs),)
    elif core.info.features is not None and input_ids is not None:  # a sound, given first
        input_ids, kwargs["input_features"] = None, input_ids
    if kwargs.get("decoder_input_ids") is None and kwargs.get("decoder_inputs_embeds") is None and len(args) < 2:
        kwargs["decoder_input_ids"] = _make_starts(core, input_ids, kwargs)
    return core(input_ids, *args, **kwargs)


def _make_starts(core: Any, input_ids: Any, given: Mapping[str, Any]) -> torch.Tensor:
    """One start token for each row of the source, or of the cache that has read it."""
    start = core.info.decoder_start_token_id
    if start is None:
        raise InputError("give decoder_input_ids: the model's config has no decoder_start_token_id")
    past, outputs = given.get("past_key_values"), given.get("encoder_outputs")
    if isinstance(past, EncoderDecoderCache) and past.source_lengths:
        rows = len(past.source_lengths)
    else:
        sources = (outputs and outputs[0], input_ids, given.get("inputs_embeds"), given.get("input_features"))
        source = next((one for one in sources if one is not None), None)
        if source is None:
            raise InputError("give input_ids, inputs_embeds, input_features or encoder_outputs")
        rows = len(source)
    return torch.full((rows, 1), start)


def _read_states(outputs: Any) -> torch.Tensor:
    """The states of `encoder_outputs`: an output, a mapping, a tuple, or the tensor itself."""
    if isinstance(outputs, torch.Tensor):
        return outputs
    found = outputs.get("last_hidden_state") if isinstance(outputs, Mapping) else outputs[0]
    if not isinstance(found, torch.Tensor):
        raise InputError("encoder_outputs must have `last_hidden_state`, a tensor of states")
    return found
