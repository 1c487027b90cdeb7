"""An encoder-decoder's captured step of one token whose blocks are one kernel."""

from __future__ import annotations

import torch

from unspool.kernels.gpu.launching import is_hopper
from unspool.kernels.gpu.products.activations import CODES
from unspool.kernels.gpu.resident.blocks import (
    ResidentBlocks,
    ResidentLayer,
    TokenState,
    count_key_tiles,
    takes_layers,
)
from unspool.models.paths.captured_body import StepInputs
from unspool.models.paths.captured_pair_blocks import FusedPairBody
from unspool.models.paths.captured_pair_parts import PairParts
from unspool.models.paths.captured_shape import PassShape
from unspool.models.weights import Embedding, Norm


class ResidentPairBody(FusedPairBody):
    """As its base, with one kernel for all blocks, which overlaps with none before it."""

    starts_alone = True

    def __init__(self, parts: PairParts, device: torch.device, dtype: torch.dtype, form: PassShape) -> None:
        super().__init__(parts, device, dtype, form)
        layers = list_resident_layers(parts)
        assert layers is not None
        self._blocks = ResidentBlocks(
            layers,
            eps=parts.crosses[0].norm.eps,
            activation=self._code,
            is_norm_first=parts.spec.is_norm_first,
            device=device,
            key_tiles=count_key_tiles(parts.spec.features.positions) if parts.spec.features is not None else 1,
        )

    def _run_blocks(self, inputs: StepInputs) -> None:
        self._x, out = self._buffers
        self._late = None
        self._begin(inputs)
        num_layers = self._spec.num_layers
        self._blocks(
            self._find_state(inputs),
            out,
            inputs.base,
            inputs.table,
            inputs.lengths,
            inputs.sources,
            inputs.sources[num_layers + 1 :],
            self._spec.scale_of(0),
            self._pair.decoder.attention_scale,
        )
        self._x = out
        self._late = None if self._pair.is_norm_first else self._weights.layers[-1].ffn_norm

    def _find_state(self, inputs: StepInputs) -> torch.Tensor | TokenState:
        """What the blocks begin with: they look the token up, unless a norm lies between."""
        embedding, has_norm = self._weights.embedding, self._weights.embedding_norm is not None
        if isinstance(embedding, Embedding) and not (has_norm and self._pair.is_norm_first):
            return TokenState(inputs.tokens, embedding.weight, self._scale, self._find_places(inputs))
        self._embed_states(inputs)
        return self._x


def can_reside(parts: PairParts, dtype: torch.dtype) -> bool:
    """Whether all blocks of one row's step can be one kernel."""
    spec = parts.spec
    if not is_hopper() or dtype != torch.bfloat16 or parts.biases or spec.is_gated or spec.activation not in CODES:
        return False
    layers = list_resident_layers(parts)
    return layers is not None and takes_layers(layers, spec.decoder.num_heads)


def list_resident_layers(parts: PairParts) -> list[ResidentLayer] | None:
    """A decoder's layers as the kernel takes them; None if one has other parts."""
    spec, own = parts.spec, parts.own
    before = None if spec.is_norm_first else own.embedding_norm
    decoder = spec.describe_decoder()
    eps, scales = set[float](), {decoder.scale_of(index) for index in range(decoder.num_layers)}
    layers: list[ResidentLayer] = []
    for layer, cross in zip(own.layers, parts.crosses, strict=True):
        linears = (layer.qkv, layer.out, cross.q, cross.out, layer.up, layer.down)
        norms = [layer.attn_norm, cross.norm, layer.ffn_norm]
        if not spec.is_norm_first:
            norms, before = [before, *norms[:2]], norms[2]
        pairs = [_take_vectors(norm) for norm in norms]
        is_first = not layers and not spec.is_norm_first and norms[0] is None  # the embedding has none
        matrices = [linear.operand for linear in linears if isinstance(linear.operand, torch.Tensor)]
        biases = [linear.bias for linear in linears if linear.bias is not None]
        if len(matrices) < len(linears) or len(biases) < len(linears) or None in pairs[1 if is_first else 0 :]:
            return None
        eps |= {norm.eps for norm in norms if norm is not None}
        layers.append(ResidentLayer(tuple(matrices), tuple(biases), tuple(pairs)))
    return layers if len(eps) == 1 and len(scales) == 1 else None


def _take_vectors(norm: Norm | None) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The weights and the bias of a layer norm."""
    if norm is None or not norm.is_layer or norm.weight is None or norm.bias is None:
        return None
    return norm.weight, norm.bias
