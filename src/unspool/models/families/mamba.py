"""Mamba: state spaces instead of attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from unspool.kernels.activations import find_activation
from unspool.models.assembly import Progress
from unspool.models.families.base import read_ids, refuse_quantised
from unspool.models.families.entry import FamilyEntry
from unspool.models.mamba.model import Mamba
from unspool.models.mamba.weights import MambaNames, MambaSpec, assemble_mamba
from unspool.models.paths.captured_ahead import await_triton
from unspool.models.settings import Settings
from unspool.models.weights import WeightSource

NAMES: Final = MambaNames(
    embedding="backbone.embeddings",
    layer="backbone.layers.{i}.",
    norm="norm",
    project_in="mixer.in_proj",
    conv="mixer.conv1d",
    select="mixer.x_proj",
    time="mixer.dt_proj",
    decay="mixer.A_log",
    skip="mixer.D",
    out="mixer.out_proj",
    final_norm="backbone.norm_f",
    head="lm_head",
    has_decay_log=True,
    has_flat_conv=False,
)
GGUF_NAMES: Final = MambaNames(
    embedding="token_embd",
    layer="blk.{i}.",
    norm="attn_norm",
    project_in="ssm_in",
    conv="ssm_conv1d",
    select="ssm_x",
    time="ssm_dt",
    decay="ssm_a",
    skip="ssm_d",
    out="ssm_out",
    final_norm="output_norm",
    head="output",
    has_decay_log=False,
    has_flat_conv=True,
)


@dataclass(frozen=True, kw_only=True)
class MambaFamily(FamilyEntry):
    """Builds models of Mamba checkpoints."""

    name: str = "mamba"
    architectures: tuple[str, ...] = ("MambaForCausalLM", "FalconMambaForCausalLM")
    model_types: tuple[str, ...] = ("mamba", "falcon_mamba")
    gguf: tuple[str, ...] = ("mamba",)

    def build(
        self,
        config: Mapping[str, Any],
        tensors: WeightSource,
        *,
        is_gguf: bool,
        device: torch.device,
        dtype: torch.dtype,
        progress: Progress | None = None,
    ) -> Mamba:
        """The model of a config (or a GGUF header) and its weights."""
        if is_gguf:
            spec, names = _read_gguf(Settings(config, "the GGUF header", "mamba."), tensors), GGUF_NAMES
        else:
            spec, names = _read_config(Settings(config)), NAMES
            if "backbone.embedding.weight" in tensors:  # as the first checkpoints have it
                names = replace(names, embedding="backbone.embedding")
            self.prepare(config, tensors, device, dtype)
        weights = assemble_mamba(spec, names, tensors, device, dtype, progress)
        await_triton()  # a caller may import parts of it next
        return Mamba(spec, weights, {} if is_gguf else config, device, dtype)


def _read_config(config: Settings) -> MambaSpec:
    refuse_quantised(config)
    hidden_size = config.integer("hidden_size")
    activation = config.text("hidden_act", default="silu")
    find_activation(activation)
    rank = config.find("time_step_rank")
    is_falcon = config.text("model_type", default="mamba") == "falcon_mamba"
    return MambaSpec(
        family="falcon_mamba" if is_falcon else "mamba",
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        num_layers=config.integer("num_hidden_layers", "n_layer"),
        inner_size=config.integer("intermediate_size", default=config.integer("expand", default=2) * hidden_size),
        state_size=config.integer("state_size", default=16),
        kernel_size=config.integer("conv_kernel", default=4),
        time_rank=-(-hidden_size // 16) if rank in (None, "auto") else config.integer("time_step_rank"),
        eps=config.number("layer_norm_epsilon", default=1e-5),
        activation=activation,
        has_bias=config.boolean("use_bias", default=False),
        has_conv_bias=config.boolean("use_conv_bias", default=True),
        is_residual_float32=config.boolean("residual_in_fp32", default=True),
        is_head_tied=config.boolean("tie_word_embeddings", default=True),
        select_eps=config.number("mixer_rms_eps", default=1e-6) if is_falcon else None,
        **read_ids(config),
    )


def _read_gguf(header: Settings, source: WeightSource) -> MambaSpec:
    eps = header.number("attention.layer_norm_rms_epsilon")
    is_falcon = header.boolean("ssm.dt_b_c_rms", default=False)
    hidden_size = header.integer("embedding_length")
    tokenizer = Settings(header.values, header.where, "tokenizer.ggml.")
    return MambaSpec(
        vocab_size=source.info("token_embd.weight").shape[0],
        hidden_size=hidden_size,
        num_layers=header.integer("block_count"),
        inner_size=header.integer("ssm.inner_size"),
        state_size=header.integer("ssm.state_size"),
        kernel_size=header.integer("ssm.conv_kernel"),
        time_rank=header.integer("ssm.time_step_rank"),
        eps=eps,
        family="falcon_mamba" if is_falcon else "mamba",
        select_eps=eps if is_falcon else None,
        has_conv_bias="blk.0.ssm_conv1d.bias" in source,
        is_head_tied="output.weight" not in source,
        bos_token_id=tokenizer.token("bos_token_id"),
        eos_token_id=tokenizer.tokens("eos_token_id"),
        pad_token_id=tokenizer.token("padding_token_id"),
    )


MAMBA = MambaFamily()
