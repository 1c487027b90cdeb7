"""All blocks of an encoder-decoder's step of one token, in one kernel. On Hopper.

The reference is `models.paths.captured_pair_blocks.PairBody`. Eight kernels a layer take two microseconds each for work
of much less: one begins to multiply when the one before it has ended. Here a program stays on its multiprocessor from
the first layer to the last. It has eight outputs of every product, or some eights, and waits for numbers of other
programs by loading them until they are there (`words`). States are of one or two powers of two (`vectors`).

A multiprocessor most likely returns loads in their order, so that whoever waits for a word also waits for all that was
asked for before it. So matrices are brought by the copy engine, whose copies are not in that order, two tiles at a time
and not more, for words wait for copies' data all the same (`tiles`); norms and biases are loaded a product ahead, and
keys are asked for a layer ahead. Outputs of attentions are left in parts, as by `held_attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from unspool.kernels.gpu.arguments import round_up
from unspool.kernels.gpu.attention.output_parts import WARP_KEYS
from unspool.kernels.gpu.attention.split_attention import UNIT
from unspool.kernels.gpu.launching import can_overlap, launch
from unspool.kernels.gpu.resident.kernel import run_blocks
from unspool.kernels.gpu.resident.words import LINE
from unspool.kernels.gpu.sampling.tokens import LearnedPositions

WARPS: Final = 8
WIDTH: Final = 64  # of a head
OUTPUTS: Final = 8  # of a program, of a product with as many outputs as the state has numbers
SPLITS: Final = 4  # programs that read the source's keys of one head; as many others read the row's, or fewer
MOST_KEY_TILES: Final = 2  # in registers: three would be spilled
_SPARE: Final = 4  # multiprocessors on which the kernels behind can begin, and have their instructions there
CHUNK_BYTES: Final = 128  # that addresses of matrices are multiples of
_CHUNK: Final = 64  # numbers
_HIDDEN: Final = (512, 768, 1024, 1280)  # numbers of a state
_INNER: Final = (1, 2, 4)  # times as many has the feed-forward
_MOST_LAYERS: Final = 64  # whose addresses there is room for
_MOST_CHUNKS: Final = 1 << 30  # from the lowest matrix to the highest: a copy's coordinates have 32 bits
_MOST_UNITS: Final = 1 << 31  # from one vector to another: places have 32 bits


@dataclass(frozen=True, slots=True)
class ResidentLayer:
    """A layer's matrices, in the order in which they are read, and what stands around them."""

    matrices: tuple[torch.Tensor, ...]  # QKV, out, the source's queries, out, up, down
    biases: tuple[torch.Tensor, ...]  # of the same
    norms: tuple[tuple[torch.Tensor, torch.Tensor] | None, ...]  # weights and biases, before QKV, the queries and up


@dataclass(frozen=True, slots=True)
class TokenState:
    """A state that is the embedding of a token, as `sampling.tokens.embed` makes it."""

    token: torch.Tensor  # (1,) int64
    table: torch.Tensor  # (tokens, hidden)
    scale: float
    places: LearnedPositions | None


class ResidentBlocks:
    """The blocks of one model for one row, and the words that its programs hand to each other."""

    def __init__(
        self,
        layers: Sequence[ResidentLayer],
        *,
        eps: float,
        activation: int,
        is_norm_first: bool,
        device: torch.device,
        key_tiles: int = 1,  # of a source's keys that a program has in registers
    ) -> None:
        first = layers[0]
        self._hidden, self._inner = first.matrices[5].shape
        self._num_programs = count_programs(self._hidden)
        self._key_tiles = key_tiles
        self._layers, self._eps, self._activation = layers, eps, activation
        self._is_norm_first, self._has_first_norm = is_norm_first, first.norms[0] is not None
        matrices = [matrix for layer in layers for matrix in layer.matrices]
        lowest = min(matrices, key=torch.Tensor.data_ptr)
        chunks = [(matrix.data_ptr() - lowest.data_ptr()) // CHUNK_BYTES for matrix in matrices]
        highest = max(chunks) + max(matrix.numel() for matrix in matrices) // _CHUNK
        widths = _list_parts(self._hidden)
        self._tiles = [
            _describe(lowest, columns, widths[min(part, len(widths) - 1)], highest)
            for columns in (self._hidden, self._inner)
            for part in range(2)  # without a rest the first stands there twice
        ]
        self._vector = first.biases[0]
        unit = UNIT * self._vector.element_size()
        places = [
            (vector.data_ptr() - self._vector.data_ptr()) // unit for layer in layers for vector in _list_vectors(layer)
        ]
        with torch.inference_mode():
            table = torch.zeros(len(layers), 32, dtype=torch.int32)  # as `keep_tables` completes it
            table[:, :12] = torch.tensor(places).view(len(layers), -1)
            table[:, 12:18] = torch.tensor(chunks).view(len(layers), -1)
            self._table = table.to(device)
            heads = self._hidden // WIDTH
            num_words = (3 + 2 * SPLITS + 4) * self._hidden + 2 * LINE.value * SPLITS * heads + self._inner
            self._words = torch.zeros(num_words, dtype=torch.int32, device=device)
            self._count = torch.zeros(1, dtype=torch.int32, device=device)

    def __call__(
        self,
        x: torch.Tensor | TokenState,  # (1, hidden)
        out: torch.Tensor,  # likewise, before the norm that follows
        base: torch.Tensor,  # of the buffers' dtype: addresses are offsets from it
        table: torch.Tensor,  # int64: addresses of the layers' keys
        length: torch.Tensor,  # (1,) int32: keys held, -1 for an absent row
        sources: torch.Tensor,  # int64: addresses of the layers' source keys
        source_length: torch.Tensor,  # (1,) int64
        scale: float,
        source_scale: float,
    ) -> None:
        """Run all blocks, and write the new keys."""
        state = x if isinstance(x, TokenState) else None
        places = state.places if state is not None else None
        begins = state.table if state is not None else x
        share = self._num_programs // (self._hidden // WIDTH)  # of the programs reads one head's keys
        launch(
            run_blocks,
            (self._num_programs,),
            *self._tiles,
            self._vector,
            self._table,
            begins,
            state.token if state is not None else begins,
            places.table if places is not None else begins,
            out,
            self._words,
            self._count,
            base,
            table,
            length,
            sources,
            source_length,
            len(self._layers),
            self._eps,
            scale,
            source_scale,
            state.scale if state is not None else 1.0,
            places.offset if places is not None else 0,
            places.table.shape[0] if places is not None else 0,
            H=self._hidden,
            F=self._inner,
            D=WIDTH,
            WARPS=WARPS,
            PROGRAMS=self._num_programs,
            OWN_SPLITS=min(SPLITS, share - SPLITS),
            SPLITS=SPLITS,
            KEY_TILES=self._key_tiles,
            ACT=self._activation,
            IS_NORM_FIRST=self._is_norm_first,
            HAS_FIRST_NORM=self._has_first_norm,
            UNIT=UNIT,
            ENTRIES=round_up(len(self._layers)),
            EMBEDS=state is not None,
            HAS_POSITIONS=places is not None,
            num_warps=WARPS,
            PDL=can_overlap(),  # those behind may start early; itself it starts alone
            launch_cooperative_grid=True,  # programs wait for each other: all must be there
        )


def _describe(lowest: torch.Tensor, columns: int, width: int, num_chunks: int) -> Any:
    """All memory from the lowest matrix on as tiles: eight rows of so many columns, `width` of them from any chunk."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=CHUNK_BYTES, element_bitwidth=16, rank=3)
    block = [OUTPUTS, width // _CHUNK, _CHUNK]
    return TensorDescriptor(lowest, [OUTPUTS, num_chunks, _CHUNK], [columns, _CHUNK, 1], block, layout)


def _list_vectors(layer: ResidentLayer) -> list[torch.Tensor]:
    """A layer's vectors, in the order of `run_blocks`; in place of a norm that is not there any other."""
    norms = [norm if norm is not None else layer.biases[1:3] for norm in layer.norms]
    return [*(vector for norm in norms for vector in norm), *layer.biases]


def takes_layers(layers: Sequence[ResidentLayer], num_heads: int) -> bool:
    """Whether layers are of the kind that the kernel is written for."""
    hidden, inner = layers[0].matrices[5].shape
    shapes = [(3 * hidden, hidden), *[(hidden, hidden)] * 3, (inner, hidden), (hidden, inner)]
    if hidden not in _HIDDEN or num_heads * WIDTH != hidden or inner % hidden or inner // hidden not in _INNER:
        return False
    if count_programs(hidden) < (SPLITS + 1) * num_heads or len(layers) > _MOST_LAYERS:
        return False
    matrices = [matrix for layer in layers for matrix in layer.matrices]
    vectors = [vector for layer in layers for vector in _list_vectors(layer)]
    are_whole = all(tensor.dtype == torch.bfloat16 and tensor.is_contiguous() for tensor in (*matrices, *vectors))
    if not are_whole or any([tuple(matrix.shape) for matrix in layer.matrices] != shapes for layer in layers):
        return False
    unit = UNIT * torch.bfloat16.itemsize
    return _are_near(matrices, CHUNK_BYTES, _MOST_CHUNKS) and _are_near(vectors, unit, _MOST_UNITS)


def _are_near(tensors: Sequence[torch.Tensor], unit: int, most: int) -> bool:
    """Whether addresses are multiples of some bytes, and not too far from each other."""
    places = [tensor.data_ptr() for tensor in tensors]
    return not any(place % unit for place in places) and (max(places) - min(places)) // unit < most


def count_programs(hidden: int) -> int:
    """How many programs run the blocks, each on a multiprocessor of its own."""
    return min(hidden // OUTPUTS, _count_multiprocessors() - _SPARE)


def count_key_tiles(positions: int) -> int:
    """How many tiles of a source with so many positions a program has in registers: all of its own, up to a limit."""
    return min(MOST_KEY_TILES, -(-positions // (SPLITS * WARPS * WARP_KEYS)))


def _list_parts(hidden: int) -> list[int]:
    """A state's numbers as powers of two: see `vectors`."""
    first = 1 << (hidden.bit_length() - 1)
    return [first, hidden - first] if hidden > first else [first]


@cache
def _count_multiprocessors() -> int:
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)
