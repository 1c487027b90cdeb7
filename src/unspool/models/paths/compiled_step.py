"""A decoder's step as a function of tensors alone, which torch.compile can trace: nothing in it depends on a value.

It writes the new keys into the cache's buffers and reads a prefix of them whose length grows in strides. So sizes
change rarely, and those that do are marked as dynamic: one graph serves all of them.
"""

from __future__ import annotations

from functools import partial

import torch

from unspool.kernels.activations import find_activation
from unspool.kernels.alibi import alibi_slopes
from unspool.kernels.attention import attend
from unspool.kernels.rotary import split_pairs
from unspool.models.decoder.layers import DecoderWeights, Layer, norm_heads
from unspool.models.decoder.plain_block import embed, finish, run_block
from unspool.models.decoder.spec import DecoderSpec, RopeSpec
from unspool.protocols import LayerKind


class StepFunction:
    """The step of a few tokens per row, from tokens to logits."""

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights,
        device: torch.device,
        dtype: torch.dtype,
        *,
        early: tuple[int, ...] = (),
        exit_layer: int | None = None,
    ) -> None:
        self._spec, self._weights, self._dtype = spec, weights, dtype
        self._layers = list(enumerate(weights.layers[:exit_layer]))
        self._early = early
        self._activate = find_activation(spec.activation)
        local = spec.local_rope if spec.local_rope is not None else spec.rope
        self._ropes: dict[LayerKind, RopeSpec | None] = {"full": spec.rope, "sliding": local}
        self._frequencies = {
            kind: None if rope is None else torch.tensor(rope.frequencies, dtype=torch.float32, device=device)
            for kind, rope in self._ropes.items()
        }
        self._kinds = sorted(set(spec.layer_kinds)) or ["full"]
        self._slopes: torch.Tensor | None = None
        if spec.alibi is not None:
            self._slopes = (alibi_slopes(spec.num_heads) * spec.alibi.scale).to(device)[None, :, None, None]

    def run(
        self,
        tokens: torch.Tensor,  # (rows, new) int64
        positions: torch.Tensor,  # (rows, new) int64
        keys: torch.Tensor,  # (keys,) int64: the positions in view, 0, 1, 2, …
        buffers: list[torch.Tensor],  # (rows, capacity, 2, kv heads, width), one per layer: written
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
        """Logits (rows, new, vocab), the head's input (rows, new, hidden), and early layers' logits (rows, vocab)."""
        spec, weights = self._spec, self._weights
        masks = {kind: self._mask(kind, positions, keys) for kind in self._kinds}
        turns = {kind: self._turn(kind, positions) for kind in self._kinds}
        x = embed(spec, weights, tokens, positions, self._dtype)
        early = []
        for index, layer in self._layers:
            if index in self._early:
                early.append(x[:, -1])
            kind = spec.kind_of(index)
            read = partial(self._attend, index, layer, buffers[index], positions, turns[kind], masks[kind])
            x = run_block(spec, layer, x, read, self._activate)
        states = finish(weights, x)
        logits = weights.head(states)
        if spec.logit_softcap is not None:
            logits = torch.tanh(logits / spec.logit_softcap) * spec.logit_softcap
        return logits, states, tuple(self._read_early(each) for each in early)

    def _read_early(self, states: torch.Tensor) -> torch.Tensor:
        projection = self._weights.project_out
        return self._weights.head(states if projection is None else projection(states))

    def _mask(self, kind: LayerKind, positions: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """The additive mask: (rows, 1 or heads, new, keys)."""
        queries = positions[:, None, :, None]
        visible = keys <= queries
        if kind == "sliding" and self._spec.window is not None:
            visible = visible & (keys > queries - self._spec.window)
        if self._slopes is None:
            return torch.zeros_like(visible, dtype=self._dtype).masked_fill(~visible, -torch.inf)
        return (self._slopes * keys).to(self._dtype).masked_fill(~visible, -torch.inf)

    def _turn(self, kind: LayerKind, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The rotations of the new positions: cosines and sines (rows, new, 1, pairs)."""
        frequencies, rope = self._frequencies[kind], self._ropes[kind]
        if frequencies is None or rope is None:
            return None
        angles = positions.to(torch.float32)[:, :, None, None] * frequencies
        return angles.cos() * rope.gain, angles.sin() * rope.gain

    def _attend(
        self,
        index: int,
        layer: Layer,
        buffer: torch.Tensor,
        positions: torch.Tensor,
        turns: tuple[torch.Tensor, torch.Tensor] | None,
        mask: torch.Tensor,
        qkv: torch.Tensor,
    ) -> torch.Tensor:
        """Write a layer's new keys, and return its attention output (rows, new, heads * width)."""
        spec, (rows, num_new, _) = self._spec, qkv.shape
        heads, kv_heads = spec.num_heads, spec.num_kv_heads
        by_head = qkv.view(rows, num_new, heads + 2 * kv_heads, spec.head_dim)
        queries, new_keys, new_values = torch.split(by_head, [heads, kv_heads, kv_heads], dim=2)
        queries, new_keys = norm_heads(spec, layer, queries, new_keys)
        if turns is not None and index not in spec.unturned:
            queries = _rotate(queries, *turns, is_halved=layer.is_halved)
            new_keys = _rotate(new_keys, *turns, is_halved=layer.is_halved)
        own_rows = torch.arange(rows, device=qkv.device)[:, None]
        buffer[own_rows, positions] = torch.stack((new_keys, new_values), dim=2)  # (rows, new, 2, kv heads, width)
        held = buffer[:, : mask.shape[-1]]
        read, _ = attend(
            queries.transpose(1, 2),
            held[:, :, 0].transpose(1, 2),
            held[:, :, 1].transpose(1, 2),
            scale=spec.scale_of(index),
            mask=mask,
            softcap=spec.attention_softcap,
            sinks=None if layer.sinks is None else layer.sinks[None, :, None],
        )
        return read.transpose(1, 2).reshape(rows, num_new, heads * spec.head_dim)


def _rotate(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, *, is_halved: bool) -> torch.Tensor:
    """Rotate the pairs at the front of each head (rows, new, heads, width)."""
    width = 2 * cosines.shape[-1]
    first, second = split_pairs(heads[..., :width].to(torch.float32), is_halved=is_halved).unbind(-1)
    turned = torch.stack((first * cosines - second * sines, first * sines + second * cosines), dim=-1)
    turned = turned.flatten(-2).to(heads.dtype)
    return turned if width == heads.shape[-1] else torch.cat((turned, heads[..., width:]), dim=-1)
