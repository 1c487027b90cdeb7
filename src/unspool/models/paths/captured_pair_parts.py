"""What the captured step of an encoder-decoder is made of."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from unspool.models.decoder.layers import DecoderWeights
from unspool.models.encoder_decoder.layers import CrossWeights
from unspool.models.encoder_decoder.spec import EncoderDecoderSpec


@dataclass(frozen=True, slots=True)
class PairParts:
    """What the work of an encoder-decoder's step is made of."""

    spec: EncoderDecoderSpec
    own: DecoderWeights  # the decoder's, without positions
    crosses: list[CrossWeights]
    positions: torch.Tensor | None  # (positions, hidden)
    biases: list[torch.Tensor]  # by distance: (heads, distances) float32, one for all layers or one each
