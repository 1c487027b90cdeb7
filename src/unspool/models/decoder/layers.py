"""The weights of a decoder, and their assembly from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from unspool.models.assembly import Assembler, Packing, Progress
from unspool.models.decoder.mixture import Mixture, MixtureNames, assemble_experts, assemble_mixture
from unspool.models.decoder.spec import DecoderSpec, NormSpec
from unspool.models.head_order import QkvLayout, pair_neighbours_, split_groups_
from unspool.models.placement import Placement
from unspool.models.sharing import SharedSource
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


@dataclass(frozen=True, slots=True)
class WeightNames:
    """A checkpoint's names of a decoder's weights, without .weight and .bias; `{i}` is the layer."""

    embedding: str
    layer: str  # prefix of a layer's names
    attn_norm: str
    qkv: tuple[str, ...]  # three names, or that of a fused matrix
    out: str
    up: tuple[str, ...]  # gate and up if the feed-forward is gated, or the name of both in one matrix
    down: str
    ffn_norm: str = ""
    post_attn_norm: str = ""
    post_ffn_norm: str = ""
    q_norm: str = ""  # `{h}` is the head, if each has a tensor of its own
    k_norm: str = ""
    sinks: str = ""  # the whole name
    final_norm: str = ""
    head: str = "lm_head"
    positions: str = ""
    embedding_norm: str = ""
    project_in: str = ""
    project_out: str = ""
    prefix: str = ""  # a prefix that older checkpoints leave out
    mixture: MixtureNames | None = None
    qkv_layout: QkvLayout = "stacked"
    is_transposed: bool = False  # matrices are stored (in, out)


@dataclass(slots=True)
class Layer:
    """One block's weights: q, k and v fused into one matrix, gate and up into another.

    In a mixture of experts `up` and `down` have the matrices of all experts, one below the other.
    """

    attn_norm: Norm | None
    qkv: AnyLinear
    out: AnyLinear
    ffn_norm: Norm | None
    up: AnyLinear
    down: AnyLinear
    q_norm: Norm | None
    k_norm: Norm | None
    post_attn_norm: Norm | None
    post_ffn_norm: Norm | None
    mixture: Mixture | None = None
    sinks: torch.Tensor | None = None  # (heads,)
    is_halved: bool = False  # queries and keys have rotary pairs as the two halves of a head, until they are rotated


@dataclass(slots=True)
class DecoderWeights:
    """All of a decoder's weights."""

    embedding: AnyEmbedding
    positions: torch.Tensor | None  # (positions, hidden)
    embedding_norm: Norm | None
    project_in: Linear | None
    layers: list[Layer]
    final_norm: Norm | None
    project_out: Linear | None
    head: AnyLinear


def assemble_decoder(
    spec: DecoderSpec,
    names: WeightNames,
    source: WeightSource,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None = None,
    packing: Packing | None = None,
    placement: Placement | None = None,
) -> DecoderWeights:
    """Copy a checkpoint's tensors into a decoder's buffers; raises if one is missing or has another shape.

    With a `placement` its parts lie on several devices."""
    assembler = Assembler(source, device, dtype, prefix=names.prefix, progress=progress, packing=packing)
    place = placement or Placement(device, (device,) * spec.num_layers, device)
    width = spec.embedding_size or spec.hidden_size
    embedding = _assemble_embedding(assembler, spec, names, width)
    positions = None
    if spec.num_positions is not None:
        positions = assembler.matrix(f"{names.positions}.weight", spec.num_positions, spec.hidden_size)
    embedding_norm = assembler.norm(names.embedding_norm, width, spec.norm) if spec.has_embedding_norm else None
    project_in = _projection(assembler, names.project_in, spec.hidden_size, width, spec)
    layers: list[Layer] = []
    for index, where in enumerate(place.layers):
        assembler.device = where
        layers.append(_assemble_layer(assembler, spec, names, index))
    assembler.device = place.head
    weights = DecoderWeights(
        embedding=embedding,
        positions=positions,
        embedding_norm=embedding_norm,
        project_in=project_in,
        layers=layers,
        final_norm=_assemble_final_norm(assembler, spec, names),
        project_out=_projection(assembler, names.project_out, width, spec.hidden_size, spec),
        head=_assemble_head(assembler, spec, names, embedding, width),
    )
    assembler.check_all_used(spare=[f"{names.head}.weight"] if spec.is_head_tied else [])
    return weights


def _assemble_embedding(assembler: Assembler, spec: DecoderSpec, names: WeightNames, width: int) -> AnyEmbedding:
    name = f"{names.embedding}.weight"
    if assembler.packs(width):
        # Never 4 bits unless the file has them: the embedding is often the head as well, which loses quality by it.
        blocks = assembler.pack([name], [spec.vocab_size], width, fewest_bits=8)
        return assembler.lay_out_table(blocks, spec.embedding_scale)
    return Embedding(assembler.matrix(name, spec.vocab_size, width), spec.embedding_scale)


def _assemble_final_norm(assembler: Assembler, spec: DecoderSpec, names: WeightNames) -> Norm | None:
    if not spec.has_final_norm:
        return None
    norm = assembler.norm(names.final_norm, spec.hidden_size, spec.norm)
    if spec.logit_scale != 1.0:
        weight = norm.weight if norm.weight is not None else assembler.empty(spec.hidden_size).fill_(1.0)
        norm.weight = weight * spec.logit_scale
        norm.bias = norm.bias * spec.logit_scale if norm.bias is not None else None
    return norm


def _projection(assembler: Assembler, name: str, outputs: int, inputs: int, spec: DecoderSpec) -> Linear | None:
    if spec.embedding_size in (None, spec.hidden_size):
        return None
    return assembler.linear([name], [outputs], inputs, has_bias=False)


def _assemble_head(
    assembler: Assembler, spec: DecoderSpec, names: WeightNames, embedding: AnyEmbedding, width: int
) -> AnyLinear:
    if spec.is_head_tied:
        bias = None
        if spec.has_head_bias:
            bias = assembler.take(f"{names.head}.bias", spec.vocab_size)
        if isinstance(embedding, PackedEmbedding):
            return PackedLinear(embedding.tiles, embedding.kind, embedding.shape, bias)
        if isinstance(embedding, WordEmbedding):
            return WordLinear(embedding.words, embedding.factors, embedding.kind, embedding.dtype, bias)
        return Linear(embedding.weight, bias)
    if assembler.packs(width) and not spec.is_head_normalised:
        blocks = assembler.pack([f"{names.head}.weight"], [spec.vocab_size], width, fewest_bits=8)
        return assembler.lay_out(
            blocks, bias=assembler.biases([names.head], [spec.vocab_size]) if spec.has_head_bias else None
        )
    head = Linear(assembler.matrix(f"{names.head}.weight", spec.vocab_size, width, is_changed=spec.is_head_normalised))
    if spec.has_head_bias:
        head.bias = assembler.biases([names.head], [spec.vocab_size])
    if spec.is_head_normalised:
        F.normalize(head.weight, out=head.weight)
    return head


def _assemble_layer(assembler: Assembler, spec: DecoderSpec, names: WeightNames, index: int) -> Layer:
    start = names.layer.format(i=index)

    def norm(name: str, is_there: bool, size: int = spec.hidden_size, kind: NormSpec = spec.norm) -> Norm | None:
        return assembler.norm(start + name, size, kind) if is_there else None

    def linear(name: str, outputs: int, inputs: int, has_bias: bool) -> AnyLinear:
        return assembler.product(
            [start + name], [outputs], inputs, has_bias=has_bias, is_transposed=names.is_transposed
        )

    has_outer = spec.norm_placement in ("sandwich", "after")
    has_inner = spec.norm_placement != "after"
    mixed = names.mixture if spec.mixture_of(index) is not None else None
    attn_norm = norm(names.attn_norm, has_inner)
    up, down = _assemble_feed(assembler, spec, names, index)
    is_halved = _keeps_halves(assembler, spec, names, index)
    layer = Layer(
        attn_norm=attn_norm,
        qkv=_assemble_qkv(assembler, spec, names, start, is_halved),
        out=linear(names.out, spec.hidden_size, spec.num_heads * spec.head_dim, spec.has_out_bias),
        ffn_norm=norm(names.ffn_norm, spec.has_ffn_norm and has_inner),
        up=up,
        down=down,
        q_norm=_assemble_head_norm(assembler, spec, start + names.q_norm, spec.num_heads),
        k_norm=_assemble_head_norm(assembler, spec, start + names.k_norm, spec.num_kv_heads),
        post_attn_norm=norm(names.post_attn_norm, has_outer),
        post_ffn_norm=norm(names.post_ffn_norm, has_outer),
        mixture=assemble_mixture(assembler, spec, mixed, start) if mixed is not None else None,
        sinks=assembler.take(start + names.sinks, spec.num_heads) if spec.has_sinks else None,
        is_halved=is_halved,
    )
    if not is_halved:
        _pair_normed(layer, spec)
    return layer


def _keeps_halves(assembler: Assembler, spec: DecoderSpec, names: WeightNames, index: int) -> bool:
    """Whether queries and keys stay in the order of a stored checkpoint: if they are shared with their owner.

    A layer that rotates nothing has them in our order, so that a cache has keys in one order, whoever wrote them.
    """
    is_turned = spec.rope is not None and not spec.rope.is_interleaved and index not in spec.unturned
    is_shared = isinstance(assembler.source, SharedSource) and not assembler.orders(spec.hidden_size)
    return is_turned and is_shared and names.qkv_layout == "stacked"


def _assemble_feed(
    assembler: Assembler, spec: DecoderSpec, names: WeightNames, index: int
) -> tuple[AnyLinear, AnyLinear]:
    """The two products of a layer's feed-forward, or those of all of its experts."""
    start = names.layer.format(i=index)
    if spec.mixture_of(index) is not None:
        assert names.mixture is not None
        return assemble_experts(assembler, spec, names.mixture, start)
    up = assembler.product(
        [start + name for name in names.up],
        [spec.ffn_size * (1 + spec.is_gated) // len(names.up)] * len(names.up),
        spec.hidden_size,
        has_bias=spec.has_ffn_bias,
        is_transposed=names.is_transposed,
    )
    down = assembler.product(
        [start + names.down],
        [spec.hidden_size],
        spec.ffn_size,
        has_bias=spec.has_ffn_bias,
        is_transposed=names.is_transposed,
    )
    return up, down


def _assemble_head_norm(assembler: Assembler, spec: DecoderSpec, name: str, num_heads: int) -> Norm | None:
    """The norm of queries or keys; weights of several heads stand one after the other."""
    if spec.qk_norm is None or spec.qk_norm_span == "head":
        return assembler.norm(name, spec.head_dim, spec.qk_norm) if spec.qk_norm is not None else None
    if spec.qk_norm_span == "whole":
        return assembler.norm(name, num_heads * spec.head_dim, spec.qk_norm)
    if "{h}" in name:
        parts = [assembler.norm(name.format(h=head), spec.head_dim, spec.qk_norm) for head in range(num_heads)]
        weights = [part.weight for part in parts if part.weight is not None]
        return replace(parts[0], weight=torch.cat(weights))
    weight = assembler.take(f"{name}.weight", num_heads, spec.head_dim).flatten()
    return Norm(weight, None, spec.qk_norm.eps, spec.qk_norm.kind == "layer")


def norm_heads(
    spec: DecoderSpec, layer: Layer, queries: torch.Tensor, keys: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys (…, heads, width), normalised if the block does so."""
    if layer.q_norm is None or layer.k_norm is None:
        return queries, keys
    return _norm_heads(spec, layer.q_norm, queries), _norm_heads(spec, layer.k_norm, keys)


def _norm_heads(spec: DecoderSpec, norm: Norm, heads: torch.Tensor) -> torch.Tensor:
    if spec.qk_norm_span == "head":
        return norm(heads)
    if spec.qk_norm_span == "whole":
        return norm(heads.flatten(-2)).view(heads.shape)
    assert norm.weight is not None
    weight = norm.weight.view(-1, spec.head_dim)
    if norm.is_layer:
        return F.layer_norm(heads, heads.shape[-1:], eps=norm.eps) * weight
    return F.rms_norm(heads, heads.shape[-1:], eps=norm.eps) * weight


def _assemble_qkv(
    assembler: Assembler, spec: DecoderSpec, names: WeightNames, start: str, is_halved: bool
) -> AnyLinear:
    query, key = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    sizes = [query, key, key] if len(names.qkv) == 3 else [query + 2 * key]
    order = None
    if assembler.orders(spec.hidden_size):
        for name, size in zip(names.qkv, sizes, strict=True):
            shape = (size, spec.hidden_size)
            assembler.find(f"{start}{name}.weight", shape[::-1] if names.is_transposed else shape)
        order = torch.arange(query + 2 * key)
        _order_qkv(order, spec, names)
    qkv = assembler.product(
        [start + name for name in names.qkv],
        sizes,
        spec.hidden_size,
        has_bias=spec.has_qkv_bias,
        is_transposed=names.is_transposed,
        order=order,
        is_changed=not is_halved
        and (names.qkv_layout != "stacked" or (spec.rope is not None and not spec.rope.is_interleaved)),
    )
    if isinstance(qkv, Linear) and not is_halved:
        for part in (qkv.weight, qkv.bias):
            if part is not None:
                _order_qkv(part, spec, names)
    return qkv


def _order_qkv(rows: torch.Tensor, spec: DecoderSpec, names: WeightNames) -> None:
    """Reorder the rows of a fused matrix, or its bias, into our order: q, k, v, with rope pairs as neighbours."""
    split_groups_(rows, spec.num_heads, spec.num_kv_heads, names.qkv_layout)
    if spec.rope is not None and not spec.rope.is_interleaved:
        turned = (spec.num_heads + spec.num_kv_heads) * spec.head_dim
        pair_neighbours_(rows[:turned], spec.head_dim, spec.rope.width)


def _pair_normed(layer: Layer, spec: DecoderSpec) -> None:
    """Reorder query and key norm weights so that rope pairs are neighbours, if the checkpoint has them in halves."""
    if spec.rope is None or spec.rope.is_interleaved:
        return
    parts: list[torch.Tensor] = []
    for norm in (layer.q_norm, layer.k_norm):
        parts += [part for part in (norm.weight, norm.bias) if part is not None] if norm is not None else []
    for part in parts:
        pair_neighbours_(part, spec.head_dim, spec.rope.width)
