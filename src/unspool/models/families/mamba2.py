"""Mamba-2: state spaces with heads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from unspool.errors import LoadError
from unspool.kernels.activations import find_activation
from unspool.models.assembly import Progress
from unspool.models.families.base import read_ids, refuse_quantised
from unspool.models.families.entry import FamilyEntry
from unspool.models.mamba.second import Mamba2, assemble_mamba2
from unspool.models.mamba.second_weights import Mamba2Spec
from unspool.models.paths.captured_ahead import await_triton
from unspool.models.settings import Settings
from unspool.models.weights import WeightSource


@dataclass(frozen=True, kw_only=True)
class Mamba2Family(FamilyEntry):
    """Builds models of Mamba-2 checkpoints."""

    name: str = "mamba2"
    architectures: tuple[str, ...] = ("Mamba2ForCausalLM",)
    model_types: tuple[str, ...] = ("mamba2",)

    def build(
        self,
        config: Mapping[str, Any],
        tensors: WeightSource,
        *,
        is_gguf: bool,  # noqa: ARG002 - no GGUF architecture is named
        device: torch.device,
        dtype: torch.dtype,
        progress: Progress | None = None,
    ) -> Mamba2:
        """The model of a config and its weights."""
        spec = _read_config(Settings(config))
        self.prepare(config, tensors, device, dtype)
        weights = assemble_mamba2(spec, tensors, device, dtype, progress)
        await_triton()  # a caller may import parts of it next
        return Mamba2(spec, weights, config, device, dtype)


def _read_config(config: Settings) -> Mamba2Spec:
    refuse_quantised(config)
    hidden_size, num_heads = config.integer("hidden_size"), config.integer("num_heads", default=128)
    inner_size = config.integer("expand", default=2) * hidden_size
    head_size, num_groups = config.integer("head_dim", default=64), config.integer("n_groups", default=8)
    if num_heads * head_size != inner_size or num_heads % num_groups:
        raise LoadError(
            f"{config.where} has {num_heads} heads of {head_size} in {num_groups} groups, which do not divide an inner "
            f"size of {inner_size}"
        )
    activation = config.text("hidden_act", default="silu")
    find_activation(activation)
    least, most = _read_limits(config)
    return Mamba2Spec(
        family="mamba2",
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        num_layers=config.integer("num_hidden_layers", "n_layer"),
        inner_size=inner_size,
        state_size=config.integer("state_size", default=128),
        kernel_size=config.integer("conv_kernel", default=4),
        time_rank=0,
        eps=config.number("layer_norm_epsilon", default=1e-5),
        activation=activation,
        has_bias=config.boolean("use_bias", default=False),
        has_conv_bias=config.boolean("use_conv_bias", default=True),
        is_residual_float32=config.boolean("residual_in_fp32", default=True),
        is_head_tied=config.boolean("tie_word_embeddings", default=False),
        num_heads=num_heads,
        num_groups=num_groups,
        least_time=least,
        most_time=most,
        **read_ids(config),
    )


def _read_limits(config: Settings) -> tuple[float, float]:
    """The bounds of time steps, of which the upper one may be infinite."""
    limits = config.find("time_step_limit")
    if limits is None:
        return 0.0, math.inf
    numbers = [_read_number(one) for one in limits] if isinstance(limits, list | tuple) else []
    if len(numbers) != 2 or not 0 <= numbers[0] <= numbers[1]:
        raise LoadError(f"{config.where} has time_step_limit={limits!r:.100}; two numbers in order, from 0 on, are due")
    return numbers[0], numbers[1]


def _read_number(value: object) -> float:
    if value in ("Infinity", {"__float__": "Infinity"}):  # JSON has no infinity: transformers writes it so
        return math.inf
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


MAMBA2 = Mamba2Family()
