"""From what a run gathered to the reference's output classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from unspool.decoding.record import Record
from unspool.outputs import (
    GenerateBeamDecoderOnlyOutput,
    GenerateBeamEncoderDecoderOutput,
    GenerateDecoderOnlyOutput,
    GenerateEncoderDecoderOutput,
    GenerateOutput,
)
from unspool.protocols import Encoded


def append_rows(prompts: torch.Tensor, new: Sequence[Sequence[int]], fill_token_id: int) -> torch.Tensor:
    """Prompts (rows, width) with their new tokens after them, short rows filled up."""
    longest = max((len(tokens) for tokens in new), default=0)
    tail = [[*tokens, *[fill_token_id] * (longest - len(tokens))] for tokens in new]
    filled = torch.tensor(tail, dtype=torch.int64, device=prompts.device).reshape(len(new), longest)
    return torch.cat((prompts, filled), dim=1)


def build_output(
    fields: dict[str, Any], record: Record, encoded: Encoded | None, *, is_encoder_decoder: bool
) -> GenerateOutput:
    """The output class that fits: with or without beams, with or without an encoder."""
    has_beams = "beam_indices" in fields
    if not is_encoder_decoder:
        kind = GenerateBeamDecoderOnlyOutput if has_beams else GenerateDecoderOnlyOutput
        return kind(**fields, attentions=record.attentions, hidden_states=record.hidden_states)
    pair = GenerateBeamEncoderDecoderOutput if has_beams else GenerateEncoderDecoderOutput
    return pair(
        **fields,
        encoder_attentions=encoded.attentions if encoded else None,
        encoder_hidden_states=encoded.hidden_states if encoded else None,
        decoder_attentions=record.attentions,
        cross_attentions=record.cross_attentions,
        decoder_hidden_states=record.hidden_states,
    )
