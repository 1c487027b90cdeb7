"""One decoding step on a GPU as one CUDA graph, for any cache of plain buffers and any lengths.

A step reads one token per row, or a few: drafts to verify, or candidates.

At a few rows the host's launches cost more than the work. So the whole step is captured once for a number of rows:
tokens, lengths and the addresses of the cache's buffers are read from the device, the lengths are advanced there, and
the most likely token is found there too. A graph is captured when a number of rows first occurs, in some ten
milliseconds once Triton has its kernels, and it serves every later cache.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_left
from collections.abc import Hashable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Final

import torch

from unspool.cache import Cache
from unspool.cache.places import Places
from unspool.forks import make_lock
from unspool.kernels.beam_choice import BeamSizes
from unspool.kernels.by_thread import note_keeper
from unspool.kernels.key_layout import KeyLayout
from unspool.kernels.packing import Scheme
from unspool.kernels.presence import SMALLEST_CAPABILITY, has_triton
from unspool.kernels.token_choice import TokenChoice
from unspool.models.decoder.head import check_positions
from unspool.models.decoder.layers import DecoderWeights
from unspool.models.decoder.spec import DecoderSpec
from unspool.models.paths.captured_shape import PassShape
from unspool.models.paths.captured_sketch import MOST_SKETCHED, CapturedSketch, can_sketch_captured, make_sketch
from unspool.models.paths.captured_step import LOGGED, UNIT, CapturedStep, Sources
from unspool.models.paths.path import ALL_LAYERS, EMBEDDINGS, Pass
from unspool.models.weights import TableLinear, WordLinear, find_addresses, iterate_tensors
from unspool.protocols import Forward, Want

if TYPE_CHECKING:
    from unspool.models.paths.captured_body import Body

# Numbers of rows that steps are captured for; a batch of fewer rows is padded with absent ones.
BUCKETS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
MOST_NEW: Final = 16  # tokens per row
_MOST_KEPT: Final = 32  # steps kept for reuse
_MOST_CHOSEN: Final = 16  # experts of a token
_BRIEF: Final = Want(is_brief=True)


def explain_no_capture(
    spec: DecoderSpec, weights: DecoderWeights, device: torch.device, dtype: torch.dtype
) -> str | None:
    """Why a model's steps can't be captured; None if they can."""
    if device.type != "cuda":
        return f"the model is on a device of type {device.type}"
    if not has_triton():
        return "triton is not installed"
    if torch.cuda.get_device_capability(device) < SMALLEST_CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} is older than Ampere"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"there are no kernels for {dtype}"
    if spec.alibi is not None and spec.alibi.is_rounded:
        return f"{spec.family} rounds its position biases key by key"
    if spec.head_dim % UNIT:
        return f"heads of {spec.head_dim} numbers are not aligned"
    if any(isinstance(part, TableLinear) for layer in weights.layers for part in (layer.qkv, layer.up, layer.down)):
        return "codes of nf4 and fp4 are multiplied operator by operator"
    if spec.mixture is None:
        return None
    mixed = [(layer.up, layer.down) for layer in weights.layers if layer.mixture is not None]
    if any(isinstance(part, WordLinear) for parts in mixed for part in parts):
        return "experts of 8 or 4 bits are not read by number"
    if spec.mixture.num_chosen > _MOST_CHOSEN:
        return f"{spec.mixture.num_chosen} experts a token are more than kernels choose"
    return None


class CapturedSteps:
    """The captured steps of a decoder: one for each bucket of rows, lent to one caller at a time."""

    name = "captured"

    def __init__(self, spec: DecoderSpec, weights: DecoderWeights, device: torch.device, dtype: torch.dtype) -> None:
        self._spec, self._weights, self._device, self._dtype = spec, weights, device, dtype
        self._numbered = next(iterate_tensors(weights)).device  # the device with its number
        self._waiting: dict[tuple[PassShape, int, int], list[CapturedStep]] = {}  # by shape, stream and owner
        self._kept: list[torch.Tensor] = []
        self._kept_at: list[int] = []  # the addresses in the graphs
        self._seen: weakref.WeakSet[Places] = weakref.WeakSet()  # of passes since weights moved
        self._lock = make_lock(self, "_lock")
        self._sketch: CapturedSketch | None = None  # made by the first greedy steps that are launched together
        self._may_sketch = can_sketch_captured(weights.head)
        self._follow(iterate_tensors(weights))
        note_keeper(self)

    def forget_thread(self, thread: int) -> None:
        """Drop the steps that a thread has captured, with their memory."""
        with self._lock:
            for key, steps in list(self._waiting.items()):
                left = [step for step in steps if step.maker != thread]
                if left:
                    self._waiting[key] = left
                else:
                    del self._waiting[key]

    def _follow(self, weights: Iterable[torch.Tensor]) -> None:
        """Watch weights whose addresses graphs will have."""
        self._kept += weights
        self._kept_at = find_addresses(self._kept)

    def _explain_refusal(self, new: Pass) -> str | None:
        """Why a pass can't be a captured step; None if it can."""
        tokens, cache, want = new.tokens, new.cache, new.want
        if tokens is None:
            return EMBEDDINGS
        rows, num_new = tokens.shape[0] // cache.num_forks, max(tokens.shape[1], cache.num_forks)
        if num_new == 1 and new.counts is not None and min(new.counts) < 1:
            return "some rows read nothing"
        self._check_longest(max(cache.lengths, default=0) + tokens.shape[1])
        if cache.num_forks > 1:
            want = replace(want, logits="all")
        if want.hidden_states or want.attentions:
            return ALL_LAYERS
        if (num_new > 1) != (want.logits == "all") or num_new > MOST_NEW:
            return f"{num_new} tokens a row are read; captured are one, and drafts of up to {MOST_NEW - 1}"
        if want.early and (num_new > 1 or self._weights.project_out is not None):
            return "early logits are read one token at a time"
        if want.early and self._spec.state_scale != 1.0:
            return f"{self._spec.family}'s early logits are scaled"
        if rows * num_new > BUCKETS[-1]:
            return f"{rows * num_new} tokens are more than the {BUCKETS[-1]} that steps are captured for"
        places = cache.last_places()
        if places is None:
            return f"a {type(cache).__name__} is not read by address"
        if cache.first_fork is not None and (cache.first_fork or cache.num_forks == 1):
            return "one candidate of a row is read alone, or after others"
        if places.branches and (num_new > 1 or want.early or want.last_states):
            return "rows that share a prompt's keys read one token at a time"
        if places.layer_tables is not None:
            return "layers whose blocks have tables of their own are not read by address"
        if places.packed is not None:
            from unspool.kernels.gpu.attention.packed_attention import explain_no_tiles

            if places.block_table is not None:
                return "packed blocks are not read by address"

            if num_new > 1:
                return "packed keys are read one token at a time"
            if places.packed.sliding is not None:
                return "windows that are packed are not read by address"
            if why := explain_no_tiles(*places.packed.schemes):
                return why
        if len(places.buffers) != self._spec.num_layers:
            return "the cache has no buffers yet"
        if places.rooms is not None:
            if num_new > 1:
                return "rings are read one token at a time"
            if not self._fit_rooms(places.rooms, max(cache.lengths, default=0) + 1):
                return "the cache keeps fewer keys than the model's layers see"
        first, device = places.buffers[0], self._numbered
        if (first.device != device and not places.is_pinned) or first.dtype != self._dtype:
            return f"the cache is kept in {first.dtype} on {first.device}"
        if not first.is_contiguous():
            return "the cache's rows lie between others"
        return None

    def _check_longest(self, longest: int) -> None:
        """Raise if a row would get more positions than the model has."""
        check_positions(self._spec, self._weights, longest)

    def _find_sources(self, cache: Cache) -> Sources | None:  # noqa: ARG002 - encoder-decoders have them
        """What the rows read beside their own keys."""
        return None

    def _fit_rooms(self, rooms: Sequence[int], length: int) -> bool:
        """Whether every layer finds what it sees in rings of these sizes."""
        seen = {"full": length, "sliding": min(length, self._spec.window or length)}
        return all(room >= seen[self._spec.kind_of(layer)] for layer, room in enumerate(rooms))

    def run(self, new: Pass) -> Forward | str:
        """Read tokens (rows, new), and advance the cache; or why this can't be a captured step."""
        if (refusal := self._explain_refusal(new)) is not None:
            return refusal
        tokens, want = new.tokens, new.want
        forward = self._run(new, want, is_greedy=want.likeliest_only and want.is_brief)
        assert tokens is not None
        if want.logits == "all":
            rows = tokens.shape[0] // new.cache.num_forks
            forward.logits = forward.logits.view(rows, -1, forward.logits.shape[-1])
        if forward.last_states is not None:
            forward.last_states = forward.last_states.view(*tokens.shape, -1)
        return forward

    def launch_steps(self, new: Pass, num_steps: int, choice: TokenChoice | None) -> torch.Tensor | None:
        """Launch steps, each of which reads the tokens that the one before has chosen, and advance the cache.

        Returns what they choose, (steps, rows); they may be fewer than asked for. None if steps must be taken one by
        one.
        """
        cache, lengths = new.cache, new.cache.lengths
        if not lengths or cache.num_forks > 1 or self._explain_refusal(new) is not None:
            return None
        if num_steps == 1 and choice is None and not self._may_sketch:
            return None  # a step alone is as fast: it has its tokens already
        places, num_steps = cache.places(), min(num_steps, LOGGED)
        if places is None or not places.is_plain or places.landing is not None:
            return None
        self._check_longest(max(lengths) + num_steps)
        want = _BRIEF if choice is None else replace(_BRIEF, epilogue=choice)
        return self._run(new, want, num_steps, is_greedy=choice is None or choice.sizes.parts is None).likeliest

    def _find_sketch(self, shape: PassShape, num_steps: int, *, begins: bool) -> CapturedSketch | None:
        """What finds the likeliest tokens of so many steps without all logits; None: nothing does."""
        if not self._may_sketch or not shape.is_plain_step or shape.rows > MOST_SKETCHED:
            return None
        if not self._can_give_head_input(shape):
            return None
        sketch = self._sketch
        if sketch is not None and sketch.is_same(begins=begins) and sketch.note_rows(shape.rows * max(num_steps, 1)):
            return sketch
        with self._lock:
            if self._sketch is sketch:  # no other thread has been here
                # A head is sketched once: after a change steps read it again, as they do if too many tokens are left.
                self._sketch = make_sketch(self._weights.head) if sketch is None else None
                self._may_sketch = self._sketch is not None
                for key in [key for key in self._waiting if key[0].is_sketched]:
                    del self._waiting[key]
            return self._sketch

    def _run(self, new: Pass, want: Want, num_steps: int = 0, *, is_greedy: bool = False) -> Forward:
        """The result of a pass that can be captured; with `num_steps` what so many steps choose, by their likeliest
        tokens alone if `is_greedy`."""
        tokens, cache, counts = new.tokens, new.cache, new.counts
        assert tokens is not None
        num_forks, num_new = cache.num_forks, max(tokens.shape[1], cache.num_forks)
        rows = tokens.shape[0] // num_forks
        starts = (list(cache.lengths) or [0] * rows)[::num_forks]
        with cache.steady():
            if num_new == 1:
                for _ in range(max(num_steps, 1)):
                    cache.advance(rows)
            else:
                cache.begin(tokens.shape[0], tokens.shape[1], counts, self._device)
                cache.end()
            places = cache.places()
            assert places is not None
            is_new = places not in self._seen
            if is_new:
                self._follow_moves(places)
            sources = self._find_sources(cache)
            rows_each = 0 if sources is None else rows // len(sources.lengths)
            is_lone = rows == num_new == num_forks == 1 and places.is_plain and places.landing is None
            limits = self._limits if is_lone and want.exit_layer is None else ()
            most_keys = next((limit for limit in limits if starts[0] + max(num_steps, 1) <= limit), 0)
            shape = _shape_pass(places, want, rows, num_new, num_forks, rows_each, most_keys)
            # An engine's cache moves with every block that it takes, and its steps must not wait for the device.
            begins = is_new and num_steps > 0
            sketch = self._find_sketch(shape, num_steps, begins=begins) if is_greedy else None
            if sketch is not None:
                shape = _sketch_shape(shape)
            with nullcontext() if self._is_current_device() else torch.cuda.device(self._device):
                # A step's inputs are written again for the next one, which only its own stream puts after this work.
                # What a brief pass returns is overwritten by its step's next run, so that must be the same thread's.
                is_brief = (want.is_brief and not num_steps) or isinstance(shape.epilogue, BeamSizes)
                owner = threading.get_ident() if is_brief else 0
                key = (shape, torch._C._cuda_getCurrentRawStream(torch.cuda.current_device()), owner)
                step = self._borrow(key, sketch)
                forward = step.run(tokens, starts, places, want, sources, num_steps)
        with self._lock:
            if sum(map(len, self._waiting.values())) >= _MOST_KEPT:
                self._waiting.clear()
            self._waiting.setdefault(key, []).append(step)
        return forward

    @cached_property
    def _limits(self) -> tuple[int, ...]:
        """Up to how many keys a lone row's steps are of a kind of their own, rising."""
        from unspool.models.paths.captured_parted import list_limits  # Triton is imported only if a GPU is used

        return list_limits(self._spec, self._weights, self._dtype)

    def _is_current_device(self) -> bool:
        return self._numbered.index == torch.cuda.current_device()

    def _follow_moves(self, places: Places) -> None:
        """Drop all captured steps if weights have moved; checked once per cache, because it costs host time."""
        at = find_addresses(self._kept)
        with self._lock:
            if at != self._kept_at:
                self._kept_at = at
                self._waiting.clear()
                self._seen.clear()
            self._seen.add(places)

    def _borrow(self, key: tuple[PassShape, int, int], sketch: CapturedSketch | None) -> CapturedStep:
        with self._lock:
            waiting = self._waiting.get(key)
            if waiting:
                return waiting.pop()
        with torch.inference_mode():
            body = self._make_body(key[0])
        return CapturedStep(self._spec, body, self._device, self._dtype, key[0], sketch)

    def _can_give_head_input(self, shape: PassShape) -> bool:  # noqa: ARG002 - encoder-decoders ask
        """Whether the work of a step can end before the head."""
        from unspool.models.paths.captured_fused import can_fuse

        return can_fuse(self._spec)

    def _make_body(self, shape: PassShape) -> Body:
        """The work of a step."""
        from unspool.models.paths.captured_blocks import make_body  # Triton is imported only if a GPU is used

        return make_body(self._spec, self._weights, self._device, self._dtype, shape)


def _shape_pass(
    places: Places, want: Want, rows: int, num_new: int, num_forks: int, rows_each: int, most_keys: int
) -> PassShape:
    """The graph that a pass needs."""
    epilogue = want.epilogue if want.epilogue is not None and want.epilogue.fits(num_new, num_forks) else None
    return _find_shape(
        BUCKETS[bisect_left(BUCKETS, rows)],
        places.branches,
        places.block_size,
        places.rooms is not None,
        num_new,
        num_forks > 1,
        want.exit_layer,
        tuple(want.early),
        want.last_states,
        places.packed.schemes if places.packed is not None else None,
        places.landing.away if places.landing is not None and num_new == 1 else (),
        most_keys,
        rows_each,
        None if epilogue is None else epilogue.key,
    )


@lru_cache(maxsize=256)
def _sketch_shape(shape: PassShape) -> PassShape:
    return replace(shape, is_sketched=True)


@lru_cache(maxsize=256)
def _find_shape(
    rows: int,
    branches: int,
    block_size: int,
    is_ring: bool,
    num_new: int,
    is_forked: bool,
    num_layers: int | None,
    early: tuple[int, ...],
    wants_states: bool,
    packing: tuple[Scheme, Scheme] | None,
    away: tuple[int, ...],
    most_keys: int,
    rows_each: int,
    epilogue: Hashable | None,
) -> PassShape:
    """A shape, made once: its parts are many, and a step takes it each time."""
    return PassShape(
        rows=rows,
        layout=KeyLayout(branches, block_size, is_ring=is_ring),
        num_new=num_new,
        is_forked=is_forked,
        num_layers=num_layers,
        early=early,
        wants_states=wants_states,
        packing=packing,
        away=away,
        most_keys=most_keys,
        rows_each=rows_each,
        epilogue=epilogue,
    )
