"""Calling a native model in the reference's form: columns in, logits of every column out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from unspool.cache import Cache, EncoderDecoderCache
from unspool.errors import InputError, SettingError, UnsupportedError
from unspool.models.arrangement import Arrangement, read_mask
from unspool.outputs import Output
from unspool.protocols import Encoded, Want


@dataclass
class Seq2SeqOutput(Output):
    """What calling an encoder-decoder returns."""

    logits: torch.Tensor | None = None  # (rows, columns, vocab)
    past_key_values: Cache | None = None
    decoder_hidden_states: tuple[torch.Tensor, ...] | None = None
    decoder_attentions: tuple[torch.Tensor, ...] | None = None
    cross_attentions: tuple[torch.Tensor, ...] | None = None
    encoder_last_hidden_state: torch.Tensor | None = None  # (rows, source columns, hidden)
    encoder_hidden_states: tuple[torch.Tensor, ...] | None = None
    encoder_attentions: tuple[torch.Tensor, ...] | None = None


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


def call_pair(
    core: Any,
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    decoder_input_ids: torch.Tensor | None = None,
    decoder_attention_mask: torch.Tensor | None = None,
    encoder_outputs: Any = None,
    past_key_values: Cache | None = None,
    inputs_embeds: torch.Tensor | None = None,
    decoder_inputs_embeds: torch.Tensor | None = None,
    input_features: torch.Tensor | None = None,
    use_cache: bool | None = None,
    output_attentions: bool | None = None,
    output_hidden_states: bool | None = None,
    return_dict: bool | None = True,
) -> Seq2SeqOutput | tuple[Any, ...]:
    """Call an encoder-decoder. Without decoder ids it reads one start token per row, as a first step does."""
    want = Want("all", bool(output_hidden_states), bool(output_attentions))
    cache = past_key_values
    if cache is not None and not isinstance(cache, EncoderDecoderCache):
        raise SettingError(
            f"an encoder-decoder's past_key_values are an EncoderDecoderCache, not a {type(cache).__name__}"
        )
    encoded, source = None, Arrangement(None, [0], [0], 0)
    if cache is None or not cache.source_lengths:
        encoded, source = _encode(core, input_ids, attention_mask, inputs_embeds, input_features, encoder_outputs, want)
        if cache is None:
            cache = core.new_cache(rows=encoded.states.shape[0], encoded=encoded)
        else:
            core.project_source(cache.cross_attention_cache, encoded)
    rows = len(cache.source_lengths)
    if decoder_input_ids is None and decoder_inputs_embeds is None:
        start = core.info.decoder_start_token_id
        if start is None:
            raise InputError("give decoder_input_ids: the model's config has no decoder_start_token_id")
        decoder_input_ids = torch.full((rows, 1), start)
    given = decoder_input_ids if decoder_input_ids is not None else decoder_inputs_embeds
    assert given is not None
    own = read_mask(decoder_attention_mask, given.shape[0], given.shape[1], cache.lengths or [0] * rows)
    packed = own.pack(given.to(core.device))
    made = core.forward(
        packed if decoder_input_ids is not None else None,
        cache,
        counts=own.counts,
        want=want,
        embeds=packed if decoder_input_ids is None else None,
    )
    output = Seq2SeqOutput(
        logits=own.unpack(made.logits),
        past_key_values=cache if use_cache is None or use_cache else None,
        decoder_hidden_states=_unpack(own, made.hidden_states),
        decoder_attentions=None if made.attentions is None else tuple(map(own.unpack_weights, made.attentions)),
        cross_attentions=made.cross_attentions,
        encoder_last_hidden_state=None if encoded is None else source.unpack(encoded.states),
        encoder_hidden_states=None if encoded is None else _unpack(source, encoded.hidden_states),
        encoder_attentions=None
        if encoded is None or encoded.attentions is None
        else tuple(map(source.unpack_weights, encoded.attentions)),
    )
    return output if return_dict is None or return_dict else output.to_tuple()


def _encode(
    core: Any,
    ids: torch.Tensor | None,
    mask: torch.Tensor | None,
    embeds: torch.Tensor | None,
    features: torch.Tensor | None,
    outputs: Any,
    want: Want,
) -> tuple[Encoded, Arrangement]:
    """The encoder's states, and the columns that the caller's source stands in."""
    if core.info.features is not None and outputs is None:
        heard = features if features is not None else ids
        if heard is None:
            raise InputError("this model reads sound: give input_features")
        return core.encode(None, embeds=heard.to(core.device), want=want), Arrangement(None, [0], [0], 0)
    states = _read_states(outputs)
    given = next((one for one in (states, ids, embeds) if one is not None), None)
    if given is None:
        raise InputError("give input_ids, inputs_embeds or encoder_outputs")
    rows, columns = given.shape[:2]
    source = read_mask(mask, rows, columns, [0] * rows)
    packed = source.pack(given.to(core.device))
    if states is not None:
        return Encoded(packed, source.counts or [columns] * rows), source
    if ids is not None:
        return core.encode(packed, source.counts, want=want), source
    return core.encode(None, source.counts, want=want, embeds=packed), source


def _read_states(outputs: Any) -> torch.Tensor | None:
    """The states of `encoder_outputs`: an output, a mapping, a tuple, or the tensor itself."""
    if outputs is None or isinstance(outputs, torch.Tensor):
        return outputs
    found = outputs.get("last_hidden_state") if isinstance(outputs, Mapping) else outputs[0]
    if not isinstance(found, torch.Tensor):
        raise InputError("encoder_outputs must have `last_hidden_state`, a tensor of states")
    return found


def _unpack(columns: Arrangement, states: tuple[torch.Tensor, ...] | None) -> tuple[torch.Tensor, ...] | None:
    return None if states is None else tuple(map(columns.unpack, states))
