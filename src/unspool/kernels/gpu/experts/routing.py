"""Which experts a step's tokens run through, found on the device (reference: `models.decoder.mixture.route`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.launching import launch, launch_options, let_next_start, wait_for_input
from unspool.kernels.gpu.products.norms import normalise
from unspool.kernels.wide_products import multiply_wide

TINY = tl.constexpr(1e-20)  # as in the reference
_FEW_ROWS: Final = 4  # up to this many, every row reads the router by itself
_EXPERTS_EACH: Final = 16  # per program


@triton.jit
def _score(
    W, BIAS, X, NORM, LOGITS, NORMED, eps,
    E: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BN: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A few logits of one row."""
    tile, row = tl.program_id(0), tl.program_id(1)
    rn, rk = tile * BN + tl.arange(0, BN), tl.arange(0, KP)
    is_number = rk < K
    w = tl.load(W + rn[:, None] * K + rk[None, :], mask=(rn < E)[:, None] & is_number[None, :], other=0.0)
    norm = rk.to(tl.float32)
    if HAS_NORM:
        norm = tl.load(NORM + rk, mask=is_number, other=0.0).to(tl.float32)
    let_next_start(PDL)
    wait_for_input(PDL)
    x = tl.load(X + row.to(tl.int64) * K + rk, mask=is_number, other=0.0).to(tl.float32)
    if HAS_NORM:
        rounded = (x * tl.rsqrt(tl.sum(x * x, 0) / K + eps) * norm).to(NORMED.dtype.element_ty)
        if tile == 0:
            tl.store(NORMED + row.to(tl.int64) * K + rk, rounded, mask=is_number)
        x = rounded.to(tl.float32)
    logits = tl.sum(w.to(tl.float32) * x[None, :], 1)
    if HAS_BIAS:
        logits += tl.load(BIAS + rn, mask=rn < E, other=0.0).to(tl.float32)
    tl.store(LOGITS + row * E + rn, logits.to(LOGITS.dtype.element_ty), mask=rn < E)


@triton.jit
def _choose(
    LOGITS, CHOICE, CHOSEN, SHARES,
    E: tl.constexpr, EP: tl.constexpr, BE: tl.constexpr, TOP: tl.constexpr,
    IS_SIGMOID: tl.constexpr, HAS_CHOICE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write those of a few experts that a row chooses, each to its place among the chosen."""
    row = tl.program_id(1)
    every, mine = tl.arange(0, EP), tl.program_id(0) * BE + tl.arange(0, BE)
    choice, my_choice = tl.zeros((EP,), tl.float32), tl.zeros((BE,), tl.float32)
    if HAS_CHOICE:
        choice = tl.load(CHOICE + every, mask=every < E, other=0.0).to(tl.float32)
        my_choice = tl.load(CHOICE + mine, mask=mine < E, other=0.0).to(tl.float32)
    let_next_start(PDL)
    wait_for_input(PDL)
    logits = tl.load(LOGITS + row * E + every, mask=every < E, other=float("-inf")).to(tl.float32)
    my_logits = tl.load(LOGITS + row * E + mine, mask=mine < E, other=float("-inf")).to(tl.float32)
    if IS_SIGMOID:
        scores, my_scores = tl.sigmoid(logits), tl.sigmoid(my_logits)
    else:
        highest = tl.max(logits, 0)
        scores = tl.exp(logits - highest)
        total = tl.sum(scores, 0)
        scores, my_scores = scores / total, tl.exp(my_logits - highest) / total
    choice, my_choice = choice + scores, my_choice + my_scores
    is_higher = choice[None, :] > my_choice[:, None]
    is_earlier = (choice[None, :] == my_choice[:, None]) & (every[None, :] < mine[:, None])
    is_before = (is_higher | is_earlier) & (every < E)[None, :] & (every[None, :] != mine[:, None])
    place = tl.sum(is_before.to(tl.int32), 1)  # of an expert among all, the best first
    is_chosen = (place < TOP) & (mine < E)
    tl.store(CHOSEN + row * TOP + place, mine, mask=is_chosen)
    tl.store(SHARES + row * TOP + place, my_scores, mask=is_chosen)


@triton.jit
def find_factor(SHARES, row, scale, TOP: tl.constexpr, TP: tl.constexpr, NORMALISES: tl.constexpr):
    """By what a row's scores are multiplied to be the weights of its experts' outputs."""
    factor = scale
    if NORMALISES:
        slot = tl.arange(0, TP)
        scores = tl.load(SHARES + row * TOP + slot, mask=slot < TOP, other=0.0)
        factor = scale / (tl.sum(scores, 0) + TINY)
    return factor


@dataclass(slots=True)
class Routes:
    """The experts of a step's tokens, and what the kernels that find them work with."""

    normed: torch.Tensor  # (tokens, hidden): the experts' input
    chosen: torch.Tensor  # (tokens, chosen) int32
    shares: torch.Tensor  # (tokens, chosen) float32: scores of the chosen experts
    logits: torch.Tensor  # (tokens, experts) float32
    normalises: bool  # whether scores are divided by their sum
    scale: float  # of the weights

    @classmethod
    def make(
        cls,
        num_tokens: int,
        hidden: int,
        num_experts: int,
        num_chosen: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        normalises: bool = True,
        scale: float = 1.0,
    ) -> Routes:
        """Buffers for a number of tokens."""
        return cls(
            torch.zeros(num_tokens, hidden, dtype=dtype, device=device),
            torch.zeros(num_tokens, num_chosen, dtype=torch.int32, device=device),
            torch.zeros(num_tokens, num_chosen, dtype=torch.float32, device=device),
            torch.zeros(num_tokens, num_experts, dtype=torch.float32, device=device),
            normalises,
            scale,
        )

    @property
    def weighing(self) -> dict[str, Any]:
        """The arguments of kernels that call `find_factor`."""
        num_chosen = self.chosen.shape[1]
        return {"TOP": num_chosen, "TP": triton.next_power_of_2(num_chosen), "NORMALISES": self.normalises}


def find_routes(
    weight: torch.Tensor,  # (experts, hidden)
    x: torch.Tensor,  # (tokens, hidden)
    routes: Routes,
    *,
    norm: torch.Tensor | None = None,  # None: x is normalised already
    eps: float = 0.0,
    bias: torch.Tensor | None = None,
    choice_bias: torch.Tensor | None = None,
    is_sigmoid: bool = False,
) -> None:
    """Normalise the tokens' states, and choose their experts."""
    experts, hidden = weight.shape
    tokens = x.shape[0]
    if norm is None:
        routes.normed = x
    if tokens <= _FEW_ROWS:
        launch(
            _score,
            (experts, tokens),
            weight,
            bias if bias is not None else weight,
            x,
            norm if norm is not None else weight,
            routes.logits,
            routes.normed,
            eps,
            E=experts,
            K=hidden,
            KP=triton.next_power_of_2(hidden),
            BN=1,
            HAS_NORM=norm is not None,
            HAS_BIAS=bias is not None,
            num_warps=4,
            **launch_options(),
        )
    else:
        if norm is not None:
            normalise(x, norm, eps, routes.normed)
        routes.logits = multiply_wide(routes.normed, weight, bias)
    launch(
        _choose,
        (triton.cdiv(experts, _EXPERTS_EACH), tokens),
        routes.logits,
        choice_bias if choice_bias is not None else weight,
        routes.chosen,
        routes.shares,
        E=experts,
        EP=triton.next_power_of_2(experts),
        BE=_EXPERTS_EACH,
        TOP=routes.chosen.shape[1],
        IS_SIGMOID=is_sigmoid,
        HAS_CHOICE=choice_bias is not None,
        num_warps=4,
        **launch_options(),
    )
