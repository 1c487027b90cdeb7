"""A decoder's pass in one call of the CPU library: all layers, all phases, no operators in between."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, Final

import numpy as np
import torch

from unspool.cache import Cache, Span
from unspool.errors import SettingError
from unspool.kernels.alibi import alibi_slopes
from unspool.kernels.cpu import Library, find_library, why_missing
from unspool.kernels.cpu.library import (
    CHUNK,
    BufferAddresses,
    Job,
    Model,
    PackingSchemes,
    Steps,
    describe_matrix,
    point,
)
from unspool.kernels.cpu.library import Layer as CLayer
from unspool.kernels.cpu.library import Matrix as CMatrix
from unspool.kernels.cpu.library import Norm as CNorm
from unspool.models.decoder.head import check_positions
from unspool.models.decoder.layers import DecoderWeights, Layer
from unspool.models.decoder.spec import DecoderSpec
from unspool.models.decoder.views import AttentionViews
from unspool.models.paths.library_keys import Addresses, LibraryKeys, find_keys
from unspool.models.paths.path import ALL_LAYERS, EMBEDDINGS, Pass
from unspool.models.weights import (
    AnyEmbedding,
    AnyLinear,
    Linear,
    Norm,
    PackedLinear,
    PackedRows,
    find_addresses,
    iterate_tensors,
)
from unspool.protocols import Forward, LayerKind, Stretch, Want

_ACTIVATIONS: Final = {
    **dict.fromkeys(("silu", "swish"), 0),
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), 1),
    "gelu": 2,
    "relu": 3,
}
_WIDEST_HEAD: Final = 256
_KEYS_AHEAD: Final = 1024  # positions by which working memory grows
# Tokens of a pass; for many more of them torch's products of plain floats are as fast. Measured on Arm alone.
_MOST_FLOAT: Final = {"neon_dot": CHUNK, "neon_i8mm": CHUNK}
_MOST_FLOAT_ELSEWHERE: Final = 16
TokenRange = tuple[int, int, int]  # a row, and the first and the last (exclusive) of its tokens
_NAMES: Final = (
    *("tokens", "positions", "own_rows", "own_places", "shared_rows", "shared_counts", "wanted", "bases", "firsts"),
)


def explain_no_library(
    spec: DecoderSpec, weights: DecoderWeights, device: torch.device, dtype: torch.dtype
) -> str | None:
    """Why the library can't run this decoder's passes; None if it can."""
    if device.type != "cpu":
        return f"the model is on a device of type {device.type}"
    if find_library() is None:
        return f"there is no CPU library: {why_missing()}"
    if dtype != torch.float32:
        return f"the CPU library computes in float32, and the weights are {dtype}"
    if spec.norm_placement not in ("pre", "sandwich") or not spec.has_final_norm:
        return f"the CPU library has no block with the norms of {spec.family}"
    if spec.head_dim > _WIDEST_HEAD:
        return f"the CPU library reads heads of up to {_WIDEST_HEAD} numbers, and these have {spec.head_dim}"
    if spec.activation not in _ACTIVATIONS:
        return f"the CPU library has no activation {spec.activation}"
    if spec.alibi is not None and spec.alibi.is_rounded:
        return f"{spec.family} rounds its position biases key by key"
    if weights.project_in is not None or weights.project_out is not None:
        return f"{spec.family} has embeddings of another width than its states"
    return None


class StretchCall:
    """The arguments of a call that takes several steps, reused by the next one: building them costs more than a
    layer."""

    def __init__(self, num_rows: int, most_steps: int, vocab_size: int) -> None:
        self.num_rows, self.most_steps = num_rows, most_steps
        self._logits = torch.empty(num_rows, vocab_size)  # every step's in turn
        self._likeliest = (ctypes.c_int64 * num_rows)()
        self._chosen = (ctypes.c_int32 * (most_steps * num_rows))()
        self._numbers: list[Any] = [(ctypes.c_int32 * num_rows)() for _ in _NAMES]
        self._tokens, self._positions, self._own_rows, self._own_places, self._shared_rows, self._shared_counts = (
            self._numbers[:6]
        )
        self._numbers[6][:] = self._numbers[8][:] = range(num_rows)
        self._vocab_size = vocab_size
        self._ends: tuple[int, ...] = ()
        addresses = [ctypes.addressof(numbers) for numbers in self._numbers]
        self.job = Job(
            *(num_rows, num_rows, 0, 0, *addresses, None, BufferAddresses(), BufferAddresses(), PackingSchemes(), None),
            *(self._logits.data_ptr(), ctypes.addressof(self._likeliest)),
        )
        self.steps = Steps(0, 0, None, *(addresses[place] for place in (0, 1, 3)), ctypes.addressof(self._chosen))

    def prepare(
        self,
        tokens: Sequence[int],
        span: Span,
        keys: LibraryKeys,
        scratch: int,
        ends: tuple[int, ...],
    ) -> None:
        """Set the rows' last tokens and the start of the span as the first step's input."""
        at = keys.addresses
        self.job.own, self.job.shared, self.job.packing, self.job.packed = at.own, at.shared, at.packing, at.packed
        self._numbers[7][:] = keys.bases or [0] * self.num_rows
        self._own_rows[:] = keys.own_rows
        self._shared_rows[:], self._shared_counts[:] = keys.shared_rows, keys.shared_counts
        if ends != self._ends:
            self._ends = ends
            known = [end for end in ends if 0 <= end < self._vocab_size]
            self._kept_ends = (ctypes.c_int32 * len(known))(*known)
            self.steps.num_ends, self.steps.ends = len(known), ctypes.addressof(self._kept_ends)
        self._tokens[:], self._positions[:] = tokens, span.starts
        self._own_places[:] = [start - shared for start, shared in zip(span.starts, keys.shared_counts, strict=True)]
        self.job.most_keys, self.job.scratch, self.steps.num_steps = span.stop, scratch, span.num_new

    def read(self) -> list[list[int]]:
        """The tokens of the steps that were taken, one list per row."""
        chosen, rows = self._chosen, self.num_rows
        return [chosen[first : first + rows] for first in range(0, self.steps.num_done * rows, rows)]


class WholeStep:
    """The description of a decoder that the library works from, and the working memory of its calls."""

    most_tokens: int | None  # of a pass that is faster here; None: all are

    def __init__(self, spec: DecoderSpec, weights: DecoderWeights, views: AttentionViews, library: Library) -> None:
        self._spec = spec
        self._weights = weights
        self._views = views
        self._library = library
        self._kept = list(iterate_tensors(weights))  # what the description points to
        self.most_tokens = None
        if not isinstance(weights.layers[0].up, PackedLinear):
            self.most_tokens = _MOST_FLOAT.get(library.instructions, _MOST_FLOAT_ELSEWHERE)
        self._slopes: torch.Tensor | None = None
        if spec.alibi is not None:
            self._slopes = alibi_slopes(spec.num_heads) * spec.alibi.scale
            self._kept.append(self._slopes)
        self._forms = [_describe_form(tensor) for tensor in self._kept]
        self._tables: list[torch.Tensor]  # of positions, that layers point to
        self._tables_at: list[int]
        self._describe()
        self._lock = Lock()  # the working memory is one caller's at a time
        self._numbers = np.zeros((len(_NAMES), CHUNK), dtype=np.int32)
        self._number_rows = [int(row.ctypes.data) for row in self._numbers]
        self._scratch: torch.Tensor | None = None
        self._prepared: tuple[int, ...] = (
            0,
            0,
            0,
            0,
        )  # tokens, rows of the head, keys and threads that it has room for
        self._stretch: StretchCall | None = None

    # --- the description -------------------------------------------------------------------------------
    def _describe(self) -> None:
        """Build the C structs with the addresses of the weights."""
        spec, weights = self._spec, self._weights
        assert weights.final_norm is not None
        self._layers = (CLayer * spec.num_layers)(
            *(self._describe_layer(index, layer) for index, layer in enumerate(weights.layers))
        )
        self._room = 0  # no table of positions yet
        self._tables, self._tables_at = [], []
        positions = None
        if weights.positions is not None:
            positions = weights.positions[spec.position_offset :]
        self._kept_at = find_addresses(self._kept)
        self._model = Model(
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
            slopes=point(self._slopes),
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

    def _follow_moves(self) -> None:
        """Describe the decoder again if a tensor has moved: share_memory_(), set_() and torch's own pickling give a
        tensor other memory, and its old address may then be reused."""
        if find_addresses(self._kept) == self._kept_at and find_addresses(self._tables) == self._tables_at:
            return
        if [_describe_form(tensor) for tensor in self._kept] != self._forms:
            raise SettingError(
                "weights of this model were given another shape, dtype or device in place; load the model again, or "
                "use model.to()"
            )
        self._describe()

    def _reach(self, stop: int) -> None:
        """Update the description if needed, and extend the layers' position tables to what this pass reads."""
        self._follow_moves()
        if stop <= self._room:
            return
        tables: dict[LayerKind, torch.Tensor | None] = {}
        for index in range(self._spec.num_layers):
            kind = self._spec.kind_of(index)
            table = tables.setdefault(kind, self._views.table_of(kind, stop))
            if table is not None:
                self._layers[index].rope = table.data_ptr()
                self._room = table.shape[0]
        self._tables = [table for table in tables.values() if table is not None]
        self._tables_at = find_addresses(self._tables)
        if self._spec.rope is None:
            self._room = self._spec.max_context or (1 << 30)

    # --- a pass ----------------------------------------------------------------------------------------
    def forward(self, tokens: torch.Tensor, span: Span, keys: LibraryKeys, want: Want) -> Forward:
        """Read the tokens (rows, new), and write their keys where they belong; rows may have none of them."""
        rows, num_new = tokens.shape
        spec, wants_all = self._spec, want.logits == "all"
        shape = (rows, num_new, spec.vocab_size) if wants_all else (rows, spec.vocab_size)
        # What is wanted lies in order, unless rows have fewer tokens than others, or none.
        is_whole = min(span.counts) == num_new if wants_all else min(span.counts) > 0
        logits = torch.empty(shape) if is_whole else torch.zeros(shape)
        made = Forward(logits, path="library")
        if want.last_states:
            made.last_states = torch.empty(rows, num_new, spec.hidden_size)
        if want.early:
            made.early_logits = tuple(torch.zeros(shape) for _ in want.early)
        elif is_whole:
            made.likeliest = torch.empty(shape[:-1], dtype=torch.int64)
        num_tokens = min(CHUNK, sum(span.counts))
        with self._lock:
            self._reach(span.stop)
            self._prepare_scratch(num_tokens, num_tokens * (1 + len(want.early)), span.stop)
            model = self._model_of(want.exit_layer)
            for ranges in self._cut(span):
                outputs = self._fill(ranges, tokens, span, keys, wants_all)
                self._run(model, ranges, outputs, span, keys.addresses, made, want.early if outputs else ())
        return made

    @property
    def most_rows(self) -> int:
        """Rows whose steps may be taken several at a time."""
        return CHUNK if self.most_tokens is None else self.most_tokens

    def take_steps(
        self, tokens: Sequence[int], span: Span, keys: LibraryKeys, ends: tuple[int, ...]
    ) -> list[list[int]]:
        """The most likely tokens of up to `span.num_new` steps, one list per row, from the rows' last tokens on."""
        rows = len(tokens)
        with self._lock:
            self._reach(span.stop)
            self._prepare_scratch(rows, rows, span.stop)
            call = self._stretch
            if call is None or call.num_rows != rows or call.most_steps < span.num_new:
                call = self._stretch = StretchCall(rows, span.num_new, self._spec.vocab_size)
            assert self._scratch is not None
            call.prepare(tokens, span, keys, self._scratch.data_ptr(), ends)
            self._library.run_steps(ctypes.byref(self._model), call.job, call.steps, self._library.threads)
            return call.read()

    def _fill_step(self, tokens: Any, starts: Sequence[int], keys: LibraryKeys) -> None:
        """Write the numbers of a step of all rows into the table."""
        table, rows = self._numbers, len(starts)
        table[0, :rows] = tokens
        table[1, :rows] = starts
        table[2, :rows] = keys.own_rows
        table[4, :rows] = keys.shared_rows
        table[5, :rows] = keys.shared_counts
        table[3, :rows] = table[1, :rows] - table[5, :rows]
        table[6, :rows] = table[8, :rows] = range(rows)
        table[7, :rows] = 0 if keys.bases is None else keys.bases

    def _model_of(self, num_layers: int | None) -> Model:
        """The description, of all layers or of the first few."""
        if num_layers is None:
            return self._model
        model = Model.from_buffer_copy(self._model)
        model.num_layers = min(num_layers, self._spec.num_layers)
        return model

    def _prepare_scratch(self, num_tokens: int, num_read: int, most_keys: int) -> None:
        """Ensure that the working memory is large enough; it grows in steps, so that few tokens reallocate it."""
        needed = (num_tokens, num_read, -(-most_keys // _KEYS_AHEAD) * _KEYS_AHEAD)
        threads = self._library.threads  # another number may need more: work is shared out in another way
        have = self._prepared
        if (
            self._scratch is None
            or have[3] != threads
            or any(had < need for had, need in zip(have, needed, strict=False))
        ):
            wanted = (*map(max, have[:3], needed), threads)
            num_bytes = self._library.count_scratch(self._model, *wanted[:3])
            self._scratch = torch.empty(num_bytes, dtype=torch.uint8)
            self._prepared = wanted  # once it is there: memory may have run out

    def _cut(self, span: Span) -> list[list[TokenRange]]:
        """The rows' tokens in calls of at most CHUNK, in order: what a token reads is written before it."""
        calls: list[list[TokenRange]] = [[]]
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

    def _fill(
        self, ranges: Sequence[TokenRange], tokens: torch.Tensor, span: Span, keys: LibraryKeys, wants_all: bool
    ) -> list[tuple[int, int]]:
        """Write the numbers of a call's tokens into the table; which (row, place) each wanted one is."""
        table, at = self._numbers, 0
        if span.num_new == 1 and len(ranges) == len(span.counts):  # a step of all rows
            self._fill_step(tokens.reshape(-1).numpy(), span.starts, keys)
            return [(row, 0) for row in range(len(ranges))]
        outputs: list[tuple[int, int]] = []
        for row, first, last in ranges:
            part = slice(at, at + last - first)
            start, shared = span.starts[row], keys.shared_counts[row]
            table[0, part] = tokens[row, first:last].numpy()
            table[1, part] = np.arange(start + first, start + last)
            table[2, part] = keys.own_rows[row]
            table[3, part] = table[1, part] - shared
            table[4, part] = keys.shared_rows[row]
            table[5, part] = shared
            table[7, part] = 0 if keys.bases is None else keys.bases[row]
            table[8, part] = at
            chosen = (
                range(first, last) if wants_all else range(last - 1, last) if last == span.counts[row] else range(0)
            )
            for place in chosen:
                table[6, len(outputs)] = at + place - first
                outputs.append((row, place if wants_all else 0))
            at = part.stop
        return outputs

    def _run(
        self,
        model: Model,
        ranges: Sequence[TokenRange],
        outputs: Sequence[tuple[int, int]],
        span: Span,
        addresses: Addresses,
        forward: Forward,
        early: tuple[int, ...],
    ) -> None:
        """Call the library for some ranges; `outputs` are the (row, place) of the logits that it makes."""
        logits, hidden = forward.logits, self._spec.hidden_size
        num_tokens = sum(last - first for _, first, last in ranges)
        wants_all, likeliest = logits.dim() == 3, forward.likeliest
        is_whole = not early and (min(span.counts) == span.num_new if wants_all else min(span.counts) > 0)
        made = logits.view(-1, self._spec.vocab_size)
        if is_whole and outputs:  # they follow each other: made where they belong
            row, place = outputs[0]
            first = row * span.num_new + place if wants_all else row
            made = made[first:]
            likeliest = likeliest.view(-1)[first:] if likeliest is not None else None
        elif not is_whole:
            made = torch.empty((1 + len(early)) * len(outputs), self._spec.vocab_size)
        final = torch.empty(num_tokens, hidden) if forward.last_states is not None else None
        early_states = torch.empty(len(early) * len(outputs), hidden) if early else None
        assert self._scratch is not None
        job = Job(
            num_tokens,
            len(outputs),
            span.stop,
            len(early),
            *self._number_rows,
            ctypes.cast((ctypes.c_int32 * len(early))(*early), ctypes.c_void_p),
            *(addresses.own, addresses.shared, addresses.packing, addresses.packed),
            made.data_ptr(),
            likeliest.data_ptr() if likeliest is not None else None,
            point(early_states),
            point(final),
            self._scratch.data_ptr(),
        )
        self._library.run(ctypes.byref(model), ctypes.byref(job), self._library.threads)
        if not is_whole:
            for kept, part in zip(
                (logits, *(forward.early_logits or ())), torch.split(made, max(1, len(outputs))), strict=False
            ):
                for result, (row, place) in zip(part, outputs, strict=True):
                    (kept[row, place] if wants_all else kept[row]).copy_(result)
        if forward.last_states is not None and final is not None:
            at = 0
            for row, first, last in ranges:
                forward.last_states[row, first:last] = final[at : at + last - first]
                at += last - first


def _describe_form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _describe_norm(norm: Norm | None) -> CNorm:
    if norm is None:
        return CNorm()
    return CNorm(int(norm.is_layer), norm.eps, point(norm.weight), point(norm.bias))


def _describe_rows(rows: AnyLinear | AnyEmbedding) -> CMatrix:
    if isinstance(rows, PackedRows):
        return rows.matrix
    bias = rows.bias if isinstance(rows, Linear) else None
    return describe_matrix(rows.weight, bias, "float32", *rows.weight.shape)


class LibraryPath:
    """Passes in one call of the CPU library."""

    name = "library"

    def __init__(self, spec: DecoderSpec, weights: DecoderWeights, views: AttentionViews) -> None:
        library = find_library()
        assert library is not None, "explain_no_library() says so"
        self._spec, self._weights = spec, weights
        self.whole = WholeStep(spec, weights, views, library)

    def explain_refusal(self, new: Pass) -> str | None:
        """Why a pass can't be one call; None if it can."""
        want, most = new.want, self.whole.most_tokens
        if new.tokens is None:
            return EMBEDDINGS
        if want.hidden_states or want.attentions:
            return ALL_LAYERS
        if want.early and want.logits == "all":
            return "early logits are read one token at a time"
        if most is not None and sum(new.span.counts) > most:
            return f"torch's products of plain numbers are as fast for more than {most} tokens"
        new.found = find_keys(new.cache, new.span, self._spec)
        if new.found is None:
            return f"the CPU library does not read the keys of a {type(new.cache).__name__}"
        return None

    def run(self, new: Pass) -> Forward:
        """Read the tokens, and advance the cache."""
        span, tokens, keys = new.span, new.tokens, new.found
        assert tokens is not None
        longest = max(start + count for start, count in zip(span.starts, span.counts, strict=True))
        check_positions(self._spec, self._weights, longest)
        with new.cache.steady():
            if keys.may_move:  # another thread may have let a pool of blocks grow since
                keys = find_keys(new.cache, span, self._spec)
            forward = self.whole.forward(tokens, span, keys, new.want)
        new.cache.end()
        return forward

    def take_steps(
        self,
        tokens: Sequence[int],
        cache: Cache,
        num_steps: int,
        ends: tuple[int, ...],
        open_span: Callable[[Cache, int, int, Sequence[int] | None], Span],
    ) -> Stretch | None:
        """Several greedy steps in one call, whose keys lie past the rows' lengths; None if they can't be."""
        rows = len(tokens)
        if rows > self.whole.most_rows or cache.places(in_order=True) is None:
            return None
        if (longest := cache.longest_stretch) is not None:
            num_steps = min(num_steps, longest)
        if not num_steps:
            return None
        cache.make_room(rows, num_steps)
        span = open_span(cache, rows, num_steps, [0] * rows)  # room for all of them; no length changes
        try:
            check_positions(self._spec, self._weights, span.stop)
            with cache.steady():
                keys = find_keys(cache, span, self._spec)
                if keys is None:
                    return None
                return Stretch(self.whole.take_steps(tokens, span, keys, ends), path=self.name)
        finally:
            cache.end()
