"""Calling an encoder-decoder in the reference's manner: padded rows, attention masks, an output object."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from unspool.cache import Cache
from unspool.errors import InputError
from unspool.models.arrangement import Arrangement, read_mask
from unspool.models.encoder_decoder.caches import check_pair
from unspool.models.encoder_decoder.spec import EncoderDecoderSpec
from unspool.models.native import NativeModel
from unspool.models.paths.library import WithLibrary
from unspool.models.paths.path import Pass
from unspool.outputs import Output
from unspool.protocols import Encoded, Forward, Want


@dataclass
class Seq2SeqOutput(Output):
    """What calling an encoder-decoder returns."""

    logits: torch.Tensor | None = None  # (rows, columns, vocab)
    past_key_values: Cache | None = None
    decoder_hidden_states: tuple[torch.Tensor, ...] | None = None
    decoder_attentions: tuple[torch.Tensor, ...] | None = None
    cross_attentions: tuple[torch.Tensor, ...] | None = None
    encoder_last_hidden_state: torch.Tensor | None = None
    encoder_hidden_states: tuple[torch.Tensor, ...] | None = None
    encoder_attentions: tuple[torch.Tensor, ...] | None = None


class CalledPair(WithLibrary, NativeModel):
    """An encoder-decoder that is called in the reference's manner."""

    spec: EncoderDecoderSpec

    @abstractmethod
    def project_source(self, cross: Cache, encoded: Encoded) -> Cache:
        """Write every layer's keys and values of the encoder's states, once."""

    @abstractmethod
    def run_decoder(self, new: Pass) -> tuple[torch.Tensor, Forward]:
        """Final states (rows, new, hidden), and a `Forward` that lacks only the logits: operator by operator."""

    @abstractmethod
    def project(self, states: torch.Tensor) -> torch.Tensor:
        """The logits of final states."""

    @torch.no_grad()
    def __call__(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = True,
        input_features: torch.Tensor | None = None,
    ) -> Seq2SeqOutput | tuple[Any, ...]:
        """Logits for the decoder's columns; the source is encoded unless the cache or the caller has it."""
        want = Want("all", bool(output_hidden_states), bool(output_attentions))
        rows, num_new = self._check_input(decoder_input_ids, decoder_inputs_embeds, self.spec.hidden_size)
        encoded = source = None
        if past_key_values is None or not check_pair(past_key_values).source_lengths:
            encoded, source = self._encode_call(
                input_ids, inputs_embeds, input_features, attention_mask, encoder_outputs, want
            )
        cache = past_key_values
        if cache is None:
            cache = self.new_cache("dynamic", rows, encoded=encoded)
        elif encoded is not None:
            self.project_source(check_pair(cache).cross_attention_cache, encoded)
        arranged = read_mask(decoder_attention_mask, rows, num_new, cache.lengths or [0] * rows)
        new = Pass(
            arranged.pack(decoder_input_ids.to(self.device)) if decoder_input_ids is not None else None,
            cache,
            arranged.counts,
            want,
            arranged.pack(decoder_inputs_embeds.to(self.device)) if decoder_inputs_embeds is not None else None,
            self._begin,
        )
        states, answer = self.run_decoder(new)
        output = Seq2SeqOutput(
            logits=self.project(arranged.unpack(states)),
            past_key_values=cache if use_cache is None or use_cache else None,
            decoder_hidden_states=_each(arranged.unpack, answer.hidden_states),
            decoder_attentions=_each(arranged.unpack_weights, answer.attentions),
            cross_attentions=answer.cross_attentions,
        )
        if encoded is not None and source is not None:
            output.encoder_last_hidden_state = source.unpack(encoded.states)
            output.encoder_hidden_states = _each(source.unpack, encoded.hidden_states)
            output.encoder_attentions = _each(source.unpack_weights, encoded.attentions)
        return output if return_dict is None or return_dict else output.to_tuple()

    def _encode_call(
        self,
        input_ids: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
        input_features: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        encoder_outputs: Any,
        want: Want,
    ) -> tuple[Encoded, Arrangement]:
        if encoder_outputs is not None:
            states = getattr(encoder_outputs, "last_hidden_state", None)
            states = (encoder_outputs[0] if states is None else states).to(self.device, self.dtype)
            rows, length = states.shape[:2]
            source = read_mask(attention_mask, rows, length, [0] * rows)
            return Encoded(source.pack(states), source.counts or [length] * rows), source
        if input_features is not None:
            encoded = self.encode(None, want=want, embeds=input_features)
            return encoded, read_mask(None, len(encoded.lengths), encoded.states.shape[1], [0] * len(encoded.lengths))
        rows, length = self._check_input(input_ids, inputs_embeds, self.spec.hidden_size, self.info.source_vocab_size)
        source = read_mask(attention_mask, rows, length, [0] * rows)
        if source.counts is not None and not all(source.counts):
            raise InputError("a row of the source has no real token")
        tokens = source.pack(input_ids.to(self.device)) if input_ids is not None else None
        embeds = source.pack(inputs_embeds.to(self.device)) if inputs_embeds is not None else None
        return self.encode(tokens, source.counts, want=want, embeds=embeds), source


def _each(
    change: Callable[[torch.Tensor], torch.Tensor], tensors: tuple[torch.Tensor, ...] | None
) -> tuple[torch.Tensor, ...] | None:
    return None if tensors is None else tuple(change(tensor) for tensor in tensors)
