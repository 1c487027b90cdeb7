"""The work of an encoder's pass on a GPU: sums and the norms after them are one kernel, attention reads lengths there.

The reference is `EncoderDecoder.encode` operator by operator. Nothing here may read a number on the host, so that a
pass can be captured.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F

from unspool.kernels.attention import attend
from unspool.kernels.gpu.attention.source_attention import attend_source, lay_out_biases
from unspool.kernels.gpu.products.activations import CODES
from unspool.kernels.gpu.products.gating import gate
from unspool.kernels.gpu.products.parts import add_parts
from unspool.models.decoder.layers import Layer
from unspool.models.encoder_decoder.layers import Stack
from unspool.models.encoder_decoder.spec import EncoderDecoderSpec
from unspool.models.paths.captured_norms import norm_arguments, normalise_by
from unspool.models.weights import Norm


class EncoderBody:
    """An encoder's layers over padded sources."""

    def __init__(self, spec: EncoderDecoderSpec, stack: Stack, biases: list[torch.Tensor], *, has_kernel: bool) -> None:
        """`biases` has a table of `DistanceBiases.tabulate_around` for all layers, one for each, or none; `has_kernel`
        is whether our kernel attends, and not torch's."""
        self._spec, self._stack, self._biases, self._has_kernel = spec, stack, biases, has_kernel
        self._tiles = [lay_out_biases(table) for table in biases] if has_kernel else []

    @property
    def reads_lengths(self) -> bool:
        """Whether lengths cost nothing to read, so that sources without padding need no kernel of their own."""
        return self._has_kernel

    def hear(self, features: torch.Tensor) -> torch.Tensor:
        """Features (rows, channels, frames) through the convolutions: (rows, positions, hidden)."""
        first, second = self._stack.convolutions
        x = F.gelu(F.conv1d(features, first.weight, first.bias, padding=1))
        return F.gelu(F.conv1d(x, second.weight, second.bias, stride=2, padding=1)).transpose(1, 2)

    def run(self, x: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor:
        """Final states (rows, length, hidden) of embeddings with their positions, which are overwritten.

        `lengths` (rows,) int32 has how many of each row are real; None: all are. Other states are some numbers.
        """
        stack, spec = self._stack, self._spec
        shape = x.shape
        x = x.contiguous().view(-1, shape[-1])
        masks = self._make_masks(lengths, shape[1], x.dtype)
        if stack.embedding_norm is not None:
            x = _norm(stack.embedding_norm, x)
        first = stack.layers[0].attn_norm if stack.layers else None
        normed = _norm(first, x) if spec.is_norm_first and first is not None else x
        for index, (layer, following) in enumerate(pairwise([*stack.layers, None])):
            assert layer is not None and layer.attn_norm is not None and layer.ffn_norm is not None
            made = layer.out(self._attend(index, layer.qkv(normed), shape[0], lengths, masks))
            x, normed = self._add(made, x, layer.attn_norm, layer.ffn_norm)
            after = following.attn_norm if following is not None else stack.final_norm
            x, normed = self._add(self._feed(layer, normed), x, layer.ffn_norm, after)
        if not spec.is_norm_first and stack.final_norm is not None:
            normed = _norm(stack.final_norm, normed)
        return normed.view(shape)

    def _add(
        self, made: torch.Tensor, x: torch.Tensor, own: Norm, following: Norm | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The state with what a part of a block has made, and what the next part reads of it."""
        norm = following if self._spec.is_norm_first else own
        if norm is None:
            x.add_(made)
            return x, x
        normed = torch.empty_like(x)
        add_parts(made[None], x, adds=True, normed=normed, **norm_arguments(norm))
        return (x, normed) if self._spec.is_norm_first else (normed, normed)

    def _attend(
        self,
        index: int,
        qkv: torch.Tensor,
        rows: int,
        lengths: torch.Tensor | None,
        masks: list[torch.Tensor],
    ) -> torch.Tensor:
        stack = self._spec.encoder
        split = qkv.view(rows, -1, 3, stack.num_heads, stack.head_dim)
        queries, keys, values = (part.transpose(1, 2) for part in split.unbind(2))
        if self._has_kernel:
            biases = self._tiles[min(index, len(self._tiles) - 1)] if self._tiles else None
            read = attend_source(queries, keys, values, stack.attention_scale, lengths=lengths, biases=biases)
        else:
            mask = masks[min(index, len(masks) - 1)] if masks else None
            read, _ = attend(queries, keys, values, scale=stack.attention_scale, mask=mask)
        return read.transpose(1, 2).reshape(qkv.shape[0], -1)

    def _make_masks(self, lengths: torch.Tensor | None, longest: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """What torch's attention adds to scores, for all layers or for each; none where our kernel attends."""
        if self._has_kernel or (lengths is None and not self._biases):
            return []
        masks = [torch.zeros((), dtype=dtype, device=self._stack.layers[0].qkv.weight.device)]
        places = torch.arange(longest, device=masks[0].device)
        if self._biases:
            far = self._biases[0].shape[1] // 2
            ahead = (places - places[:, None]).clamp(-far, far) + far
            masks = [table[:, ahead].to(dtype)[None] for table in self._biases]  # (1, heads, queries, keys)
        if lengths is None:
            return masks
        visible = (places < lengths[:, None])[:, None, None]
        return [torch.where(visible, mask, -torch.inf) for mask in masks]

    def _feed(self, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        up = layer.up(x)
        inner = up.new_empty(up.shape[0], up.shape[1] // 2) if self._spec.is_gated else up
        gate(up, CODES[self._spec.activation], inner)
        return layer.down(inner)


def _norm(norm: Norm, x: torch.Tensor) -> torch.Tensor:
    normed = torch.empty_like(x)
    normalise_by(norm, x, normed)
    return normed
