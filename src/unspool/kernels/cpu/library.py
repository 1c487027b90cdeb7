"""Finding and calling the library. Sizes are checked here; the C code trusts them."""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from unspool.errors import ResourceError, SettingError
from unspool.kernels.cpu.blocks import BLOCK, Blocks, Kind
from unspool.kernels.cpu.marks import Marks
from unspool.kernels.cpu.quota import count_allowed
from unspool.kernels.cpu.structures import (
    NARROW,
    CAttention,
    CJob,
    CMatrix,
    CModel,
    CRows,
    CSteps,
    count_narrow_bytes,
    number_kind,
    point,
)
from unspool.kernels.cpu.supers import AnyKind, count_columns
from unspool.kernels.cpu.tiles import TILE, count_tile_bytes

ABI: Final = 27
CHUNK: Final = 64  # the most tokens per call; US_CHUNK
MOST_THREADS: Final = 256
FILE: Final = Path(__file__).parent / ("libunspool_cpu.dylib" if sys.platform == "darwin" else "libunspool_cpu.so")
SWITCH: Final = "UNSPOOL_CPU_KERNELS"  # "off" or the name of an instruction set


DRAW: Final = np.dtype(  # us_draw
    [(name, np.float64) for name in ("temperature", "top_p", "below", "uniform")]
    + [(name, np.int32) for name in ("top_k", "fewest")]
)
Draws = np.ndarray[Any, np.dtype[np.void]]
"""How each of some rows is drawn from: an array of `DRAW`."""
Tokens = np.ndarray[Any, np.dtype[np.int32]]
NO_DRAW: Final = -1
UNSURE: Final = -2


class Library:
    """The loaded library, and how many threads its calls use."""

    lays_out: bool  # matrices; one that was built before it could leaves them to torch's operators

    def __init__(self, handle: ctypes.CDLL) -> None:
        self._handle = handle
        handle.us_instructions.restype = ctypes.c_char_p
        handle.us_available.restype = ctypes.c_char_p
        handle.us_use_instructions.argtypes = [ctypes.c_char_p]
        handle.us_scratch_bytes.argtypes = [ctypes.POINTER(CModel), *(ctypes.c_int32,) * 4]
        handle.us_scratch_bytes.restype = ctypes.c_int64
        handle.us_run.argtypes = [ctypes.POINTER(CModel), ctypes.POINTER(CJob), ctypes.c_int32]
        handle.us_run.restype = None
        handle.us_run_steps.argtypes = [*handle.us_run.argtypes[:2], ctypes.POINTER(CSteps), ctypes.c_int32]
        handle.us_run_steps.restype = None
        handle.us_encoder_bytes.argtypes = [ctypes.POINTER(CModel), *(ctypes.c_int32,) * 3]
        handle.us_encoder_bytes.restype = ctypes.c_int64
        handle.us_encode.argtypes = [ctypes.POINTER(CModel), ctypes.c_int32, *(ctypes.c_void_p,) * 3, ctypes.c_int32]
        handle.us_encode.restype = None
        handle.us_product_bytes.argtypes = [ctypes.POINTER(CMatrix), ctypes.c_int32]
        handle.us_product_bytes.restype = ctypes.c_int64
        handle.us_product.argtypes = [
            ctypes.POINTER(CMatrix),
            *(ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32),
        ]
        handle.us_product.restype = None
        handle.us_multiply_halves.argtypes = [
            *(ctypes.c_void_p, ctypes.c_void_p, *(ctypes.c_int32,) * 3),
            *(ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32),
        ]
        handle.us_attend_halves.argtypes = [ctypes.POINTER(CAttention), ctypes.c_void_p, ctypes.c_int32]
        handle.us_widen.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32]
        handle.us_widen.restype = None
        handle.us_read_rows.argtypes = [ctypes.POINTER(CMatrix), ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p]
        handle.us_read_rows.restype = None
        at = ctypes.c_void_p
        handle.us_keep_allowed.argtypes = [at, ctypes.c_int64, ctypes.c_int32, at, ctypes.c_int64, at]
        handle.us_keep_allowed.restype = None
        handle.us_raise_listed.argtypes = [*handle.us_keep_allowed.argtypes[:-1], ctypes.c_float, at, ctypes.c_int32]
        handle.us_raise_listed.restype = None
        handle.us_draw_rows.argtypes = [at, ctypes.c_int64, ctypes.c_int32, at, at, ctypes.c_int32]
        self.can_sum = hasattr(handle, "us_sum_bits")  # one that was built before has it not
        if self.can_sum:
            handle.us_sum_bits.argtypes = [at, at, *(ctypes.c_int32,) * 2, at, ctypes.c_int32]
            handle.us_sum_bits.restype = None
        handle.us_narrow_rows.argtypes = [at, *(ctypes.c_int32,) * 3, at]
        handle.us_sketch_rows.argtypes = [at, *(ctypes.c_int32,) * 2, at, at, at, ctypes.c_int64]
        handle.us_normalise_rows.argtypes = [at, ctypes.c_int64, ctypes.c_int32, at, ctypes.c_int32]
        handle.us_rank_rows.argtypes = [at, ctypes.c_int64, *(ctypes.c_int32,) * 3, at, at, ctypes.c_int32]
        self.lays_out = hasattr(handle, "us_lay_out_rows")
        if self.lays_out:
            handle.us_lay_out_rows.argtypes = [ctypes.POINTER(CRows), at, *(ctypes.c_int32,) * 3, at, ctypes.c_int32]
            handle.us_lay_out_rows.restype = None
            handle.us_quantise_rows.argtypes = [at, *(ctypes.c_int32,) * 3, at, at, at, ctypes.c_int32]
            handle.us_quantise_rows.restype = None
            handle.us_scan_rows.argtypes = [at, ctypes.c_int32, ctypes.c_int64]
        self.threads = count_threads()
        self.marks = Marks(handle, self.threads)
        self.run = handle.us_run
        self.run_steps = handle.us_run_steps

    @property
    def instructions(self) -> str:
        """The instruction set in use."""
        return str(self._handle.us_instructions().decode())

    @property
    def available(self) -> list[str]:
        """The instruction sets that this machine has, best first."""
        return str(self._handle.us_available().decode()).split(",")

    def use_instructions(self, name: str) -> None:
        """Choose an instruction set by name, for tests and comparisons."""
        if self._handle.us_use_instructions(name.encode()):
            raise SettingError(f"this machine has no {name!r} instructions; it has {', '.join(self.available)}")

    def count_scratch(self, model: CModel, num_tokens: int, num_read: int, most_keys: int) -> int:
        """Bytes of working memory for calls of up to `num_tokens` tokens, `num_read` of which go through the head, and
        none of which attends to more than `most_keys` keys."""
        return int(self._handle.us_scratch_bytes(ctypes.byref(model), num_tokens, num_read, self.threads, most_keys))

    def encode(self, model: CModel, states: torch.Tensor, lengths: Sequence[int]) -> None:
        """Make final states (tokens, hidden) of embeddings of sources that lie one behind the other, in their place."""
        counts = np.asarray(lengths, dtype=np.int32)
        bytes_needed = self._handle.us_encoder_bytes(ctypes.byref(model), len(states), self.threads, max(lengths))
        scratch = torch.empty(bytes_needed, dtype=torch.uint8)
        given = (ctypes.byref(model), len(counts), counts.ctypes.data, point(states), point(scratch))
        self._handle.us_encode(*given, self.threads)

    def multiply(self, matrix: CMatrix, x: torch.Tensor) -> torch.Tensor:
        """Rows times a matrix: (rows, matrix rows) float32."""
        if x.dim() != 2 or x.shape[1] != matrix.columns or x.dtype != torch.float32:
            raise SettingError(f"rows of {matrix.columns} float32 numbers are needed, not {list(x.shape)} {x.dtype}")
        x = x.contiguous()
        y = torch.empty(x.shape[0], matrix.rows)
        if not x.shape[0]:
            return y
        scratch = torch.empty(int(self._handle.us_product_bytes(ctypes.byref(matrix), x.shape[0])), dtype=torch.uint8)
        self._handle.us_product(ctypes.byref(matrix), point(x), x.shape[0], point(y), point(scratch), self.threads)
        return y

    def multiply_halves(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Rows times a matrix (out, in) plus a bias, all bfloat16 or all float16: (rows, out) of the same dtype. Sums
        are float32, and rounded once."""
        dtype, (num_rows, columns), (rows, inputs) = x.dtype, x.shape, weight.shape
        fits = bias is None or (bias.dtype == dtype and bias.shape == (rows,))
        if dtype not in NARROW or weight.dtype != dtype or inputs != columns or not fits:
            raise SettingError(
                f"rows {list(x.shape)} of {dtype} can't meet a {weight.dtype} matrix {list(weight.shape)} or its bias"
            )
        x, made = x.contiguous(), torch.empty(num_rows, rows, dtype=dtype)
        given = (point(weight), point(bias), number_kind(NARROW[dtype]), rows, columns, point(x), num_rows)
        if made.numel() and self._handle.us_multiply_halves(*given, point(made), self.threads):
            raise ResourceError(f"there is no memory for {num_rows} rows of {columns} numbers in float32")
        return made

    def attend_halves(
        self,
        queries: torch.Tensor,  # (rows, kv_heads, asked, width)
        keys: torch.Tensor,  # (rows, kv_heads, keys, width)
        values: torch.Tensor,
        mask: torch.Tensor | None,  # boolean (rows or 1, keys): what all queries of a row see
        scale: float,
    ) -> torch.Tensor:
        """What queries read of keys and values, all bfloat16 or all float16: (rows, kv_heads, asked, width) of the same
        dtype, computed in float32 and rounded once."""
        rows, heads, asked, width = queries.shape
        num_keys, dtype = keys.shape[2], queries.dtype
        expected = (rows, heads, num_keys, width)
        is_sound = (
            dtype in NARROW
            and keys.dtype == values.dtype == dtype
            and keys.shape == values.shape == expected
            and keys.stride(3) == values.stride(3) == 1
            and width % BLOCK == 0
            and num_keys
            and (mask is None or (mask.dtype == torch.bool and mask.shape in ((rows, num_keys), (1, num_keys))))
        )
        if not is_sound or keys.device.type != "cpu" or values.device.type != "cpu":
            raise SettingError(
                f"queries {list(queries.shape)} of {dtype} can't read keys {list(keys.shape)} of {keys.dtype} and "
                f"values {list(values.shape)} of {values.dtype}"
            )
        queries, seen = queries.contiguous(), None if mask is None else mask.contiguous()
        out = torch.empty_like(queries)
        described = CAttention(
            *(point(queries), keys.data_ptr(), values.data_ptr(), point(seen)),
            *(*keys.stride()[:3], *values.stride()[:3], 0 if seen is None or len(seen) == 1 else num_keys),
            *(number_kind(NARROW[dtype]), rows, heads, asked, num_keys, width, scale),
        )
        if out.numel() and self._handle.us_attend_halves(ctypes.byref(described), point(out), self.threads):
            raise ResourceError(f"there is no memory for the scores of {num_keys} keys")
        return out

    def widen(self, numbers: torch.Tensor) -> torch.Tensor:
        """Numbers of bfloat16 or float16 in float32."""
        if numbers.dtype not in NARROW:
            raise SettingError(f"numbers of {numbers.dtype} can't be widened; give bfloat16 or float16")
        given = numbers.contiguous()
        made = torch.empty(given.shape)
        kind = number_kind(NARROW[given.dtype])
        self._handle.us_widen(point(given), given.numel(), kind, point(made), self.threads)
        return made

    def sum_bits(self, flat: Sequence[torch.Tensor]) -> list[int]:
        """The sums of `kernels.bit_sums` over rows of numbers, all of as many bytes: 1, 2 or 4."""
        size = flat[0].element_size()
        if size not in (1, 2, 4) or any(one.element_size() != size or not one.is_contiguous() for one in flat):
            raise SettingError("sums are over contiguous numbers of 1, 2 or 4 bytes, all of one size")
        at = np.asarray([one.data_ptr() for one in flat], dtype=np.uint64)
        counts = np.asarray([one.numel() for one in flat], dtype=np.int64)
        sums = np.zeros(len(flat), dtype=np.int64)
        given = (at.ctypes.data, counts.ctypes.data, len(flat), size, sums.ctypes.data)
        self._handle.us_sum_bits(*given, self.threads)
        found: list[int] = sums.tolist()
        return found

    def narrow_rows(self, weight: torch.Tensor, out: torch.Tensor) -> bool:
        """Lay a float32 matrix out in tiles of out's dtype, bfloat16 or float16; whether every number is finite and
        none was rounded."""
        rows, columns = weight.shape
        fits = out.dtype in NARROW and out.nbytes == count_narrow_bytes(rows, columns)
        if weight.dtype != torch.float32 or not fits:
            raise SettingError(f"{out.nbytes} bytes of {out.dtype} are no place for {rows} rows of {columns} numbers")
        kind = number_kind(NARROW[out.dtype])
        return bool(self._handle.us_narrow_rows(point(weight), rows, columns, kind, point(out)))

    def sketch_rows(
        self, weight: torch.Tensor, inverses: torch.Tensor, tiles: torch.Tensor, reaches: torch.Tensor
    ) -> bool:
        """Make the sketch of a head's rows, (rows, columns) float32, whose columns are multiplied by powers of two:
        int8 tiles, and (2, rows) how far a logit may be off; whether all numbers are finite and none is too large."""
        rows, columns = weight.shape
        is_sound = (
            weight.dtype == inverses.dtype == reaches.dtype == torch.float32
            and tiles.nbytes == count_tile_bytes("int8", rows, columns)
            and inverses.shape == (columns,)
            and reaches.shape == (2, rows)
            and reaches.stride(1) == 1
        )
        if not is_sound:
            raise SettingError(f"{tiles.nbytes} bytes are no place for the sketch of {rows} rows of {columns} numbers")
        given = (point(weight), rows, columns, point(inverses), point(tiles), reaches.data_ptr(), reaches.stride(0))
        return bool(self._handle.us_sketch_rows(*given))

    def lay_out_rows(
        self, parts: ctypes.Array[CRows], order: torch.Tensor | None, shape: tuple[int, int], kind: AnyKind
    ) -> torch.Tensor:
        """The tiles (tiles, blocks, bytes) of a quantised matrix whose rows are those of parts, in an order (rows,)."""
        rows, columns = shape
        size, own = count_tile_bytes(kind, rows, columns), sum(part.rows for part in parts)
        is_sound = order is None and own == rows
        if order is not None and order.dtype == torch.int64 and order.shape == (rows,) and rows:
            is_sound = 0 <= int(order.min()) <= int(order.max()) < own
        if size is None or rows < 1 or not is_sound:
            raise SettingError(f"{own} rows can't become a {kind} matrix of {rows} rows and {columns} columns")
        tiles = torch.empty(size, dtype=torch.uint8)
        self._handle.us_lay_out_rows(parts, point(order), rows, columns, number_kind(kind), point(tiles), self.threads)
        num_tiles = -(-rows // TILE)
        return tiles.view(num_tiles, columns // count_columns(kind), -1)

    def quantise_rows(self, weight: torch.Tensor, kind: Kind) -> Blocks:
        """The nearest blocks to a float32 matrix, as `blocks.quantise_rows` rounds them."""
        rows, columns = weight.shape
        if weight.dtype != torch.float32 or columns % BLOCK:
            raise SettingError(f"{columns} columns of {weight.dtype} are not whole blocks of {BLOCK} float32 numbers")
        is_4 = kind == "int4"
        quants = torch.empty(rows, columns, dtype=torch.uint8 if is_4 else torch.int8)
        scales = torch.empty(rows, columns // BLOCK, dtype=torch.float16)
        minimums = torch.empty_like(scales) if is_4 else None
        made = (point(quants), point(scales), point(minimums))
        self._handle.us_quantise_rows(point(weight), rows, columns, number_kind(kind), *made, self.threads)
        return Blocks(quants, scales, minimums)

    def scan_rows(self, raw: torch.Tensor, form: int, count: int) -> int:
        """What the float16 of a file's blocks are, `count` of them; us_scan."""
        return int(self._handle.us_scan_rows(point(raw), form, count))

    def read_rows(self, matrix: CMatrix, rows: torch.Tensor) -> torch.Tensor:
        """Rows of a matrix as numbers: (count, columns) float32."""
        index = rows.to(torch.int32).contiguous()
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < matrix.rows:
            raise SettingError(f"rows from {int(index.min())} to {int(index.max())} of a matrix of {matrix.rows}")
        out = torch.empty(index.numel(), matrix.columns)
        self._handle.us_read_rows(ctypes.byref(matrix), point(index), index.numel(), point(out))
        return out

    def draw_rows(self, scores: torch.Tensor, draws: Draws) -> torch.Tensor:
        """The tokens (rows,) int32 that are drawn from scores (rows, vocab) as `draws` (rows,) say; `NO_DRAW` where no
        score is finite, or one is NaN or infinite, `UNSURE` where rounding decides what top-p leaves."""
        tokens = np.full(len(scores), NO_DRAW, dtype=np.int32)
        self.draw_into(scores, draws, tokens)
        return torch.from_numpy(tokens)

    def draw_into(self, scores: torch.Tensor, draws: Draws, tokens: Tokens) -> None:
        """The same, written to `tokens` (rows,)."""
        given = scores.contiguous()
        rows, vocab = given.shape
        if given.dtype != torch.float32 or draws.dtype != DRAW or not draws.shape == tokens.shape == (rows,):
            raise SettingError(f"{len(draws)} draws can't be made from scores {list(scores.shape)} of {scores.dtype}")
        places = (given.data_ptr(), rows, vocab, draws.ctypes.data, tokens.ctypes.data)
        if rows and vocab and self._handle.us_draw_rows(*places, self.threads):
            raise ResourceError("there is no memory for a draw from the scores")

    def normalise_rows(self, scores: torch.Tensor) -> torch.Tensor | None:
        """The log-probabilities of scores (rows, vocab) float32; None if a row has no finite score, or one that is NaN
        or infinite."""
        given = scores.contiguous()
        if given.dtype != torch.float32 or given.dim() != 2:
            raise SettingError(f"scores {list(scores.shape)} of {scores.dtype} can't be normalised")
        out = torch.empty_like(given)
        is_sound = not given.numel() or not self._handle.us_normalise_rows(
            point(given), *given.shape, point(out), self.threads
        )
        return out if is_sound else None

    def rank_rows(self, scores: torch.Tensor, count: int, *, normalises: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The `count` highest of scores (rows, vocab) float32, falling, of equals the earlier token first; or if it
        normalises, their log-probabilities. Values and tokens are (rows, count); a row's first token is -1 where fewer
        scores are finite, or one is NaN or infinite."""
        given = scores.contiguous()
        if given.dtype != torch.float32 or given.dim() != 2 or not 1 <= count <= given.shape[1]:
            raise SettingError(f"{count} of scores {list(scores.shape)} of {scores.dtype} can't be ranked")
        values = torch.empty(len(given), count)
        tokens = torch.empty(len(given), count, dtype=torch.int32)
        if given.numel():
            found = (point(values), point(tokens), self.threads)
            if self._handle.us_rank_rows(point(given), *given.shape, count, int(normalises), *found):
                raise ResourceError("there is no memory for the ranks of the scores")
        return values, tokens.long()

    def keep_allowed(self, scores: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
        """Scores (rows, vocab), -inf where a token's bit in (rows, words) is not set."""
        given, words = _check_bits(scores, bits)
        out = torch.empty_like(given)
        if out.numel():
            self._handle.us_keep_allowed(point(given), *given.shape, point(words), words.shape[1], point(out))
        return out

    def raise_listed(self, scores: torch.Tensor, bits: torch.Tensor, bias: float) -> torch.Tensor:
        """Scores (rows, vocab), more by `bias` where a token's bit in (rows, words) is set."""
        given, words = _check_bits(scores, bits)
        out = torch.empty_like(given)
        if out.numel():
            found = (point(words), words.shape[1], bias, point(out), self.threads)
            self._handle.us_raise_listed(point(given), *given.shape, *found)
        return out


def _check_bits(scores: torch.Tensor, bits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores (rows, vocab) and words of 32 bits for them, as the library reads both."""
    rows, vocab = scores.shape
    if scores.dtype != torch.float32 or bits.dtype != torch.int32 or bits.shape != (rows, (vocab + 31) // 32):
        raise SettingError(f"masks {list(bits.shape)} of {bits.dtype} don't fit scores {list(scores.shape)}")
    return scores.contiguous(), bits.contiguous()


def count_threads() -> int:
    """How many threads calls use: UNSPOOL_NUM_THREADS, or the cores that this process and its container may use."""
    asked = os.environ.get("UNSPOOL_NUM_THREADS")
    if asked:
        if not asked.isascii() or not asked.isdecimal() or not 1 <= int(asked[:9]) <= MOST_THREADS:
            raise SettingError(f"UNSPOOL_NUM_THREADS={asked[:40]!r} is no number from 1 to {MOST_THREADS}")
        return int(asked)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    usable = min(usable, count_allowed() or usable)
    return max(1, min(usable, torch.get_num_threads(), MOST_THREADS))  # torch knows physical cores


@lru_cache(maxsize=1)
def _open() -> tuple[Library | None, str]:
    asked = os.environ.get(SWITCH, "")
    if asked == "off":
        return None, f"{SWITCH}=off"
    if not FILE.is_file():
        return None, f"it was not built: {FILE.name} is missing (python -m unspool.kernels.cpu.build makes it)"
    try:
        handle = ctypes.CDLL(str(FILE))
        if handle.us_abi() != ABI:
            reason = f"{FILE.name} is of another version; build it again (python -m unspool.kernels.cpu.build)"
            warnings.warn(f"steps on the CPU are many times slower: {reason}", RuntimeWarning, stacklevel=3)
            return None, reason
        library = Library(handle)
    except (OSError, AttributeError) as error:
        return None, f"{FILE.name} can't be loaded: {error}"
    if asked:
        library.use_instructions(asked)
    return library, ""


def find_library() -> Library | None:
    """The library, if it was built for this machine and is not switched off."""
    return _open()[0]


def find_marks() -> Marks | None:
    """The library's calls for watermarks, if there is a library."""
    library = find_library()
    return None if library is None else library.marks


def why_missing() -> str:
    """Why there is no library; empty if there is one."""
    return _open()[1]
