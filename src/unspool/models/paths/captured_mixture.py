"""The feed-forward of experts inside a captured step: routed on the device, only chosen experts are read."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F

from unspool.kernels.gpu.experts.fours import USUAL_DOWN as FOURS_DOWN
from unspool.kernels.gpu.experts.fours import USUAL_UP as FOURS_UP
from unspool.kernels.gpu.experts.fours import multiply_experts
from unspool.kernels.gpu.experts.many_fours import multiply_listed_fours
from unspool.kernels.gpu.experts.many_rows import MOST_PAIRS, Lists, add_shares, list_pairs, multiply_lists
from unspool.kernels.gpu.experts.many_rows import USUAL_DOWN as MANY_DOWN
from unspool.kernels.gpu.experts.many_rows import USUAL_UP as MANY_UP
from unspool.kernels.gpu.experts.one_row import feed_down, feed_up
from unspool.kernels.gpu.experts.routing import Routes, find_routes
from unspool.kernels.gpu.products.activations import CODES
from unspool.kernels.gpu.products.product import multiply
from unspool.kernels.mx import MxWords
from unspool.models.decoder.layers import Layer
from unspool.models.decoder.mixture import Mixture
from unspool.models.decoder.spec import DecoderSpec, MixtureSpec
from unspool.models.weights import MxLinear, Norm

_MOST_OF_FOURS: Final = 24  # tokens, up to which unpacking 4-bit floats for each is faster than for tensor cores
_MOST_REPEATED: Final = 1.15  # how often an expert may be read on average before its tokens are put together


class MixtureStep:
    """Runs the mixtures of a decoder's layers for a fixed number of tokens."""

    def __init__(
        self,
        spec: DecoderSpec,
        num_tokens: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        has_fours: bool = False,  # experts are of 4-bit floats
    ) -> None:
        mixture = spec.mixture
        assert mixture is not None and num_tokens * mixture.num_chosen <= MOST_PAIRS
        self._mixture, self._code = mixture, CODES[spec.activation]
        self._gate: dict[str, Any] = {"limit": mixture.gate_limit, "gain": mixture.gate_gain}
        self._num_tokens = num_tokens
        pairs = num_tokens * mixture.num_chosen
        self._routes = Routes.make(
            num_tokens,
            spec.hidden_size,
            mixture.num_experts,
            mixture.num_chosen,
            device,
            dtype,
            normalises=mixture.is_normalised,
            scale=mixture.weight_scale,
        )
        self._inner = torch.zeros(pairs, mixture.ffn_size, dtype=dtype, device=device)
        self._made = torch.zeros(pairs, spec.hidden_size, dtype=dtype, device=device)
        self._lists: Lists | None = None
        if is_grouped(num_tokens, mixture, _MOST_OF_FOURS if has_fours else 1):
            self._lists = Lists.make(mixture.num_experts, pairs, device)
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
        )
        up, down = layer.up, layer.down
        if isinstance(up, MxLinear) or isinstance(down, MxLinear):
            self._feed_fours(layer, out, lengths, adds=adds)
        elif self._lists is None:
            feed_up(up.weight, routes, self._inner, self._code, bias=up.bias, **self._gate)
            feed_down(down.weight, routes, self._inner, out, bias=down.bias, adds=adds)
        else:
            lists, num_tokens = self._lists, self._num_tokens
            list_pairs(routes, lengths, lists)
            multiply_lists(
                up.weight,
                routes.normed,
                lists,
                self._inner,
                share=mixture.num_chosen,
                num_tokens=num_tokens,
                tiling=MANY_UP,
                bias=up.bias,
                activation=self._code,
                is_gated=True,
                **self._gate,
            )
            multiply_lists(
                down.weight,
                self._inner,
                lists,
                self._made,
                share=1,
                num_tokens=num_tokens,
                tiling=MANY_DOWN,
                bias=down.bias,
            )
            add_shares(self._made, routes, lengths, out, adds=adds)
        self._feed_shared(weights, out)

    def _feed_fours(self, layer: Layer, out: torch.Tensor, lengths: torch.Tensor, *, adds: bool) -> None:
        """Experts of 4-bit floats."""
        up, down, routes, lists = layer.up, layer.down, self._routes, self._lists
        assert isinstance(up, MxLinear) and isinstance(down, MxLinear)
        upper, lower = MxWords(up.words, up.scales), MxWords(down.words, down.scales)
        first: dict[str, Any] = {"share": self._mixture.num_chosen, "bias": up.bias, "activation": self._code}
        first |= {"is_gated": True, **self._gate}
        second: dict[str, Any] = {"share": 1, "bias": down.bias}
        if lists is None:
            multiply_experts(upper, routes.normed, routes, self._inner, FOURS_UP, **first)
            multiply_experts(lower, self._inner, routes, self._made, FOURS_DOWN, is_routed=True, **second)
        else:
            list_pairs(routes, lengths, lists)
            num_tokens = self._num_tokens
            multiply_listed_fours(upper, routes.normed, lists, self._inner, num_tokens=num_tokens, **first)
            multiply_listed_fours(lower, self._inner, lists, self._made, num_tokens=num_tokens, **second)
        add_shares(self._made, routes, lengths, out, adds=adds)

    def _feed_shared(self, weights: Mixture, out: torch.Tensor) -> None:
        """Add the output of the expert that every token runs through."""
        routes = self._routes
        if weights.shared_up is not None and weights.shared_down is not None:
            multiply(weights.shared_up.operand, routes.normed, self._shared, activation=self._code, is_gated=True)
            if weights.shared_gate is not None:
                self._shared.mul_(F.linear(routes.normed, weights.shared_gate.weight).sigmoid_())
            multiply(weights.shared_down.operand, self._shared, out, adds=True)


def is_grouped(num_tokens: int, mixture: MixtureSpec, most_apart: int) -> bool:
    """Whether tokens of one expert are put together: if experts would be read several times otherwise, and there are
    more tokens than `most_apart`."""
    if num_tokens <= most_apart:
        return False
    share = mixture.num_chosen / mixture.num_experts
    distinct = mixture.num_experts * (1.0 - (1.0 - share) ** num_tokens)  # expected, chosen at random
    return num_tokens * mixture.num_chosen > _MOST_REPEATED * distinct
