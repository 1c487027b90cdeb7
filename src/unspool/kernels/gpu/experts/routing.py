"""Which experts a step's tokens run through, found on the device (reference: `models.decoder.mixture.route`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.launching import launch, launch_options, let_next_start, wait_for_input

_TINY = tl.constexpr(1e-20)  # as in the reference


@triton.jit
def _route(
    W, BIAS, X, NORM, CHOICE, LOGITS, COUNTS, NORMED, CHOSEN, SHARES, eps, scale,
    E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BN: tl.constexpr, TOP: tl.constexpr,
    IS_SIGMOID: tl.constexpr, NORMALISES: tl.constexpr, HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_CHOICE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A few logits of one row; the program that ends last chooses the row's experts."""
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
    logits = logits.to(X.dtype.element_ty).to(tl.float32)  # rounded as the reference's
    tl.store(LOGITS + row * E + rn, logits, mask=rn < E)
    tl.debug_barrier()  # every thread's logits are written before the count says so
    num_before = tl.atomic_add(COUNTS + row, 1, sem="acq_rel")
    if num_before == tl.num_programs(0) - 1:
        tl.debug_barrier()
        re = tl.arange(0, EP)
        found = tl.load(LOGITS + row * E + re, mask=re < E, other=float("-inf"), cache_modifier=".cg")
        if IS_SIGMOID:
            scores = tl.where(re < E, tl.sigmoid(found), 0.0)
        else:
            raised = tl.exp(found - tl.max(found, 0))
            scores = raised / tl.sum(raised, 0)
        choice = scores
        if HAS_CHOICE:
            choice += tl.load(CHOICE + re, mask=re < E, other=0.0)
        choice = tl.where(re < E, choice, float("-inf"))
        is_higher = choice[None, :] > choice[:, None]
        is_earlier = (choice[None, :] == choice[:, None]) & (re[None, :] < re[:, None])
        place = tl.sum((is_higher | is_earlier).to(tl.int32), 1)  # of an expert among all, the best first
        is_chosen = (place < TOP) & (re < E)
        share = scores
        if NORMALISES:
            share = share / (tl.sum(tl.where(is_chosen, scores, 0.0), 0) + _TINY)
        tl.store(CHOSEN + row * TOP + place, re, mask=is_chosen)
        tl.store(SHARES + row * TOP + place, share * scale, mask=is_chosen)
        tl.store(COUNTS + row, 0)


@dataclass(slots=True)
class Routes:
    """The experts of a step's tokens, and what the kernels that find them work with."""

    normed: torch.Tensor  # (tokens, hidden): the experts' input
    chosen: torch.Tensor  # (tokens, chosen) int32
    shares: torch.Tensor  # (tokens, chosen) float32: weights of the experts' outputs
    logits: torch.Tensor  # (tokens, experts) float32
    counts: torch.Tensor  # (tokens,) int32: programs that have written their logits; zeros between steps

    @classmethod
    def make(
        cls, num_tokens: int, hidden: int, num_experts: int, num_chosen: int, device: torch.device, dtype: torch.dtype
    ) -> Routes:
        """Buffers for a number of tokens."""
        return cls(
            torch.zeros(num_tokens, hidden, dtype=dtype, device=device),
            torch.zeros(num_tokens, num_chosen, dtype=torch.int32, device=device),
            torch.zeros(num_tokens, num_chosen, dtype=torch.float32, device=device),
            torch.zeros(num_tokens, num_experts, dtype=torch.float32, device=device),
            torch.zeros(num_tokens, dtype=torch.int32, device=device),
        )


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
    normalises: bool = True,
    scale: float = 1.0,
) -> None:
    """Normalise the tokens' states, and choose their experts."""
    experts, hidden = weight.shape
    rows = 1 if experts <= 256 else 4
    if norm is None:
        routes.normed = x
    launch(
        _route,
        (triton.cdiv(experts, rows), x.shape[0]),
        weight,
        bias if bias is not None else weight,
        x,
        norm if norm is not None else weight,
        choice_bias if choice_bias is not None else weight,
        routes.logits,
        routes.counts,
        routes.normed,
        routes.chosen,
        routes.shares,
        eps,
        scale,
        E=experts,
        EP=triton.next_power_of_2(experts),
        K=hidden,
        KP=triton.next_power_of_2(hidden),
        BN=rows,
        TOP=routes.chosen.shape[1],
        IS_SIGMOID=is_sigmoid,
        NORMALISES=normalises,
        HAS_NORM=norm is not None,
        HAS_BIAS=bias is not None,
        HAS_CHOICE=choice_bias is not None,
        num_warps=4,
        **launch_options(),
    )
