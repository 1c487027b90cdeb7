"""The feed-forward of experts inside a captured step: routed on the device, only chosen experts are read."""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F

from unspool.kernels.gpu.experts.many_rows import MOST_PAIRS, Lists, add_shares, list_pairs, multiply_lists
from unspool.kernels.gpu.experts.many_rows import USUAL_DOWN as MANY_DOWN
from unspool.kernels.gpu.experts.many_rows import USUAL_UP as MANY_UP
from unspool.kernels.gpu.experts.one_row import feed_down, feed_up
from unspool.kernels.gpu.experts.routing import Routes, find_routes
from unspool.kernels.gpu.products.activations import CODES
from unspool.kernels.gpu.products.product import multiply
from unspool.models.decoder.layers import Layer
from unspool.models.decoder.spec import DecoderSpec
from unspool.models.weights import Norm

_MOST_REPEATED: Final = 1.15  # how often an expert may be read on average before its tokens are put together


class MixtureStep:
    """Runs the mixtures of a decoder's layers for a fixed number of tokens."""

    def __init__(self, spec: DecoderSpec, num_tokens: int, device: torch.device, dtype: torch.dtype) -> None:
        mixture = spec.mixture
        assert mixture is not None and num_tokens * mixture.num_chosen <= MOST_PAIRS
        self._mixture, self._code = mixture, CODES[spec.activation]
        self._num_tokens = num_tokens
        pairs = num_tokens * mixture.num_chosen
        self._routes = Routes.make(
            num_tokens, spec.hidden_size, mixture.num_experts, mixture.num_chosen, device, dtype
        )
        self._inner = torch.zeros(pairs, mixture.ffn_size, dtype=dtype, device=device)
        self._lists: Lists | None = None
        if is_grouped(num_tokens, mixture.num_experts, mixture.num_chosen):
            self._lists = Lists.make(mixture.num_experts, pairs, device)
            self._made = torch.zeros(pairs, spec.hidden_size, dtype=dtype, device=device)
        if mixture.shared_size:
            self._shared = torch.zeros(num_tokens, mixture.shared_size, dtype=dtype, device=device)

    def feed(
        self,
        layer: Layer,
        x: torch.Tensor,  # (tokens, hidden)
        out: torch.Tensor,  # (tokens, hidden)
        lengths: torch.Tensor,  # (rows,): -1 for absent rows
        *,
        norm: Norm | None = None,  # None: x is normalised already
        adds: bool = False,
    ) -> None:
        """A layer's feed-forward, written to `out` or added to it."""
        mixture, weights, routes = self._mixture, layer.mixture, self._routes
        assert weights is not None
        find_routes(
            weights.router.weight,
            x,
            routes,
            norm=None if norm is None else norm.weight,
            eps=0.0 if norm is None else norm.eps,
            bias=weights.router.bias,
            choice_bias=weights.choice_bias,
            is_sigmoid=mixture.scoring == "sigmoid",
            normalises=mixture.is_normalised,
            scale=mixture.weight_scale,
        )
        up, down = layer.up.weight, layer.down.weight
        if self._lists is None:
            feed_up(up, routes, self._inner, self._code, bias=layer.up.bias)
            feed_down(down, routes, self._inner, out, bias=layer.down.bias, adds=adds)
        else:
            lists, num_tokens = self._lists, self._num_tokens
            list_pairs(routes, lengths, lists)
            multiply_lists(
                up,
                routes.normed,
                lists,
                self._inner,
                share=mixture.num_chosen,
                num_tokens=num_tokens,
                tiling=MANY_UP,
                bias=layer.up.bias,
                activation=self._code,
                is_gated=True,
            )
            multiply_lists(
                down,
                self._inner,
                lists,
                self._made,
                share=1,
                num_tokens=num_tokens,
                tiling=MANY_DOWN,
                bias=layer.down.bias,
            )
            add_shares(self._made, routes, lengths, out, adds=adds)
        if weights.shared_up is not None and weights.shared_down is not None:
            multiply(weights.shared_up.operand, routes.normed, self._shared, activation=self._code, is_gated=True)
            if weights.shared_gate is not None:
                self._shared.mul_(F.linear(routes.normed, weights.shared_gate.weight).sigmoid_())
            multiply(weights.shared_down.operand, self._shared, out, adds=True)


def is_grouped(num_tokens: int, num_experts: int, num_chosen: int) -> bool:
    """Whether tokens of one expert are put together: if experts would be read several times otherwise."""
    distinct = num_experts * (1.0 - (1.0 - num_chosen / num_experts) ** num_tokens)  # expected, chosen at random
    return num_tokens * num_chosen > _MOST_REPEATED * distinct
