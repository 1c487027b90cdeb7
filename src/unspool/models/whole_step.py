"""A decoder's pass in one call of the CPU library: all layers, all phases, no operators in between."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from threading import Lock
from typing import Any, Final

import numpy as np
import torch

from unspool.cache import Cache, Span, Stores
from unspool.kernels.alibi import alibi_slopes
from unspool.kernels.cpu import Library
from unspool.kernels.cpu.library import CHUNK, Job, Model, Store, describe_matrix, point
from unspool.kernels.cpu.library import Layer as CLayer
from unspool.kernels.cpu.library import Matrix as CMatrix
from unspool.kernels.cpu.library import Norm as CNorm
from unspool.models.layers import DecoderWeights, Layer
from unspool.models.sight import Outlook
from unspool.models.spec import DecoderSpec
from unspool.models.weights import Embedding, Linear, Norm, PackedEmbedding, PackedLinear, PackedRows

_ACTIVATIONS: Final = {
    **dict.fromkeys(("silu", "swish"), 0),
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), 1),
    "gelu": 2,
    "relu": 3,
}
_WIDEST_HEAD: Final = 256
_KEYS_AHEAD: Final = 1024  # positions by which working memory grows
_MOST_FLOAT: Final = 16  # tokens; for more of them torch's products of plain floats are faster
_NAMES: Final = ("tokens", "positions", "own_rows", "own_places", "shared_rows", "shared_counts", "wanted")


def can_run_whole(spec: DecoderSpec, weights: DecoderWeights, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the library knows every part of this decoder's block."""
    return (
        device.type == "cpu"
        and dtype == torch.float32
        and spec.norm_placement in ("pre", "sandwich")
        and spec.head_dim <= _WIDEST_HEAD
        and spec.activation in _ACTIVATIONS
        and not (spec.alibi is not None and spec.alibi.is_rounded)
        and weights.project_in is None
        and weights.project_out is None
        and spec.has_final_norm
    )


class WholeStep:
    """The description of a decoder that the library works from, and the working memory of its calls."""

    most_tokens: int | None  # of a pass that is faster here; None: all are

    def __init__(self, spec: DecoderSpec, weights: DecoderWeights, outlook: Outlook, library: Library) -> None:
        self._spec = spec
        self._weights = weights  # the description points into them
        self._outlook = outlook
        self._library = library
        self._kept: list[Any] = []  # what else it points to
        self.most_tokens = None if isinstance(weights.layers[0].up, PackedLinear) else _MOST_FLOAT
        self._layers = (CLayer * spec.num_layers)(
            *(self._describe_layer(index, layer) for index, layer in enumerate(weights.layers))
        )
        self._model = self._describe()
        self._lock = Lock()  # the working memory is one caller's at a time
        self._numbers = np.zeros((len(_NAMES), CHUNK), dtype=np.int32)
        self._scratch: torch.Tensor | None = None
        self._prepared: tuple[int, ...] = (0, 0, 0)  # tokens, keys and threads that it is large enough for
        self._room = 0

    # --- the description -------------------------------------------------------------------------------
    def _describe(self) -> Model:
        spec, weights = self._spec, self._weights
        assert weights.final_norm is not None
        slopes = None
        if spec.alibi is not None:
            slopes = self._keep(alibi_slopes(spec.num_heads) * spec.alibi.scale)
        positions = None
        if weights.positions is not None:
            positions = weights.positions[spec.position_offset :]
        return Model(
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
            activation=_ACTIVATIONS[spec.activation],
            has_embedding_norm=weights.embedding_norm is not None,
            embedding_scale=weights.embedding.scale,
            attention_cap=spec.attention_softcap or 0.0,
            logit_cap=spec.logit_softcap or 0.0,
            embedding=_describe_rows(weights.embedding),
            head=_describe_rows(weights.head),
            embedding_norm=_describe_norm(weights.embedding_norm),
            final_norm=_describe_norm(weights.final_norm),
            positions=point(positions),
            slopes=point(slopes),
            layers=self._layers,
        )

    def _describe_layer(self, index: int, layer: Layer) -> CLayer:
        spec = self._spec
        return CLayer(
            attn_norm=_describe_norm(layer.attn_norm),
            ffn_norm=_describe_norm(layer.ffn_norm),
            post_attn_norm=_describe_norm(layer.post_attn_norm),
            post_ffn_norm=_describe_norm(layer.post_ffn_norm),
            q_norm=_describe_norm(layer.q_norm),
            k_norm=_describe_norm(layer.k_norm),
            has_ffn_norm=layer.ffn_norm is not None,
            has_post_norms=layer.post_attn_norm is not None,
            has_qk_norm=layer.q_norm is not None,
            window=(spec.window or 0) if spec.kind_of(index) == "sliding" else 0,
            qkv=_describe_rows(layer.qkv),
            out=_describe_rows(layer.out),
            up=_describe_rows(layer.up),
            down=_describe_rows(layer.down),
            scale=spec.scale_of(index),
        )

    def _keep(self, thing: Any) -> Any:
        self._kept.append(thing)
        return thing

    def _reach(self, stop: int) -> None:
        """Let the layers' tables of positions cover what this pass reads."""
        if stop <= self._room:
            return
        for index in range(self._spec.num_layers):
            table = self._outlook.table_of(self._spec.kind_of(index), stop)
            if table is not None:
                self._layers[index].rope = table.data_ptr()
                self._room = table.shape[0]
        if self._spec.rope is None:
            self._room = self._spec.max_context or (1 << 30)

    # --- a pass ----------------------------------------------------------------------------------------
    def forward(
        self, tokens: torch.Tensor, span: Span, stores: Stores, *, wants_all: bool, wants_states: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits (rows, vocab), or (rows, new, vocab) with `wants_all`, and final states (rows, new, hidden)."""
        rows, num_new = tokens.shape
        spec = self._spec
        is_whole = min(span.counts) == num_new
        shape = (rows, num_new, spec.vocab_size) if wants_all else (rows, spec.vocab_size)
        logits = torch.empty(shape) if is_whole or not wants_all else torch.zeros(shape)
        states = torch.empty(rows, num_new, spec.hidden_size) if wants_states else None
        with self._lock:
            self._reach(span.stop)
            self._prepare_scratch(min(CHUNK, rows * num_new), span.stop)
            addresses = self._address(stores)
            for chunk in self._cut(span):
                self._run(chunk, tokens, span, stores, addresses, logits, states, wants_all)
        return logits, states

    def _prepare_scratch(self, num_tokens: int, most_keys: int) -> None:
        """Make sure of the working memory; asked for in steps, so that not every token asks anew."""
        needed = (num_tokens, -(-most_keys // _KEYS_AHEAD) * _KEYS_AHEAD, self._library.threads)
        if self._scratch is None or any(have < need for have, need in zip(self._prepared, needed, strict=True)):
            self._prepared = tuple(map(max, self._prepared, needed))
            self._scratch = torch.empty(
                self._library.count_scratch(self._model, *self._prepared[:2]), dtype=torch.uint8
            )

    def _address(self, stores: Stores) -> tuple[Store, Store, Any]:
        """The stores as the library knows them; the arrays of addresses must outlive the call."""
        made, arrays = [], []
        for buffers in (stores.own, stores.shared or stores.own):
            array = (ctypes.c_void_p * len(buffers))(*(buffer.data_ptr() for buffer in buffers))
            arrays.append(array)
            first = buffers[0]
            made.append(Store(ctypes.cast(array, ctypes.c_void_p), first.stride(0), first.stride(1)))
        return made[0], made[1], arrays

    def _cut(self, span: Span) -> list[list[tuple[int, int, int]]]:
        """Pieces of rows (row, first, last), together at most CHUNK tokens a call, in the order of the rows."""
        calls: list[list[tuple[int, int, int]]] = [[]]
        left = CHUNK
        for row, count in enumerate(span.counts):
            first = 0
            while first < count:
                if not left:
                    calls.append([])
                    left = CHUNK
                last = min(count, first + left)
                calls[-1].append((row, first, last))
                left -= last - first
                first = last
        return [call for call in calls if call]

    def _run(
        self,
        pieces: Sequence[tuple[int, int, int]],
        tokens: torch.Tensor,
        span: Span,
        stores: Stores,
        addresses: tuple[Store, Store, Any],
        logits: torch.Tensor,
        states: torch.Tensor | None,
        wants_all: bool,
    ) -> None:
        table = self._numbers
        at, wanted, outputs = 0, 0, []
        for row, first, last in pieces:
            part = slice(at, at + last - first)
            start, shared = span.starts[row], stores.shared_counts[row]
            table[0, part] = tokens[row, first:last].numpy()
            table[1, part] = np.arange(start + first, start + last)
            table[2, part] = row
            table[3, part] = table[1, part] - shared
            table[4, part] = stores.shared_rows[row]
            table[5, part] = shared
            if wants_all:
                table[6, wanted : wanted + last - first] = np.arange(part.start, part.stop)
                outputs += [(row, place) for place in range(first, last)]
                wanted += last - first
            elif last == span.counts[row]:
                table[6, wanted] = part.stop - 1
                outputs.append((row, 0))
                wanted += 1
            at = part.stop
        lies_in_order = not wants_all or all(count == span.num_new for count in span.counts)
        made = logits if lies_in_order else torch.empty(wanted, self._spec.vocab_size)
        offset = 0
        if lies_in_order and outputs:
            row, place = outputs[0]
            offset = (row * span.num_new + place if wants_all else row) * self._spec.vocab_size * 4
        final = torch.empty(at, self._spec.hidden_size) if states is not None else None
        assert self._scratch is not None
        job = Job(
            at,
            wanted,
            span.stop,
            0,
            *(int(table[i].ctypes.data) for i in range(len(_NAMES))),
            addresses[0],
            addresses[1],
            made.data_ptr() + offset,
            None if final is None else final.data_ptr(),
            self._scratch.data_ptr(),
        )
        self._library.run(ctypes.byref(self._model), ctypes.byref(job), self._library.threads)
        if not lies_in_order:
            for made_row, (row, place) in zip(made, outputs, strict=True):
                logits[row, place] = made_row
        if states is not None and final is not None:
            at = 0
            for row, first, last in pieces:
                states[row, first:last] = final[at : at + last - first]
                at += last - first


def _describe_norm(norm: Norm | None) -> CNorm:
    if norm is None:
        return CNorm()
    return CNorm(int(norm.is_layer), norm.eps, point(norm.weight), point(norm.bias))


def _describe_rows(rows: Linear | PackedLinear | Embedding | PackedEmbedding) -> CMatrix:
    if isinstance(rows, PackedRows):
        return rows.matrix
    bias = rows.bias if isinstance(rows, Linear) else None
    return describe_matrix(rows.weight, bias, "float32", *rows.weight.shape)


def find_stores(cache: Cache, spec: DecoderSpec, rows: int) -> Stores | None:
    """Where a cache's keys lie, for the library to read and write; None for kinds that it does not know."""
    return cache.find_stores(spec.num_layers, rows, spec.num_kv_heads, spec.head_dim, torch.float32)
