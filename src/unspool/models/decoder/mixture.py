"""A mixture of experts: its weights, their assembly from a checkpoint, and the feed-forward operator by operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from unspool.errors import LoadError, UnsupportedError
from unspool.kernels.activations import Activation
from unspool.kernels.cpu import BLOCK, quantise
from unspool.kernels.cpu.tiles import TILE
from unspool.kernels.mx import MxWords
from unspool.kernels.presence import runs_kernels
from unspool.kernels.wide_products import multiply_wide
from unspool.models.assembly import Assembler
from unspool.models.decoder.spec import DecoderSpec, MixtureSpec
from unspool.models.weights import AnyLinear, Linear, MxLinear

_ALIGNED: Final = 8  # numbers, of rows that torch's grouped product reads
_GROUPED_FROM: Final = (9, 0)
TINY: Final = 1e-20  # added to a sum of scores before dividing by it: sigmoids may all be zero


@dataclass(frozen=True, slots=True)
class MixtureNames:
    """A checkpoint's names of a mixture's weights, after a layer's prefix; `{e}` is the expert.

    Experts' matrices are tensors of their own (without .weight), or all of a kind are one tensor (`stacked_…`, the
    whole name): (experts, outputs, inputs).
    """

    router: str
    up: tuple[str, ...] = ()  # gate and up
    down: str = ""
    stacked_up: tuple[str, ...] = ()  # gate and up, or both in one
    stacked_down: str = ""
    turned_up: str = ""  # as gpt-oss stores them: (experts, inputs, outputs), gate and up in turn; or in MXFP4
    turned_down: str = ""
    choice_bias: str = ""
    shared_up: tuple[str, ...] = ()
    shared_down: str = ""
    shared_gate: str = ""


@dataclass(slots=True)
class Mixture:
    """What a layer has beside its experts, whose matrices stand one below the other in its `up` and `down`."""

    router: Linear  # (experts, hidden)
    choice_bias: torch.Tensor | None  # (experts,) float32
    shared_up: AnyLinear | None
    shared_down: AnyLinear | None
    shared_gate: Linear | None  # (1, hidden)


def assemble_mixture(assembler: Assembler, spec: DecoderSpec, names: MixtureNames, start: str) -> Mixture:
    """The weights of a layer's mixture but for its experts'."""
    mixture, hidden = spec.mixture, spec.hidden_size
    assert mixture is not None
    choice_bias = shared_up = shared_down = shared_gate = None
    if mixture.has_choice_bias:
        shape = assembler.shape_of(start + names.choice_bias)  # ERNIE's has a row
        bias = assembler.take(start + names.choice_bias, *shape[:-1], mixture.num_experts, dtype=torch.float32)
        choice_bias = bias.flatten()
    if mixture.shared_size:
        shared_up = assembler.product(
            [start + name for name in names.shared_up], [mixture.shared_size] * 2, hidden, has_bias=False
        )
        shared_down = assembler.product([start + names.shared_down], [hidden], mixture.shared_size, has_bias=False)
    if mixture.is_shared_gated:
        gate = f"{start}{names.shared_gate}.weight"
        is_vector = len(assembler.shape_of(gate)) == 1  # as GGUF files store it
        shared_gate = Linear(assembler.take(gate, hidden)[None] if is_vector else assembler.matrix(gate, 1, hidden))
    return Mixture(
        router=assembler.linear(
            [start + names.router], [mixture.num_experts], hidden, has_bias=mixture.has_router_bias
        ),
        choice_bias=choice_bias,
        shared_up=shared_up,
        shared_down=shared_down,
        shared_gate=shared_gate,
    )


def assemble_experts(
    assembler: Assembler, spec: DecoderSpec, names: MixtureNames, start: str
) -> tuple[AnyLinear, AnyLinear]:
    """The matrices of all experts, one below the other: gate and up (experts * 2 * ffn, hidden), down (experts *
    hidden, ffn)."""
    mixture, hidden = spec.mixture, spec.hidden_size
    assert mixture is not None
    count, inner, has_bias = mixture.num_experts, mixture.ffn_size, spec.has_ffn_bias
    if assembler.packing == "fp8":
        raise UnsupportedError(
            "there are no products of experts' matrices of 8-bit floats; use quantize='int8' or None"
        )
    if names.turned_up:
        up = _assemble_turned(assembler, start + names.turned_up, count, 2 * inner, hidden, is_gate=True)
        return up, _assemble_turned(assembler, start + names.turned_down, count, hidden, inner, is_gate=False)
    if names.stacked_up and assembler.has(start + names.stacked_up[0]):
        part = 2 * inner // len(names.stacked_up)
        up = assembler.stack([start + name for name in names.stacked_up], count, part, hidden)
        return up, assembler.stack([start + names.stacked_down], count, hidden, inner)
    ups = [start + name.format(e=expert) for expert in range(count) for name in names.up]
    downs = [start + names.down.format(e=expert) for expert in range(count)]
    make_up = assembler.product if 2 * inner % TILE == 0 else assembler.linear  # an expert begins with a tile
    return (
        make_up(ups, [inner] * len(ups), hidden, has_bias=has_bias),
        assembler.product(downs, [hidden] * count, inner, has_bias=has_bias),
    )


def _assemble_turned(
    assembler: Assembler, name: str, count: int, outputs: int, inputs: int, *, is_gate: bool
) -> AnyLinear:
    """Experts' matrices as gpt-oss stores them, with their biases."""
    rows = torch.arange(count * outputs, device=assembler.device)
    if is_gate:  # gate and value in turn: ours are gate above value
        rows = rows.view(count, outputs // 2, 2).transpose(1, 2).flatten()
    bias = assembler.take(f"{name}_bias", count, outputs).flatten()[rows]
    if assembler.has(f"{name}_blocks"):
        if inputs % BLOCK:
            raise LoadError(
                f"{name}_blocks hold whole blocks of {BLOCK} numbers, and the config makes rows of {inputs}"
            )
        size = inputs // BLOCK
        blocks = assembler.take(f"{name}_blocks", count, outputs, size, BLOCK // 2, dtype=torch.uint8)
        scales = assembler.take(f"{name}_scales", count, outputs, size, dtype=torch.uint8)
        return assembler.lay_out_mx(blocks.view(-1, size, BLOCK // 2)[rows], scales.view(-1, size)[rows], bias)
    weight = assembler.take(name, count, inputs, outputs).transpose(1, 2).reshape(-1, inputs)[rows]
    if assembler.packs(inputs) and outputs % TILE == 0:
        return assembler.lay_out(quantise(weight, "int4" if assembler.packing == "int4" else "int8"), bias=bias)
    return Linear(weight, bias)


def route(mixture: MixtureSpec, weights: Mixture, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of tokens (tokens, hidden), and the weights of their outputs in float32: both (tokens, chosen)."""
    logits = multiply_wide(x, weights.router.weight, weights.router.bias).float()
    scores = logits.softmax(-1) if mixture.scoring == "softmax" else logits.sigmoid()
    choice = scores if weights.choice_bias is None else scores + weights.choice_bias
    chosen = choice.topk(mixture.num_chosen, dim=-1).indices
    found = scores.gather(1, chosen)
    if mixture.is_normalised:
        found = found / (found.sum(-1, keepdim=True) + TINY)
    return chosen, found * mixture.weight_scale if mixture.weight_scale != 1.0 else found


def feed_experts(
    mixture: MixtureSpec, weights: Mixture, up: AnyLinear, down: AnyLinear, x: torch.Tensor, activate: Activation
) -> torch.Tensor:
    """The feed-forward of states (…, hidden): every token through its experts, rows of one expert together."""
    flat = x.reshape(-1, x.shape[-1])
    chosen, found = route(mixture, weights, flat)
    shared = _feed_shared(weights, flat, activate)
    if isinstance(up, Linear) and isinstance(down, Linear) and _can_group(flat, mixture):
        made = _feed_groups(mixture, up, down, flat, chosen, found, activate)
        return (made if shared is None else made.add_(shared)).view(x.shape)
    if isinstance(up, MxLinear) and isinstance(down, MxLinear) and runs_kernels(flat.device):
        made = _feed_fours(mixture, up, down, flat, chosen, found)
        return (made if shared is None else made.add_(shared)).view(x.shape)
    made = torch.zeros_like(flat) if shared is None else shared
    order = chosen.flatten().argsort(stable=True)  # pairs of a token and an expert, expert by expert
    counts = torch.bincount(chosen.flatten(), minlength=mixture.num_experts).tolist()
    tokens = order // mixture.num_chosen
    shares = found.flatten()[order].to(flat.dtype)[:, None]
    first = 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        some = slice(first, first + count)
        gate, value = up.part(expert, mixture.num_experts)(flat[tokens[some]]).chunk(2, dim=-1)
        fed = down.part(expert, mixture.num_experts)(join_gate(mixture, gate, value, activate))
        made.index_add_(0, tokens[some], fed * shares[some])
        first += count
    return made.view(x.shape)


def _can_group(x: torch.Tensor, mixture: MixtureSpec) -> bool:
    """Whether torch has a product of all experts in one call, which does not wait for their numbers of tokens."""
    return (
        x.is_cuda
        and x.dtype == torch.bfloat16
        and x.shape[1] % _ALIGNED == 0
        and mixture.ffn_size % _ALIGNED == 0
        and hasattr(torch, "_grouped_mm")
        and torch.cuda.get_device_capability(x.device) >= _GROUPED_FROM
    )


def _feed_groups(
    mixture: MixtureSpec,
    up: Linear,
    down: Linear,
    x: torch.Tensor,
    chosen: torch.Tensor,
    found: torch.Tensor,
    activate: Activation,
) -> torch.Tensor:
    """The experts' outputs (tokens, hidden), by products of all experts in one call."""
    experts, order = chosen.flatten().sort(stable=True)
    numbers = torch.arange(mixture.num_experts, device=x.device)
    ends = torch.searchsorted(experts, numbers, right=True).to(torch.int32)  # of each expert's pairs

    def multiply(rows: torch.Tensor, linear: Linear) -> torch.Tensor:
        stacked = linear.weight.view(mixture.num_experts, -1, rows.shape[1])
        made: torch.Tensor = torch._grouped_mm(rows, stacked.transpose(1, 2), offs=ends)
        return made if linear.bias is None else made + linear.bias.view(mixture.num_experts, -1)[experts]

    gate, value = multiply(x[order // mixture.num_chosen], up).chunk(2, dim=-1)
    fed = multiply(join_gate(mixture, gate, value, activate), down) * found.flatten()[order].to(x.dtype)[:, None]
    made = torch.empty_like(fed)
    made[order] = fed
    return made.view(*chosen.shape, -1).sum(1)


def _feed_fours(
    mixture: MixtureSpec,
    up: MxLinear,
    down: MxLinear,
    x: torch.Tensor,
    chosen: torch.Tensor,
    found: torch.Tensor,
) -> torch.Tensor:
    """The outputs of experts of 4-bit floats, which kernels unpack on the way."""
    assert mixture.gate_limit is not None  # gpt-oss's gate: the only experts in that format
    from unspool.kernels.gpu.experts.prompts import feed_fours  # Triton is imported where a GPU is used

    return feed_fours(
        MxWords(up.words, up.scales),
        MxWords(down.words, down.scales),
        x,
        chosen,
        found,
        num_experts=mixture.num_experts,
        biases=(up.bias, down.bias),
        limit=mixture.gate_limit,
        gain=mixture.gate_gain,
    )


def join_gate(mixture: MixtureSpec, gate: torch.Tensor, value: torch.Tensor, activate: Activation) -> torch.Tensor:
    """activation(gate) · value, or gpt-oss's form of it."""
    limit = mixture.gate_limit
    if limit is None:
        return activate(gate) * value
    gate, value = gate.clamp(max=limit), value.clamp(-limit, limit)
    return gate * torch.sigmoid(mixture.gate_gain * gate) * (value + 1)


def _feed_shared(weights: Mixture, x: torch.Tensor, activate: Activation) -> torch.Tensor | None:
    """The output of the expert that every token runs through."""
    if weights.shared_up is None or weights.shared_down is None:
        return None
    gate, value = weights.shared_up(x).chunk(2, dim=-1)
    made = weights.shared_down(activate(gate) * value)
    return made if weights.shared_gate is None else made * weights.shared_gate(x).sigmoid()
