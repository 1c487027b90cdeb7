"""The weights of a plain encoder, and their assembly from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from unspool.models.assembly import Assembler
from unspool.models.decoder.layers import Layer
from unspool.models.encoder.spec import EncoderSpec
from unspool.models.encoder_decoder.layers import Stack
from unspool.models.weights import Embedding, Linear, WeightSource


@dataclass(slots=True)
class ClassifierWeights:
    """All of a token classifier's weights."""

    stack: Stack
    head: Linear


def assemble_classifier(
    spec: EncoderSpec, source: WeightSource, device: torch.device, dtype: torch.dtype
) -> ClassifierWeights:
    """Copy a checkpoint's tensors into a classifier's buffers; raises if one is missing or has another shape."""
    assembler = Assembler(source, device, dtype)
    hidden, embeddings = spec.hidden_size, f"{spec.prefix}.embeddings"
    words = assembler.matrix(f"{embeddings}.word_embeddings.weight", spec.encoder.vocab_size, hidden)
    positions = assembler.take(f"{embeddings}.position_embeddings.weight", spec.num_positions, hidden)
    types = assembler.take(f"{embeddings}.token_type_embeddings.weight", spec.num_types, hidden)
    stack = Stack(
        embedding=Embedding(words),
        convolutions=[],
        positions=positions + types[0],  # every text is of the first type
        embedding_norm=assembler.norm(f"{embeddings}.LayerNorm", hidden, spec.norm),
        layers=[_assemble_layer(assembler, spec, index) for index in range(spec.encoder.num_layers)],
        crosses=[],
        biases=[],
        final_norm=None,
    )
    head = assembler.linear(["classifier"], [spec.num_labels], hidden, has_bias=True)
    assembler.check_all_used(
        [name for name in source.names() if name.endswith("position_ids") or f"{spec.prefix}.pooler." in name]
    )
    return ClassifierWeights(stack, head)


def _assemble_layer(assembler: Assembler, spec: EncoderSpec, index: int) -> Layer:
    start = f"{spec.prefix}.encoder.layer.{index}"
    hidden, inner = spec.hidden_size, spec.encoder.ffn_size
    attention = [f"{start}.attention.self.{name}" for name in ("query", "key", "value")]
    return Layer(
        attn_norm=assembler.norm(f"{start}.attention.output.LayerNorm", hidden, spec.norm),
        qkv=assembler.linear(attention, [hidden] * 3, hidden, has_bias=True),
        out=assembler.linear([f"{start}.attention.output.dense"], [hidden], hidden, has_bias=True),
        ffn_norm=assembler.norm(f"{start}.output.LayerNorm", hidden, spec.norm),
        up=assembler.linear([f"{start}.intermediate.dense"], [inner], hidden, has_bias=True),
        down=assembler.linear([f"{start}.output.dense"], [hidden], inner, has_bias=True),
        q_norm=None,
        k_norm=None,
        post_attn_norm=None,
        post_ffn_norm=None,
    )
