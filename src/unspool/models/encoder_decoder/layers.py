"""The weights of an encoder-decoder, and their assembly from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from unspool.models.assembly import Assembler, Packing, Progress
from unspool.models.decoder.layers import DecoderWeights, Layer
from unspool.models.encoder_decoder.spec import EncoderDecoderSpec, StackSpec
from unspool.models.weights import (
    AnyEmbedding,
    AnyLinear,
    Embedding,
    Linear,
    Norm,
    PackedEmbedding,
    PackedLinear,
    WeightSource,
    WordEmbedding,
    WordLinear,
)
from unspool.protocols import FeatureShape


@dataclass(frozen=True, slots=True)
class AttentionNames:
    """A checkpoint's names of one attention's weights, after the layer's prefix."""

    norm: str
    q: str
    k: str
    v: str
    out: str


@dataclass(frozen=True, slots=True)
class StackNames:
    """A checkpoint's names of one side's weights, without .weight and .bias; `{i}` is the layer."""

    layer: str  # prefix of a layer's names
    own: AttentionNames
    up: tuple[str, ...]  # gate and up if the feed-forward is gated
    down: str
    ffn_norm: str
    cross: AttentionNames | None = None  # the decoder's
    embedding: str = ""
    positions: str = ""
    embedding_norm: str = ""
    final_norm: str = ""
    biases: str = ""  # relative ones, with the layer
    convolutions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PairNames:
    """A checkpoint's names of an encoder-decoder's weights."""

    encoder: StackNames
    decoder: StackNames
    shared: str = ""  # the table of both sides
    head: str = "lm_head"
    head_bias: str = ""  # a tensor of shape (1, vocab); some checkpoints lack it
    prefix: str = ""  # a prefix that older checkpoints leave out
    spare: tuple[str, ...] = ()  # tensors that may be there and are not read


@dataclass(slots=True)
class CrossWeights:
    """One decoder block's weights for reading the source: keys and values fused into one matrix."""

    norm: Norm
    q: AnyLinear
    kv: AnyLinear
    out: AnyLinear


@dataclass(slots=True)
class Convolution:
    """A convolution over time."""

    weight: torch.Tensor  # (out, in, 3)
    bias: torch.Tensor


@dataclass(slots=True)
class Stack:
    """One side's weights; the encoder's have no cross-attention."""

    embedding: AnyEmbedding | None
    convolutions: list[Convolution]
    positions: torch.Tensor | None  # (positions, hidden)
    embedding_norm: Norm | None
    layers: list[Layer]
    crosses: list[CrossWeights]
    biases: list[torch.Tensor]  # (buckets, heads)
    final_norm: Norm | None


@dataclass(slots=True)
class EncoderDecoderWeights:
    """All of an encoder-decoder's weights."""

    encoder: Stack
    decoder: Stack
    head: AnyLinear


def take_decoder(weights: EncoderDecoderWeights) -> DecoderWeights:
    """The decoder's side as a decoder's weights; its positions and its cross-attention are left out."""
    stack = weights.decoder
    assert stack.embedding is not None
    return DecoderWeights(
        embedding=stack.embedding,
        positions=None,
        embedding_norm=stack.embedding_norm,
        project_in=None,
        layers=stack.layers,
        final_norm=stack.final_norm,
        project_out=None,
        head=weights.head,
    )


def assemble_pair(
    spec: EncoderDecoderSpec,
    names: PairNames,
    source: WeightSource,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None = None,
    packing: Packing | None = None,
) -> EncoderDecoderWeights:
    """Copy a checkpoint's tensors into an encoder-decoder's buffers; raises if one is missing or has another shape."""
    assembler = Assembler(source, device, dtype, prefix=names.prefix, progress=progress, packing=packing)
    pair = _PairAssembly(assembler, spec, names)
    weights = pair.assemble()
    assembler.check_all_used(pair.spare)
    return weights


class _PairAssembly:
    def __init__(self, assembler: Assembler, spec: EncoderDecoderSpec, names: PairNames) -> None:
        self._assembler, self._spec, self._names = assembler, spec, names
        self._tables = [name for name in (names.shared, names.decoder.embedding, names.encoder.embedding) if name]
        self.spare = [*names.spare]
        for name in (*self._tables, names.head):
            # Tied tables are stored once or several times.
            self.spare += [f"{name}.weight", f"{name}.weight".removeprefix(names.prefix)]

    def assemble(self) -> EncoderDecoderWeights:
        spec, names = self._spec, self._names
        decoder_table = self._assemble_table(spec.decoder, names.decoder)
        if spec.features is not None:
            encoder_table = None
        elif spec.is_embedding_shared:
            encoder_table = decoder_table
        else:
            encoder_table = self._assemble_table(spec.encoder, names.encoder)
        return EncoderDecoderWeights(
            encoder=self._assemble_stack(spec.encoder, names.encoder, encoder_table, spec.features),
            decoder=self._assemble_stack(spec.decoder, names.decoder, decoder_table, None),
            head=self._assemble_head(decoder_table),
        )

    def _assemble_table(self, stack: StackSpec, names: StackNames) -> AnyEmbedding:
        assembler, spec = self._assembler, self._spec
        known = [*self._tables, self._names.head] if spec.is_embedding_shared else [names.embedding]
        name = f"{next((name for name in known if assembler.has(f'{name}.weight')), known[0])}.weight"
        if assembler.packs(spec.hidden_size):
            # Never 4 bits: the embedding is often the head as well, which loses quality by it.
            blocks = assembler.pack([name], [stack.vocab_size], spec.hidden_size, fewest_bits=8)
            return assembler.lay_out_table(blocks, spec.embedding_scale)
        return Embedding(assembler.matrix(name, stack.vocab_size, spec.hidden_size), spec.embedding_scale)

    def _assemble_head(self, table: AnyEmbedding) -> AnyLinear:
        assembler, spec, names = self._assembler, self._spec, self._names
        bias = None
        if spec.has_head_bias:
            bias = assembler.take(names.head_bias, 1, spec.decoder.vocab_size).flatten()
        if spec.is_head_tied:
            if isinstance(table, PackedEmbedding):
                return PackedLinear(table.tiles, table.kind, table.shape, bias)
            if isinstance(table, WordEmbedding):
                return WordLinear(table.words, table.factors, table.kind, table.dtype, bias)
            return Linear(table.weight, bias)
        sizes = [f"{names.head}.weight"], [spec.decoder.vocab_size], spec.hidden_size
        if assembler.packs(spec.hidden_size):
            return assembler.lay_out(assembler.pack(*sizes, fewest_bits=8), bias=bias)
        return Linear(assembler.matrix(sizes[0][0], sizes[1][0], sizes[2]), bias)

    def _assemble_stack(
        self, stack: StackSpec, names: StackNames, table: AnyEmbedding | None, features: FeatureShape | None
    ) -> Stack:
        assembler, spec = self._assembler, self._spec
        hidden, relative = spec.hidden_size, spec.relative
        made = Stack(
            embedding=table,
            convolutions=self._assemble_convolutions(names, features),
            positions=self._assemble_positions(stack, names),
            embedding_norm=assembler.norm(names.embedding_norm, hidden, spec.norm) if spec.has_embedding_norm else None,
            layers=[],
            crosses=[],
            biases=[],
            final_norm=assembler.norm(names.final_norm, hidden, spec.norm) if spec.has_final_norm else None,
        )
        keys = self._assemble_keys(stack, names)
        for index in range(stack.num_layers):
            start = names.layer.format(i=index)
            made.layers.append(self._assemble_layer(stack, names, start))
            if names.cross is not None:
                made.crosses.append(self._assemble_cross(stack, names.cross, start, keys[index] if keys else None))
            if relative is not None and (relative.is_per_layer or index == 0):
                name = f"{names.biases.format(i=index)}.weight"
                made.biases.append(assembler.matrix(name, relative.num_buckets, stack.num_heads))
        return made

    def _assemble_positions(self, stack: StackSpec, names: StackNames) -> torch.Tensor | None:
        positions, hidden = stack.positions, self._spec.hidden_size
        if positions is None or positions.num_positions is None:
            return None
        name, rows = f"{names.positions}.weight", positions.num_positions + positions.offset
        is_stored = positions.kind == "learned" or self._assembler.has(name)
        return self._assembler.matrix(name, rows, hidden) if is_stored else None

    def _assemble_convolutions(self, names: StackNames, features: FeatureShape | None) -> list[Convolution]:
        if features is None:
            return []
        hidden = self._spec.hidden_size
        return [
            Convolution(
                self._assembler.take(f"{name}.weight", hidden, inputs, 3),
                self._assembler.take(f"{name}.bias", hidden),
            )
            for name, inputs in zip(names.convolutions, (features.channels, hidden), strict=True)
        ]

    def _assemble_layer(self, stack: StackSpec, names: StackNames, start: str) -> Layer:
        spec, own = self._spec, names.own
        hidden, width = spec.hidden_size, stack.num_heads * stack.head_dim
        key_bias = spec.has_key_bias
        return Layer(
            attn_norm=self._assembler.norm(start + own.norm, hidden, spec.norm),
            qkv=self._project([start + own.q, start + own.k, start + own.v], width, hidden, [True, key_bias, True]),
            out=self._project([start + own.out], hidden, width),
            ffn_norm=self._assembler.norm(start + names.ffn_norm, hidden, spec.norm),
            up=self._project([start + name for name in names.up], stack.ffn_size, hidden),
            down=self._project([start + names.down], hidden, stack.ffn_size),
            q_norm=None,
            k_norm=None,
            post_attn_norm=None,
            post_ffn_norm=None,
        )

    def _assemble_keys(self, stack: StackSpec, names: StackNames) -> list[AnyLinear]:
        """The matrices of the sources' keys and values for a GPU: all layers' in one buffer (`stacked_keys`)."""
        cross, assembler = names.cross, self._assembler
        hidden, width = self._spec.hidden_size, stack.num_heads * stack.head_dim
        if cross is None or assembler.device.type == "cpu" or assembler.packs(hidden):
            return []
        starts = [names.layer.format(i=index) for index in range(stack.num_layers)]
        each = [start + name for start in starts for name in (cross.k, cross.v)]
        whole = self._project(each, width, hidden, [self._spec.has_key_bias, True] * stack.num_layers)
        return [whole.part(index, stack.num_layers) for index in range(stack.num_layers)]

    def _assemble_cross(
        self, stack: StackSpec, names: AttentionNames, start: str, keys: AnyLinear | None
    ) -> CrossWeights:
        spec, hidden, width = self._spec, self._spec.hidden_size, stack.num_heads * stack.head_dim
        if keys is None:
            keys = self._project([start + names.k, start + names.v], width, hidden, [spec.has_key_bias, True])
        return CrossWeights(
            norm=self._assembler.norm(start + names.norm, hidden, spec.norm),
            q=self._project([start + names.q], width, hidden),
            kv=keys,
            out=self._project([start + names.out], hidden, width),
        )

    def _project(
        self, names: Sequence[str], size: int, inputs: int, has_bias: Sequence[bool] | None = None
    ) -> AnyLinear:
        """Stacked matrices of one size; a part without a bias has zeros beside parts that have one."""
        made = self._assembler.product(names, [size] * len(names), inputs, has_bias=False)
        if self._spec.has_bias:
            made.bias = torch.cat(
                [
                    self._assembler.biases([name], [size])
                    if is_there
                    else torch.zeros(size, dtype=self._assembler.dtype, device=self._assembler.device)
                    for name, is_there in zip(names, has_bias or [True] * len(names), strict=True)
                ]
            )
        return made
