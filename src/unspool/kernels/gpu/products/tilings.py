"""The tiling of a product: measured once per shape and GPU (`benchmarks/gpu_tilings.py`), else chosen by a rule.

From three rows on cuBLAS is as fast as a kernel of ours, the norms and gates around it included: one on the tensor
cores (`rows_product`) only reached its times, one that holds whole rows of the matrix in registers was slower.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Final

import torch

from unspool.kernels.gpu.products.float_product import FloatTiling
from unspool.kernels.gpu.products.held_product import HeldTiling
from unspool.kernels.gpu.products.nibble_product import MOST_CHUNKS, NibbleTiling
from unspool.kernels.gpu.products.row_product import RowTiling
from unspool.kernels.gpu.products.words_product import WordsTiling

_USUAL_OF_TWO: Final = RowTiling(4, 1024, 2)
_USUAL_GATED_OF_TWO: Final = RowTiling(2, 2048, 4)
_HELD: Final = HeldTiling(4, 8, 4)
_HELD_GATED: Final = HeldTiling(2, 8, 4)
_WIDEST_HELD: Final = 2048  # inputs: two rows of this many fit into registers
_FEWEST_HELD: Final = 8192  # outputs: with fewer there are not enough programs
MOST_ROWS: Final = 2
MOST_NUMBERS_OF_TWO: Final = 34_000_000  # of a matrix that two rows multiply with our kernels
MOST_BYTES: Final = 1 << 20  # of a file of measured tilings
_WIDE: Final = 65_536  # outputs: a head
_NARROW: Final = 4096  # outputs
_MANY: Final = 32_768  # outputs of a head for one row: more than a block's matrices have
_LONG: Final = 6000  # inputs: from here on rows of the matrix are loaded part by part

# (outputs, inputs): one row, measured on an H200, 2026-11-15
_MEASURED: Final[dict[tuple[int, int], RowTiling]] = {
    (2048, 2048): RowTiling(4, 2048, 8),
    (3072, 2048): RowTiling(4, 1024, 4),
    (16384, 2048): RowTiling(4, 512, 2),
    (2048, 8192): RowTiling(4, 1024, 4),
    (128256, 2048): RowTiling(4, 1024, 4, starts_next_early=False),
    (4096, 4096): RowTiling(8, 1024, 4),
    (6144, 4096): RowTiling(4, 4096, 4),
    (28672, 4096): RowTiling(4, 1024, 4),
    (4096, 14336): RowTiling(8, 2048, 4),
    (128256, 4096): RowTiling(4, 2048, 8, starts_next_early=False),
    # where the rule is more than 3 % slower; 2026-11-16
    (22016, 4096): RowTiling(2, 1024, 4, ahead=4),
    (4608, 3584): RowTiling(4, 512, 2),
    (3584, 3584): RowTiling(16, 512, 4),
    (37888, 3584): RowTiling(2, 512, 1, ahead=2),
    (3584, 18944): RowTiling(2, 2048, 4, ahead=2),
    (152064, 3584): RowTiling(16, 512, 4, starts_next_early=False),
    (3072, 12288): RowTiling(2, 1024, 2, ahead=2),
    (4096, 2304): RowTiling(16, 512, 4),
    (2304, 2048): RowTiling(4, 1024, 4),
    (2304, 9216): RowTiling(2, 2048, 4),
    (1152, 6912): RowTiling(2, 2048, 4, ahead=2),
    # in whole steps of Qwen3-0.6B, GPT-2 XL and Gemma 3 1B
    (6144, 1024): RowTiling(16, 256, 8, ahead=4),
    (4800, 1600): RowTiling(8, 256, 4, ahead=7),
    (6400, 1600): RowTiling(8, 256, 4, ahead=7),
    (1536, 1152): RowTiling(8, 256, 4, ahead=5),
    # in whole steps of BART-large and Whisper-large-v3; once more on 2026-11-18, with attentions of tensor cores
    (1024, 1024): RowTiling(16, 256, 4, ahead=4),
    (1280, 1280): RowTiling(8, 256, 4, ahead=5, cluster=4),
    (3840, 1280): RowTiling(8, 256, 4, ahead=5),
    (5120, 1280): RowTiling(16, 256, 4, ahead=5),
    (1280, 5120): RowTiling(2, 1024, 4, ahead=5),
    (3072, 1024): RowTiling(16, 256, 4, ahead=4),
    (4096, 1024): RowTiling(16, 256, 4, ahead=4),
    # in whole steps of a Mamba and a Mamba-2 of 2.8B
    (10240, 2560): RowTiling(8, 512, 4),
    (192, 5120): RowTiling(1, 1024, 4, ahead=5),
    (2560, 5120): RowTiling(4, 1024, 4, ahead=3, registers=96),
}

_MEASURED_OF_TWO: Final[dict[tuple[int, int], RowTiling]] = {
    (2048, 2048): RowTiling(4, 2048, 4),
    (3072, 2048): RowTiling(4, 1024, 2),
    (2048, 8192): RowTiling(8, 1024, 4),
    (4096, 4096): RowTiling(8, 512, 2),
    (6144, 4096): RowTiling(8, 1024, 4),
}

# (outputs, inputs): 4-bit words and one row, measured on an H200, 2026-11-15
_MEASURED_OF_HALVES: Final[dict[tuple[int, int], NibbleTiling]] = {
    (6144, 4096): NibbleTiling(8, 512, 2, 8),
    (4096, 4096): NibbleTiling(16, 512, 1, 8),
    (28672, 4096): NibbleTiling(8, 512, 8, 8),
    (4096, 14336): NibbleTiling(2, 1024, 8, 8),
    (128256, 4096): NibbleTiling(8, 512, 8, 4),
}
_MEASURED_OF_BYTES: Final[dict[tuple[int, int], NibbleTiling]] = {
    (6144, 4096): NibbleTiling(8, 512, 2, 4),
    (4096, 4096): NibbleTiling(8, 512, 2, 8),
    (28672, 4096): NibbleTiling(8, 512, 7, 8),
    (4096, 14336): NibbleTiling(8, 1024, 4, 16),
    (128256, 4096): NibbleTiling(8, 512, 8, 4),
}
_MANY_OUTPUTS: Final = 16_384
_LONG_ROW: Final = 1024  # words


def choose_nibble_tiling(outputs: int, inputs: int, *, rounds: bool, is_gated: bool = False) -> NibbleTiling | None:
    """The tiling for one row and a matrix of 4-bit words, both halves counted if it is gated; None if too wide."""
    found = (_MEASURED_OF_BYTES if rounds else _MEASURED_OF_HALVES).get((outputs, inputs))
    if found is not None:
        return found
    num_words = inputs // 8
    words = min(_LONG_ROW if num_words > _LONG_ROW else 512, 1 << max(7, (num_words - 1).bit_length()))
    chunks = -(-num_words // words)
    if chunks > MOST_CHUNKS:
        return None
    rows = max(1, 8 // chunks // (2 if is_gated else 1))
    return NibbleTiling(rows, words, 8 if outputs >= _MANY_OUTPUTS else 2, 8 if words > 512 else 4)


def choose_held_tiling(
    outputs: int, inputs: int, num_rows: int, dtype: torch.dtype, *, is_gated: bool
) -> HeldTiling | None:
    """The tiling for two rows held in registers (`held_product`); None if other kernels are faster.

    Measured on an H200, 2026-11-15: 18.2 against 21.0 microseconds for a gated (16384, 2048). Matrices of few outputs
    are slower with it; a head, whose logits cuBLAS can't write in float32, uses it too.
    """
    if num_rows != MOST_ROWS or dtype == torch.float32 or inputs > _WIDEST_HELD or outputs < _FEWEST_HELD:
        return None
    if is_gated:
        is_fit = outputs * inputs <= MOST_NUMBERS_OF_TWO and outputs % (2 * _HELD_GATED.rows * _HELD_GATED.tiles) == 0
        return _HELD_GATED if is_fit else None
    return _HELD if outputs >= _WIDE and outputs % (_HELD.rows * _HELD.tiles) == 0 else None


def choose_words_tiling(outputs: int, num_words: int, *, is_short: bool) -> WordsTiling:
    """The tiling for a matrix of whole numbers, of 4 bits or of 8, with rows of `num_words` words."""
    words = min(512, 1 << (num_words - 1).bit_length())
    rows = 4 if not is_short and outputs < _WIDE else 8
    return WordsTiling(rows, words, max(1, words // 128))


def choose_float_tiling(outputs: int, num_words: int, *, is_gated: bool) -> FloatTiling:
    """The tiling for a matrix of floats of 8 bits with rows of `num_words` words, both halves counted if gated."""
    words = min(512, 1 << (num_words - 1).bit_length())
    rows = 4 if is_gated or outputs < _NARROW else 8
    return FloatTiling(rows, words, max(1, words // 128))


def choose_tiling(
    outputs: int, inputs: int, num_rows: int, dtype: torch.dtype, *, is_gated: bool = False
) -> RowTiling | None:
    """The tiling for a matrix (outputs, inputs), both halves counted if it is gated; None if cuBLAS is used."""
    if num_rows == MOST_ROWS and outputs * inputs <= MOST_NUMBERS_OF_TWO and dtype != torch.float32:
        return _MEASURED_OF_TWO.get((outputs, inputs)) or (_USUAL_GATED_OF_TWO if is_gated else _USUAL_OF_TWO)
    if num_rows > 1:
        return None
    found = read_measured().get((outputs, inputs)) or _MEASURED.get((outputs, inputs))
    if found is None:
        found = _follow_rule(outputs, inputs, is_gated=is_gated)
    if dtype == torch.float32:  # twice the bytes per number: half the columns
        return replace(found, columns=max(256, found.columns // 2))
    return found


def _follow_rule(outputs: int, inputs: int, *, is_gated: bool) -> RowTiling:
    """The tiling for one row and a shape that was not measured: what was best for most of those that were.

    Whole rows of the matrix are loaded before the input is there, if they fit into registers; columns are a multiple of
    what a program takes at a time.
    """
    is_even = inputs % 1024 == 0
    if is_gated:
        return RowTiling(4, 1024, 4) if is_even and inputs >= 4096 else RowTiling(4, 512, 2)
    if inputs >= _LONG:
        return RowTiling(4, 1024, 4, ahead=3)
    if outputs >= _MANY:
        if not is_even:
            return RowTiling(8, 512, 4, starts_next_early=False, ahead=5)
        return RowTiling(4, *((2048, 8) if inputs >= 4096 else (1024, 4)), starts_next_early=False)
    if is_even:
        return RowTiling(4 if outputs > 1024 else 2, 1024, 4, ahead=4)
    if outputs >= 6000:
        return RowTiling(8, 512, 4, ahead=5)
    return RowTiling(4 if outputs >= 4096 else 2, 512, 2, ahead=5)


def find_table() -> Path:
    """The file of tilings measured on this machine's GPU."""
    name = "".join(letter if letter.isalnum() else "-" for letter in torch.cuda.get_device_name())
    return Path.home() / ".cache" / "unspool" / "tilings" / f"{name}.json"


@cache
def read_measured() -> dict[tuple[int, int], RowTiling]:
    """The tilings measured on this machine; empty if there are none, or if the file is invalid."""
    if not torch.cuda.is_available():
        return {}
    path = find_table()
    try:
        if not path.is_file() or path.stat().st_size > MOST_BYTES:
            return {}
        entries = json.loads(path.read_text())
        return {
            (int(n), int(k)): _check(RowTiling(int(r), int(c), int(w), bool(e), int(a)))
            for n, k, r, c, w, e, a in entries
        }
    except (OSError, ValueError, TypeError):
        return {}


def _check(tiling: RowTiling) -> RowTiling:
    sizes = (tiling.rows, tiling.columns, tiling.warps)
    if any(size < 1 or size & (size - 1) for size in sizes) or tiling.rows * tiling.columns > 1 << 15:
        raise ValueError(f"no tiling: {tiling}")
    if tiling.warps > 16 or not 1 <= tiling.ahead <= 64:
        raise ValueError(f"no tiling: {tiling}")
    return tiling


def write_measured(tilings: dict[tuple[int, int], RowTiling]) -> Path:
    """Keep measured tilings for later processes."""
    path = find_table()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps(
            [
                [*shape, one.rows, one.columns, one.warps, one.starts_next_early, one.ahead]
                for shape, one in tilings.items()
            ]
        )
    )
    read_measured.cache_clear()
    return path
