"""T5's description, its weights, and their assembly from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from unspool.models.assembly import Assembler, Progress
from unspool.models.decoder.spec import NormSpec
from unspool.models.weights import Embedding, Linear, Norm, WeightSource


@dataclass(frozen=True, slots=True)
class T5Spec:
    """A T5: sizes, the feed-forward's kind, and how the head relates to the embeddings."""

    vocab_size: int
    hidden_size: int
    head_dim: int
    num_heads: int
    ffn_size: int
    num_encoder_layers: int
    num_decoder_layers: int
    num_buckets: int
    max_distance: int
    eps: float
    is_gated: bool
    activation: str
    is_head_tied: bool
    head_scale: float  # of the states that the head reads
    eos_token_id: int | tuple[int, ...] | None
    pad_token_id: int | None
    decoder_start_token_id: int | None


@dataclass(slots=True)
class T5Layer:
    """One block's weights; the encoder's have no cross-attention."""

    attn_norm: Norm
    qkv: Linear
    out: Linear
    cross_norm: Norm | None
    cross_q: Linear | None
    cross_kv: Linear | None
    cross_out: Linear | None
    ffn_norm: Norm
    up: Linear
    down: Linear


@dataclass(slots=True)
class T5Stack:
    """One side's weights."""

    layers: list[T5Layer]
    bias: torch.Tensor  # (buckets, heads)
    final_norm: Norm


@dataclass(slots=True)
class T5Weights:
    """All of a T5's weights."""

    embedding: Embedding
    encoder: T5Stack
    decoder: T5Stack
    head: Linear


def assemble_t5(
    spec: T5Spec,
    source: WeightSource,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None = None,
) -> T5Weights:
    """Copy a checkpoint's tensors into a T5's buffers."""
    assembler = Assembler(source, device, dtype, progress=progress)
    embedding = Embedding(assembler.matrix("shared.weight", spec.vocab_size, spec.hidden_size))
    weights = T5Weights(
        embedding=embedding,
        encoder=_assemble_stack(assembler, spec, "encoder", spec.num_encoder_layers),
        decoder=_assemble_stack(assembler, spec, "decoder", spec.num_decoder_layers),
        head=Linear(embedding.weight)
        if spec.is_head_tied
        else assembler.linear(["lm_head"], [spec.vocab_size], spec.hidden_size, has_bias=False),
    )
    spare = ["lm_head.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]
    # Some files carry a bias that the first implementation made for cross-attention and never read.
    spare.append("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight")
    assembler.check_all_used(spare)
    return weights


def _assemble_stack(assembler: Assembler, spec: T5Spec, side: str, num_layers: int) -> T5Stack:
    layers = [_assemble_layer(assembler, spec, f"{side}.block.{i}.layer.", side) for i in range(num_layers)]
    bias = assembler.matrix(
        f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight", spec.num_buckets, spec.num_heads
    )
    final_norm = assembler.norm(f"{side}.final_layer_norm", spec.hidden_size, NormSpec("rms", spec.eps))
    return T5Stack(layers, bias, final_norm)


def _assemble_layer(assembler: Assembler, spec: T5Spec, start: str, side: str) -> T5Layer:
    hidden, width, norm = spec.hidden_size, spec.num_heads * spec.head_dim, NormSpec("rms", spec.eps)

    def read(names: list[str], outputs: int, inputs: int = hidden) -> Linear:
        return assembler.linear([start + name for name in names], [outputs] * len(names), inputs, has_bias=False)

    own, cross = "0.SelfAttention", "1.EncDecAttention"
    has_cross = side == "decoder"
    feed = "2" if has_cross else "1"
    names = ["wi_0", "wi_1"] if spec.is_gated else ["wi"]
    return T5Layer(
        attn_norm=assembler.norm(start + "0.layer_norm", hidden, norm),
        qkv=read([f"{own}.q", f"{own}.k", f"{own}.v"], width),
        out=read([f"{own}.o"], hidden, width),
        cross_norm=assembler.norm(start + "1.layer_norm", hidden, norm) if has_cross else None,
        cross_q=read([f"{cross}.q"], width) if has_cross else None,
        cross_kv=read([f"{cross}.k", f"{cross}.v"], width) if has_cross else None,
        cross_out=read([f"{cross}.o"], hidden, width) if has_cross else None,
        ffn_norm=assembler.norm(start + f"{feed}.layer_norm", hidden, norm),
        up=read([f"{feed}.DenseReluDense.{name}" for name in names], spec.ffn_size),
        down=read([f"{feed}.DenseReluDense.wo"], hidden, spec.ffn_size),
    )
