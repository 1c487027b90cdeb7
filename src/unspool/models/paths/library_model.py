"""A decoder as the CPU library's structs: sizes, and the addresses of its weights and position tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch

from unspool.errors import SettingError
from unspool.kernels.alibi import alibi_slopes
from unspool.kernels.cpu import find_library, why_missing
from unspool.kernels.cpu.structures import (
    NARROW,
    CLayer,
    CMatrix,
    CModel,
    CNorm,
    CSketch,
    FloatKind,
    describe_matrix,
    point,
)
from unspool.kernels.torch_threads import one_thread
from unspool.models.decoder.layers import DecoderWeights, Layer
from unspool.models.decoder.mixture import Mixture
from unspool.models.decoder.spec import DecoderSpec, MixtureSpec
from unspool.models.decoder.views import AttentionViews
from unspool.models.paths.library_narrow import NarrowCopies, Product
from unspool.models.paths.library_sketch import HeadSketch, can_sketch_in_library
from unspool.models.weights import (
    AnyEmbedding,
    AnyLinear,
    Linear,
    Norm,
    PackedRows,
    find_addresses,
    iterate_tensors,
)
from unspool.protocols import LayerKind

ACTIVATIONS: Final = {
    **dict.fromkeys(("silu", "swish"), 0),
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), 1),
    "gelu": 2,
    "relu": 3,
    "relu2": 4,
}
_CLAMPED: Final = 5  # US_CLAMPED: the gate of a mixture with a limit
WIDEST_HEAD: Final = 256
_NO_NORM: Final = 2  # US_COPY
_HEAD_NORMS: Final = {"head": 1, "each": 2, "whole": 3}


def explain_no_library(
    spec: DecoderSpec, weights: DecoderWeights, device: torch.device, dtype: torch.dtype
) -> str | None:
    """Why the library can't run this decoder's passes; None if it can."""
    reason = explain_unread(spec, device, dtype)
    if reason is not None:
        return reason
    if spec.norm_placement == "post" or not spec.has_final_norm:
        return f"the CPU library has no block with the norms of {spec.family}"
    if spec.alibi is not None and spec.alibi.is_rounded:
        return f"{spec.family} rounds its position biases key by key"
    if spec.mixture is not None and spec.residual != "sequential":
        return f"the CPU library has no experts beside the attention of {spec.family}"
    if weights.project_in is not None or weights.project_out is not None:
        return f"{spec.family} has embeddings of another width than its states"
    return None


def explain_unread(spec: DecoderSpec, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the library can't run any block of these sizes there; None if it can."""
    if device.type != "cpu":
        return f"the model is on a device of type {device.type}"
    if find_library() is None:
        return f"there is no CPU library: {why_missing()}"
    if dtype != torch.float32:
        return f"the CPU library computes in float32, and the weights are {dtype}"
    if spec.head_dim > WIDEST_HEAD:
        return f"the CPU library reads heads of up to {WIDEST_HEAD} numbers, and these have {spec.head_dim}"
    if spec.activation not in ACTIVATIONS:
        return f"the CPU library has no activation {spec.activation}"
    return None


class DescribedModel:
    """The structs of a decoder, described again if its tensors have moved."""

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights,
        views: AttentionViews,
        beside: Sequence[Any] = (),
        *,
        narrows: bool = False,
    ) -> None:
        """`beside` holds weights that a subclass describes; `narrows` allows copies in fewer bytes."""
        self._may_narrow = narrows
        self._narrow: NarrowCopies | None = None  # made by the first pass
        self._may_sketch = narrows and spec.logit_softcap is None and can_sketch_in_library(weights.head)
        self._sketch: HeadSketch | None = None  # made by the first greedy steps
        self._spec = spec
        self._weights = weights
        self._views = views
        self._kept = [*iterate_tensors(weights), *iterate_tensors(list(beside))]  # what the description points to
        self._slopes: torch.Tensor | None = None
        if spec.alibi is not None:
            self._slopes = alibi_slopes(spec.num_heads) * spec.alibi.scale
            self._kept.append(self._slopes)
        self._forms = [_describe_form(tensor) for tensor in self._kept]
        self._tables: list[torch.Tensor]  # of positions, that layers point to
        self._tables_at: list[int]
        self._is_changing = False  # what is half done is done again: a process may be forked in the middle of it
        self._describe()

    def _describe(self) -> None:
        """Build the C structs with the addresses of the weights."""
        spec, weights = self._spec, self._weights
        self._is_changing = True
        has_limit = spec.mixture is not None and spec.mixture.gate_limit is not None
        self._layers = (CLayer * spec.num_layers)(
            *(self._describe_layer(index, layer) for index, layer in enumerate(weights.layers))
        )
        self._room = 0  # no table of positions yet
        self._tables, self._tables_at = [], []
        positions = None
        if weights.positions is not None:
            positions = weights.positions[spec.position_offset :]
        self._kept_at = find_addresses(self._kept)
        self._model = CModel(
            num_layers=spec.num_layers,
            hidden=spec.hidden_size,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            ffn=spec.ffn_size,
            vocab=spec.vocab_size,
            rope_width=spec.rope.width if spec.rope is not None else 0,
            is_parallel=spec.residual == "parallel",
            is_gated=spec.is_gated,
            activation=_CLAMPED if has_limit else ACTIVATIONS[spec.activation],
            has_embedding_norm=weights.embedding_norm is not None,
            embedding_scale=weights.embedding.scale,
            attention_cap=spec.attention_softcap or 0.0,
            logit_cap=spec.logit_softcap or 0.0,
            head_scale=1.0,
            **_describe_sizes(spec.mixture),
            embedding=describe_rows(weights.embedding),
            head=self._describe_product(weights.head),
            embedding_norm=describe_norm(weights.embedding_norm),
            final_norm=describe_norm(weights.final_norm),
            positions=point(positions),
            slopes=point(self._slopes),
            layers=self._layers,
        )
        self._is_changing = False

    def _describe_layer(self, index: int, layer: Layer) -> CLayer:
        spec = self._spec
        return CLayer(
            attn_norm=describe_norm(layer.attn_norm),
            ffn_norm=describe_norm(layer.ffn_norm),
            post_attn_norm=describe_norm(layer.post_attn_norm),
            post_ffn_norm=describe_norm(layer.post_ffn_norm),
            q_norm=describe_norm(layer.q_norm),
            k_norm=describe_norm(layer.k_norm),
            has_ffn_norm=layer.ffn_norm is not None,
            has_post_norms=layer.post_attn_norm is not None,
            head_norm=_HEAD_NORMS[spec.qk_norm_span] if layer.q_norm is not None else 0,
            window=(spec.window or 0) if spec.kind_of(index) == "sliding" else 0,
            qkv=self._describe_product(layer.qkv),
            out=self._describe_product(layer.out),
            up=self._describe_product(layer.up),
            down=self._describe_product(layer.down),
            scale=spec.scale_of(index),
            is_halved=layer.is_halved,
            sinks=point(layer.sinks),
            **self._describe_mixture(layer.mixture),
        )

    def _describe_mixture(self, mixture: Mixture | None) -> dict[str, Any]:
        """The fields of a layer that has experts."""
        if mixture is None:
            return {}
        described: dict[str, Any] = {
            "is_mixed": True,
            "router": describe_rows(mixture.router),
            "choice_bias": point(mixture.choice_bias),
            "shared_gate": point(mixture.shared_gate.weight) if mixture.shared_gate is not None else None,
        }
        if mixture.shared_up is not None and mixture.shared_down is not None:
            described["shared_up"] = self._describe_product(mixture.shared_up)
            described["shared_down"] = self._describe_product(mixture.shared_down)
        return described

    def _list_products(self) -> Iterator[Product]:
        """The matrices that are multiplied by, all but routers."""
        gates = 2 if self._spec.is_gated else 1
        for layer in self._weights.layers:
            mixture, experts = layer.mixture, 1
            if self._spec.mixture is not None and mixture is not None:
                experts = self._spec.mixture.num_experts
                if mixture.shared_up is not None and mixture.shared_down is not None:
                    yield from ((mixture.shared_up, gates), (mixture.shared_down, 1))
            yield from ((layer.qkv, 1), (layer.out, 1), (layer.up, gates * experts), (layer.down, experts))
        yield self._weights.head, 1

    def _describe_product(self, linear: AnyLinear) -> CMatrix:
        """The C struct of a matrix that is multiplied by: of its copy, if there is one."""
        return describe_product(linear, self._narrow)

    def find_copy(self, weight: torch.Tensor) -> torch.Tensor | None:
        """What products read in the place of a matrix: its copy in half of the bytes, if there is one."""
        self._follow_moves()
        return None if self._narrow is None else self._narrow.find(weight)

    @property
    def narrow_kind(self) -> FloatKind | None:
        """What the copies are that every product reads; None if not all of them do."""
        self._follow_moves()
        return None if self._narrow is None else self._narrow.kind

    def _follow_moves(self) -> None:
        """Describe the decoder again if a tensor has moved: share_memory_(), set_() and torch's own pickling give a
        tensor other memory, and its old address may then be reused. Copies are dropped if what they hold is changed."""
        is_current = all(copy is None or copy.is_current() for copy in (self._narrow, self._sketch))
        is_here = (
            not self._is_changing
            and find_addresses(self._kept) == self._kept_at
            and find_addresses(self._tables) == self._tables_at
        )
        if is_here and is_current and not self._may_narrow:
            return
        if [_describe_form(tensor) for tensor in self._kept] != self._forms:
            raise SettingError(
                "weights of this model were given another shape, dtype or device in place; load the model again, or "
                "use model.to()"
            )
        with one_thread(0):  # many small operators
            self._narrow = NarrowCopies(list(self._list_products())) if self._may_narrow else None
            self._may_narrow = False
            self._may_sketch &= self._sketch is None
            self._sketch = None
            self._describe()

    def sketch_head(self) -> HeadSketch | None:
        """What finds the likeliest tokens without all logits, for the structs that were reached; None: nothing does."""
        library, head = find_library(), self._weights.head
        if self._sketch is None and self._may_sketch and library is not None and isinstance(head, Linear):
            made = HeadSketch(head, library)
            self._may_sketch = made.is_sound
            self._sketch = made if made.is_sound else None
        if self._sketch is not None:
            self._model.sketch = self._sketch.struct
        return self._sketch

    def drop_sketch(self) -> None:
        """Find likeliest tokens among all logits from now on."""
        self._may_sketch, self._sketch, self._model.sketch = False, None, CSketch()

    def reach(self, stop: int) -> CModel:
        """The structs for a pass that reads positions below `stop`: the layers' position tables go that far."""
        self._follow_moves()
        if stop > self._room:
            with one_thread(0):
                self._extend_tables(stop)
        return self._model

    def take_first(self, num_layers: int) -> CModel:
        """A copy of the structs with the first layers only."""
        model = CModel.from_buffer_copy(self._model)
        model.num_layers = min(num_layers, self._spec.num_layers)
        return model

    def _extend_tables(self, stop: int) -> None:
        self._is_changing = True
        tables: dict[LayerKind, torch.Tensor | None] = {}
        for index in range(self._spec.num_layers):
            kind = self._spec.kind_of(index)
            table = tables.setdefault(kind, self._views.table_of(kind, stop))
            if table is not None:
                self._layers[index].rope = None if index in self._spec.unturned else table.data_ptr()
                self._room = table.shape[0]
        self._tables = [table for table in tables.values() if table is not None]
        self._tables_at = find_addresses(self._tables)
        if self._spec.rope is None:
            self._room = self._spec.max_context or (1 << 30)
        self._is_changing = False


def _describe_sizes(mixture: MixtureSpec | None) -> dict[str, Any]:
    """The fields of a model that has experts."""
    if mixture is None:
        return {}
    return {
        "num_experts": mixture.num_experts,
        "num_chosen": mixture.num_chosen,
        "expert_ffn": mixture.ffn_size,
        "shared_ffn": mixture.shared_size,
        "is_sigmoid": mixture.scoring == "sigmoid",
        "is_normalised": mixture.is_normalised,
        "weight_scale": mixture.weight_scale,
        "gate_gain": mixture.gate_gain,
        "gate_limit": mixture.gate_limit or 0.0,
    }


def _describe_form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def describe_norm(norm: Norm | None) -> CNorm:
    """The C struct of a norm, or of none."""
    if norm is None:
        return CNorm(_NO_NORM)
    return CNorm(int(norm.is_layer), norm.eps, point(norm.weight), point(norm.bias))


def describe_rows(rows: AnyLinear | AnyEmbedding) -> CMatrix:
    """The C struct of a matrix or a table."""
    if isinstance(rows, PackedRows):
        return rows.matrix
    bias = rows.bias if isinstance(rows, Linear) else None
    return describe_matrix(rows.weight, bias, "float32", *rows.weight.shape)


def describe_product(linear: AnyLinear, copies: NarrowCopies | None) -> CMatrix:
    """The C struct of a matrix that is multiplied by: of its copy, if there is one."""
    copy = copies.find(linear.weight) if copies is not None and isinstance(linear, Linear) else None
    if copy is None:
        return describe_rows(linear)
    return describe_matrix(copy, linear.bias, NARROW[copy.dtype], *linear.weight.shape)
