"""GGUF headers as llama.cpp writes them: one reader for all architectures, which families then adjust."""

from __future__ import annotations

from typing import Literal

import torch

from unspool.errors import LoadError, UnsupportedError
from unspool.models.decoder.frequencies import make_rope, plain_frequencies, yarn_magnitude, yarn_rope
from unspool.models.decoder.layers import WeightNames
from unspool.models.decoder.mixture import MixtureNames
from unspool.models.decoder.spec import DecoderSpec, MixtureSpec, NormSpec, RopeSpec
from unspool.models.settings import Settings
from unspool.models.weights import WeightSource


def find_gguf_names(_header: Settings, source: WeightSource) -> WeightNames:
    """llama.cpp's names, which are the same for all architectures."""
    is_fused = "blk.0.attn_qkv.weight" in source
    is_gated = "blk.0.ffn_gate.weight" in source or "blk.0.ffn_gate_inp.weight" in source  # experts are gated
    return WeightNames(
        embedding="token_embd",
        layer="blk.{i}.",
        attn_norm="attn_norm",
        qkv=("attn_qkv",) if is_fused else ("attn_q", "attn_k", "attn_v"),
        out="attn_output",
        ffn_norm="ffn_norm",
        up=("ffn_gate", "ffn_up") if is_gated else ("ffn_up",),
        down="ffn_down",
        post_attn_norm="post_attention_norm",
        post_ffn_norm="post_ffw_norm",
        q_norm="attn_q_norm",
        k_norm="attn_k_norm",
        final_norm="output_norm",
        head="output",
        positions="position_embd",
        embedding_norm="token_embd_norm",
        mixture=MixtureNames(
            router="ffn_gate_inp",
            up=("ffn_gate.{e}", "ffn_up.{e}"),  # of older files
            down="ffn_down.{e}",
            stacked_up=("ffn_gate_exps.weight", "ffn_up_exps.weight"),
            stacked_down="ffn_down_exps.weight",
            shared_up=("ffn_gate_shexp", "ffn_up_shexp"),
            shared_down="ffn_down_shexp",
            shared_gate="ffn_gate_inp_shexp",
        ),
    )


def read_gguf_decoder(
    header: Settings,
    source: WeightSource,
    *,
    family: str,
    norm: Literal["rms", "layer"] = "rms",
    is_interleaved: bool = False,
    has_rope: bool = True,
    activation: str = "silu",
    normalises: bool | None = None,  # the weights of chosen experts; None: the family has no experts
) -> DecoderSpec:
    """The decoder that a header describes; the tensors show which biases and norms there are."""
    has_experts = header.integer("expert_count", default=0) > 0
    if has_experts and normalises is None:
        raise UnsupportedError(f"{header.where} describes a mixture of experts, which {family} has none of")
    hidden_size, num_heads = header.integer("embedding_length"), _same(header, "attention.head_count")
    num_kv_heads = _same(header, "attention.head_count_kv", num_heads)
    if num_heads % num_kv_heads:
        raise LoadError(f"{header.where} has {num_heads} heads that can't share {num_kv_heads} key heads evenly")
    head_dim = header.integer("attention.key_length", default=hidden_size // num_heads)
    if header.integer("attention.value_length", default=head_dim) != head_dim:
        raise UnsupportedError(f"{header.where} has values of another width than keys, which is not built")
    eps = "attention.layer_norm_rms_epsilon" if norm == "rms" else "attention.layer_norm_epsilon"
    tokenizer = Settings(header.values, header.where, "tokenizer.ggml.")
    return DecoderSpec(
        family=family,
        vocab_size=source.info("token_embd.weight").shape[0],
        hidden_size=hidden_size,
        num_layers=header.integer("block_count"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        ffn_size=_same(header, "feed_forward_length"),
        max_context=header.integer("context_length"),
        norm=NormSpec(norm, header.number(eps), has_bias="blk.0.attn_norm.bias" in source),
        rope=_read_rope(header, source, head_dim, is_interleaved) if has_rope else None,
        attention_scale=head_dim**-0.5,
        qk_norm=NormSpec("rms", header.number(eps)) if "blk.0.attn_q_norm.weight" in source else None,
        has_qkv_bias="blk.0.attn_q.bias" in source or "blk.0.attn_qkv.bias" in source,
        has_out_bias="blk.0.attn_output.bias" in source,
        is_gated="blk.0.ffn_gate.weight" in source or has_experts,
        activation=activation,
        has_ffn_bias="blk.0.ffn_up.bias" in source,
        mixture=_read_mixture(header, source, bool(normalises)) if has_experts else None,
        is_head_tied="output.weight" not in source,
        has_head_bias="output.bias" in source,
        bos_token_id=tokenizer.token("bos_token_id"),
        eos_token_id=tokenizer.tokens("eos_token_id"),
        pad_token_id=tokenizer.token("padding_token_id"),
    )


def _read_mixture(header: Settings, source: WeightSource, is_normalised: bool) -> MixtureSpec:
    """The experts of a header; the tensors show which layers have them."""
    num_experts, num_chosen = header.integer("expert_count"), header.integer("expert_used_count")
    if not 1 <= num_chosen <= num_experts:
        raise LoadError(f"{header.where} has {num_experts} experts and chooses {num_chosen} of them for a token")
    inner = header.integer("expert_feed_forward_length", default=_same(header, "feed_forward_length"))
    shared = 0
    layers = range(header.integer("block_count"))
    for layer in layers:
        if f"blk.{layer}.ffn_up_shexp.weight" in source:
            shared = source.info(f"blk.{layer}.ffn_up_shexp.weight").shape[0]
            break
    return MixtureSpec(
        num_experts,
        num_chosen,
        inner,
        is_normalised=is_normalised,
        shared_size=shared,
        is_shared_gated=any(f"blk.{layer}.ffn_gate_inp_shexp.weight" in source for layer in layers),
        dense_layers=frozenset(layer for layer in layers if f"blk.{layer}.ffn_gate_inp.weight" not in source),
    )


def _same(header: Settings, name: str, default: int | None = None) -> int:
    """A number that a header may give for each layer; all layers must agree."""
    value = header.find(name)
    if isinstance(value, list | tuple) and value:
        if any(item != value[0] for item in value):
            raise UnsupportedError(f"{header.where} gives layers different values of {name}, which is not built")
        return Settings({name: value[0]}, header.where).integer(name)
    return header.integer(name) if default is None else header.integer(name, default=default)


def _read_rope(header: Settings, source: WeightSource, head_dim: int, is_interleaved: bool) -> RopeSpec:
    width = header.integer("rope.dimension_count", default=head_dim)
    if width % 2 or width > head_dim:
        raise LoadError(f"{header.where} rotates {width} of {head_dim} numbers a head")
    theta = header.number("rope.freq_base", default=10_000.0)
    frequencies = plain_frequencies(width, theta)
    if "rope_freqs.weight" in source:  # Llama 3.1's scaling, computed when the file was converted
        factors = source.read("rope_freqs.weight", dtype=torch.float32)
        if factors.shape != frequencies.shape:
            raise LoadError(f"rope_freqs.weight has shape {list(factors.shape)}, not {list(frequencies.shape)}")
        frequencies = frequencies / factors
    kind = header.text("rope.scaling.type", default="linear" if header.has("rope.scale_linear") else "none")
    if kind == "none":
        return make_rope(frequencies, is_interleaved=is_interleaved)
    factor = header.number("rope.scaling.factor", "rope.scale_linear", default=1.0)
    if kind == "linear":
        return make_rope(frequencies, is_interleaved=is_interleaved, factor=factor)
    if kind == "yarn":
        return yarn_rope(
            frequencies,
            theta=theta,
            factor=factor,
            trained=header.integer("rope.scaling.original_context_length"),
            beta_fast=header.number("rope.scaling.yarn_beta_fast", default=32.0),
            beta_slow=header.number("rope.scaling.yarn_beta_slow", default=1.0),
            gain=yarn_magnitude(factor) * header.number("rope.scaling.attn_factor", default=1.0),
            is_interleaved=is_interleaved,
        )
    raise UnsupportedError(f"{header.where} asks for rope scaling {kind!r}; none, linear and yarn are built")
