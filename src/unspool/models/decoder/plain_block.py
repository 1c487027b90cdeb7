"""A decoder's block from torch's out-of-place operators, for steps that are recorded.

The recorder (a CUDA graph, torch.compile) manages the memory; `Decoder` itself writes in place instead.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from unspool.kernels.activations import Activation
from unspool.models.decoder.layers import DecoderWeights, Layer
from unspool.models.decoder.spec import DecoderSpec


def run_block(
    spec: DecoderSpec,
    layer: Layer,
    x: torch.Tensor,
    attend: Callable[[torch.Tensor], torch.Tensor],  # from a layer's queries, keys and values to the attention output
    activate: Activation,
    feed_mixture: Callable[[torch.Tensor], torch.Tensor] | None = None,  # the feed-forward of experts, if it has one
) -> torch.Tensor:
    """The state after a layer, in the shape of the state before it (…, hidden)."""

    def feed(given: torch.Tensor) -> torch.Tensor:
        return _feed(spec, layer, given, activate) if feed_mixture is None else feed_mixture(given)

    is_post = spec.norm_placement == "post"
    normed = x if is_post or layer.attn_norm is None else layer.attn_norm(x)
    read = layer.out(attend(layer.qkv(normed)))
    if layer.post_attn_norm is not None:
        read = layer.post_attn_norm(read)
    if spec.residual == "parallel":
        given = layer.ffn_norm(x) if layer.ffn_norm is not None else normed
        return feed(given) + read + x
    x = x + read
    if is_post:
        assert layer.attn_norm is not None and layer.ffn_norm is not None
        x = layer.attn_norm(x)
        return layer.ffn_norm(feed(x) + x)
    fed = feed(x if layer.ffn_norm is None else layer.ffn_norm(x))
    return x + (layer.post_ffn_norm(fed) if layer.post_ffn_norm is not None else fed)


def _feed(spec: DecoderSpec, layer: Layer, x: torch.Tensor, activate: Activation) -> torch.Tensor:
    up = layer.up(x)
    if not spec.is_gated:
        return layer.down(activate(up))
    gate, value = up.chunk(2, dim=-1)
    return layer.down(activate(gate) * value)


def embed(
    spec: DecoderSpec, weights: DecoderWeights, tokens: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The first layer's input: tokens and positions of one shape (…) to states (…, hidden)."""
    x = weights.embedding(tokens).to(dtype)
    x = weights.project_in(x) if weights.project_in is not None else x
    if weights.positions is not None:  # absent tokens may have any position
        places = (positions + spec.position_offset).clamp(0, weights.positions.shape[0] - 1)
        x = x + weights.positions[places]
    return weights.embedding_norm(x) if weights.embedding_norm is not None else x


def finish(weights: DecoderWeights, x: torch.Tensor) -> torch.Tensor:
    """The head's input from the last layer's states."""
    x = weights.final_norm(x) if weights.final_norm is not None else x
    return weights.project_out(x) if weights.project_out is not None else x
