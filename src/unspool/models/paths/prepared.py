"""One decoding step on a CPU in float32, of one or a few tokens per row: the decoder's block with prepared buffers.

For so few numbers, calling operators costs more than computing. So buffers and the views into them are made
once for a number of rows and used by all layers, and residuals are added by the products themselves. For a
single row the norm is one dot product, whose result scales the product that follows. For several rows the
weights are repacked once, because a product that repacks them every time takes half as long again.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F

from unspool.cache import Cache
from unspool.kernels.activations import find_activation
from unspool.kernels.forked import attend_forked
from unspool.models.decoder.head import read_out
from unspool.models.decoder.layers import DecoderWeights, Layer
from unspool.models.decoder.reading import read_keys, read_others
from unspool.models.decoder.spec import DecoderSpec
from unspool.models.decoder.views import AttentionView, AttentionViews
from unspool.models.paths.path import ALL_LAYERS, EMBEDDINGS, Pass
from unspool.models.weights import AnyLinear, Linear
from unspool.protocols import LAST, Forward, Want

PACKING_LIMIT: Final = 1 << 30  # bytes of weights up to which a second copy, laid out for batches, is kept
_PACKED_ROWS: Final = 8  # the batch that packed weights are laid out for; others read them as well
_MOST_KEPT: Final = 16  # steps for different numbers of rows that are kept for reuse
MOST_POSITIONS: Final = 64  # rows times tokens of a step; more is a prompt


@dataclass(slots=True)
class Product:
    """A matrix in the forms that steps multiply by."""

    turned: torch.Tensor  # (in, out), a view of the weights
    bias: torch.Tensor | None
    packed: Any = None  # laid out for batches

    @classmethod
    def of(cls, linear: AnyLinear, is_packed: bool) -> Product:
        """The product of a linear map."""
        assert isinstance(linear, Linear)  # can_prepare() checked it
        packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight, _PACKED_ROWS) if is_packed else None
        return cls(linear.weight.t(), linear.bias, packed)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed is not None:
            product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
            return product
        return torch.mm(x, self.turned) if self.bias is None else torch.addmm(self.bias, x, self.turned)


@dataclass(slots=True)
class PreparedLayer:
    """One block's weights in the forms that steps multiply by."""

    kind: str
    scale: float
    attn_norm: torch.Tensor
    qkv: Product
    out: Product
    ffn_norm: torch.Tensor
    up: Product
    down: Product
    qk_norm: torch.Tensor | None  # (heads and key heads, width)
    post_attn_norm: torch.Tensor | None
    post_ffn_norm: torch.Tensor | None


class PreparedPath:
    """The prepared steps of a decoder: one for each number of rows, lent to one caller at a time."""

    name = "prepared"

    def __init__(self, spec: DecoderSpec, weights: DecoderWeights, views: AttentionViews, *, packs: bool) -> None:
        self._spec = spec
        self._weights = weights
        self._views = views
        self._packs = packs and _can_pack()
        self._prepared: dict[bool, tuple[list[PreparedLayer], Product]] = {}
        self._waiting: dict[tuple[int, int], PreparedStep] = {}

    def explain_refusal(self, new: Pass) -> str | None:
        """Why a pass can't be a prepared step; None if it can."""
        want, tokens, cache = new.want, new.tokens, new.cache
        if tokens is None:
            return EMBEDDINGS
        if want.hidden_states or want.attentions:
            return ALL_LAYERS
        if not cache.holds_buffers(self._spec.num_layers):
            return "the cache has no buffers yet"
        if tokens.shape[1] == 1:
            return None if want.logits == "last" else "logits of all positions are wanted"
        if want.logits != "all" or want.early or tokens.numel() > MOST_POSITIONS or not cache.is_in_order:
            return f"{tokens.shape[1]} tokens a row are read; prepared are one, and a few drafts"
        return None

    def run(self, new: Pass) -> Forward:
        """Read a few tokens per row, and advance the cache."""
        tokens, cache, want, early = new.tokens, new.cache, new.want, list[torch.Tensor]()
        assert tokens is not None and self._weights.final_norm is not None
        rows, num_new = tokens.shape
        step = self.borrow(rows, num_new)
        with torch.inference_mode():
            views = self._views.make(cache, new.span)
            x = step.run(tokens, self._weights.embedding.weight, cache, views, want, early)
            states = self._weights.final_norm(x)
        cache.end()
        self.give_back(step)
        forward = read_out(self._spec, self._weights, states, early, step.project)
        forward.path = self.name
        if want.logits == "all":
            forward.logits = forward.logits.view(rows, num_new, -1)
        if want.last_states:
            forward.last_states = states.view(rows, num_new, -1)
        return forward

    def borrow(self, rows: int, num_new: int = 1) -> PreparedStep:
        """A step for `rows` rows of `num_new` tokens; concurrent threads get different ones."""
        step = self._waiting.pop((rows, num_new), None)
        if step is not None:
            return step
        is_packed = self._packs and rows * num_new > 1
        if is_packed not in self._prepared:
            self._prepared[is_packed] = self._prepare(is_packed)
        layers, head = self._prepared[is_packed]
        if num_new > 1:
            return WideStep(self._spec, layers, head, rows, num_new)
        return (SingleStep if rows == 1 else BatchStep)(self._spec, layers, head, rows)

    def give_back(self, step: PreparedStep) -> None:
        """Keep a step for the next caller."""
        if len(self._waiting) >= _MOST_KEPT:
            self._waiting.clear()
        self._waiting[step.rows, step.num_new] = step

    def _prepare(self, is_packed: bool) -> tuple[list[PreparedLayer], Product]:
        layers = [
            _prepare_layer(self._spec, index, layer, is_packed) for index, layer in enumerate(self._weights.layers)
        ]
        return layers, Product.of(self._weights.head, is_packed)


def can_prepare(spec: DecoderSpec, weights: DecoderWeights, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a step can be prepared: for blocks of Llama's shape, with or without Gemma's outer norms."""
    return (
        device.type == "cpu"
        and dtype == torch.float32
        and isinstance(weights.layers[0].qkv, Linear)
        and isinstance(weights.head, Linear)
        and spec.norm.kind == "rms"
        and spec.norm_placement in ("pre", "sandwich")
        and spec.residual == "sequential"
        and spec.is_gated
        and spec.alibi is None
        and spec.attention_softcap is None
        and spec.num_positions is None
        and not spec.has_embedding_norm
        and spec.embedding_size in (None, spec.hidden_size)
        and spec.has_final_norm
    )


def _can_pack() -> bool:
    return hasattr(torch.ops.mkldnn, "_linear_pointwise")  # torch may be built without oneDNN


def _prepare_layer(spec: DecoderSpec, index: int, layer: Layer, is_packed: bool) -> PreparedLayer:
    assert layer.attn_norm is not None and layer.ffn_norm is not None
    assert layer.attn_norm.weight is not None and layer.ffn_norm.weight is not None
    qk_norm = None
    if layer.q_norm is not None and layer.k_norm is not None:
        assert layer.q_norm.weight is not None and layer.k_norm.weight is not None
        each = [layer.q_norm.weight] * spec.num_heads + [layer.k_norm.weight] * spec.num_kv_heads
        qk_norm = torch.stack(each)
    outer = [norm.weight if norm is not None else None for norm in (layer.post_attn_norm, layer.post_ffn_norm)]
    return PreparedLayer(
        kind=spec.kind_of(index),
        scale=spec.scale_of(index),
        attn_norm=layer.attn_norm.weight,
        qkv=Product.of(layer.qkv, is_packed),
        out=Product.of(layer.out, is_packed),
        ffn_norm=layer.ffn_norm.weight,
        up=Product.of(layer.up, is_packed),
        down=Product.of(layer.down, is_packed),
        qk_norm=qk_norm,
        post_attn_norm=outer[0],
        post_ffn_norm=outer[1],
    )


class PreparedStep(ABC):
    """A step for a fixed number of rows, with its buffers; run it in inference mode."""

    def __init__(
        self, spec: DecoderSpec, layers: list[PreparedLayer], head: Product, rows: int, num_new: int = 1
    ) -> None:
        self.rows = rows
        self.num_new = num_new
        self.project = head
        self._layers = layers
        self._eps = spec.norm.eps
        self._scale = spec.embedding_scale
        self._activate = find_activation(spec.activation)
        heads, kv_heads, width = spec.num_heads, spec.num_kv_heads, spec.head_dim
        with torch.inference_mode():
            num_states = rows * num_new
            self._x = torch.empty(num_states, spec.hidden_size)
            self._normed = torch.empty(num_states, spec.hidden_size)
            self._qkv = torch.empty(num_states, (heads + 2 * kv_heads) * width)
            self._up = torch.empty(num_states, 2 * spec.ffn_size)
            self._fed = torch.empty(num_states, spec.ffn_size)
            self._halves = self._up.chunk(2, dim=1)
            split = self._qkv.view(rows, num_new, heads + 2 * kv_heads, width)
            self._queries = self._arrange(split[:, :, :heads], kv_heads)
            self._kv = split[:, :, heads:].view(rows, num_new, 2, kv_heads, width)
            self._qk = split[:, :, : heads + kv_heads]
            self._pairs: torch.Tensor | None = None  # complex (rows, new, heads and key heads, pairs)
            if spec.rope is not None:
                turned = self._qk[..., : spec.rope.width]
                self._pairs = torch.view_as_complex(turned.view(*turned.shape[:-1], -1, 2))

    def _arrange(self, queries: torch.Tensor, kv_heads: int) -> torch.Tensor:
        """The queries (rows, 1, heads, width) as attention reads them: heads that share a key become its queries."""
        return queries[:, 0].view(self.rows, kv_heads, -1, queries.shape[-1])

    def run(
        self,
        tokens: torch.Tensor,
        embedding: torch.Tensor,
        cache: Cache,
        views: Mapping[Any, AttentionView],
        want: Want = LAST,
        early: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Take the tokens (rows, new) through the layers: (rows * new, hidden), valid until the next run.

        `want.exit_layer` ends it early; copies of the inputs of the layers in `want.early` are appended to `early`.
        """
        x = torch.index_select(embedding, 0, tokens.reshape(-1), out=self._x)
        if self._scale != 1.0:
            x.mul_(self._scale)
        for index, layer in enumerate(self._layers[: want.exit_layer]):
            if early is not None and index in want.early:
                early.append(x.clone())
            qkv = self._read(layer.attn_norm, layer.qkv, self._qkv)
            if qkv is not self._qkv:
                self._qkv.copy_(qkv)
            self._add(self._attend(index, layer, cache, views[layer.kind]), layer.out, layer.post_attn_norm)
            up = self._read(layer.ffn_norm, layer.up, self._up)
            gate, value = self._halves if up is self._up else up.chunk(2, dim=1)
            torch.mul(self._activate(gate), value, out=self._fed)
            self._add(self._fed, layer.down, layer.post_ffn_norm)
        return x

    def _attend(self, index: int, layer: PreparedLayer, cache: Cache, view: AttentionView) -> torch.Tensor:
        self._place(layer, view)
        keys, values = cache.write(index, self._kv)
        if view.num_forks > 1:
            read, _ = attend_forked(
                self._queries, keys, values, num_forks=view.num_forks, scale=layer.scale, mask=view.mask
            )
            return read.reshape(self.rows, -1)
        if type(keys) is not torch.Tensor:
            queries = self._queries.reshape(self.rows, -1, 1, self._queries.shape[-1])
            return read_others(queries, keys, values, view, scale=layer.scale)[0].reshape(self.rows, -1)
        if view.first_key:
            keys, values = keys[:, :, view.first_key :], values[:, :, view.first_key :]
        read = F.scaled_dot_product_attention(self._queries, keys, values, view.mask, scale=layer.scale)
        return read.reshape(self.rows, -1)

    def _place(self, layer: PreparedLayer, view: AttentionView) -> None:
        """Normalise the queries and keys if the block does, and rotate them to their positions."""
        if layer.qk_norm is not None:
            self._qk.copy_(F.rms_norm(self._qk, self._qk.shape[-1:], None, self._eps) * layer.qk_norm)
        if self._pairs is not None and view.factors is not None:
            self._pairs.mul_(view.factors)

    @abstractmethod
    def _read(self, norm: torch.Tensor, product: Product, out: torch.Tensor) -> torch.Tensor:
        """The product of the normalised state: in `out`, if the product can write there."""

    def _add(self, y: torch.Tensor, product: Product, norm: torch.Tensor | None) -> None:
        """Add a product, normalised if the block has a norm there, to the state."""
        made = product(y)
        self._x.add_(made if norm is None else F.rms_norm(made, norm.shape, norm, self._eps))


class SingleStep(PreparedStep):
    """A step for one row."""

    def __init__(self, spec: DecoderSpec, layers: list[PreparedLayer], head: Product, rows: int) -> None:
        super().__init__(spec, layers, head, rows)
        with torch.inference_mode():
            self._flat = self._x.view(-1)

    def _read(self, norm: torch.Tensor, product: Product, out: torch.Tensor) -> torch.Tensor:
        square = float(torch.dot(self._flat, self._flat))
        scale = 1.0 / math.sqrt(square / self._flat.shape[0] + self._eps)
        torch.mul(self._x, norm, out=self._normed)
        if product.bias is None:
            return torch.addmm(out, self._normed, product.turned, beta=0, alpha=scale, out=out)
        return torch.addmm(product.bias, self._normed, product.turned, alpha=scale, out=out)

    def _add(self, y: torch.Tensor, product: Product, norm: torch.Tensor | None) -> None:
        if norm is not None or product.bias is not None:
            super()._add(y, product, norm)
        else:
            torch.addmm(self._x, y, product.turned, out=self._x)


class BatchStep(PreparedStep):
    """A step for several rows."""

    def __init__(
        self, spec: DecoderSpec, layers: list[PreparedLayer], head: Product, rows: int, num_new: int = 1
    ) -> None:
        super().__init__(spec, layers, head, rows, num_new)
        with torch.inference_mode():
            self._mean = torch.full((spec.hidden_size, 1), 1.0 / spec.hidden_size)
            self._smallest = torch.full((rows * num_new, 1), spec.norm.eps)
            self._root = torch.empty(rows * num_new, 1)

    def _read(self, norm: torch.Tensor, product: Product, out: torch.Tensor) -> torch.Tensor:
        # The mean of the squares as a product: cheaper than a reduction for a handful of rows.
        torch.mul(self._x, self._x, out=self._normed)
        torch.addmm(self._smallest, self._normed, self._mean, out=self._root).rsqrt_()
        torch.mul(self._x, self._root, out=self._normed).mul_(norm)
        if product.packed is None and product.bias is None:
            return torch.mm(self._normed, product.turned, out=out)
        return product(self._normed)


class WideStep(BatchStep):
    """A step of several tokens per row, to verify drafts: the products are those of as many rows."""

    def _arrange(self, queries: torch.Tensor, kv_heads: int) -> torch.Tensor:  # noqa: ARG002 - read_keys() sees them
        return queries.transpose(1, 2)  # (rows, heads, new, width)

    def _attend(self, index: int, layer: PreparedLayer, cache: Cache, view: AttentionView) -> torch.Tensor:
        self._place(layer, view)
        keys, values = cache.write(index, self._kv)
        read, _ = read_keys(self._queries, keys, values, view, scale=layer.scale)
        return read.transpose(1, 2).reshape(self.rows * self.num_new, -1)
