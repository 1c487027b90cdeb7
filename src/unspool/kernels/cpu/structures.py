"""The library's structs, named after the C header's (`us_matrix` is `CMatrix`), and checked descriptions of tensors."""

from __future__ import annotations

import ctypes
from typing import Final, Literal, get_args

import torch

from unspool.errors import SettingError
from unspool.kernels import packing
from unspool.kernels.cpu.blocks import BLOCK
from unspool.kernels.cpu.supers import AnyKind
from unspool.kernels.cpu.tables import TABLE_KINDS
from unspool.kernels.cpu.tiles import TILE, count_tile_bytes

_NAMES: Final = (
    "float32",
    "int8",
    "int4",
    "q4_k",
    "q5_k",
    "q6_k",
    "q5",
    "bfloat16",
    "float16",
    "nf4",
    "fp4",
)  # us_kind
_KINDS: Final = {name: number for number, name in enumerate(_NAMES)}
FloatKind = Literal["float32", "bfloat16", "float16"]
"""Kinds whose activations are not rounded."""
_FLOATS: Final = frozenset(get_args(FloatKind))
NARROW: Final[dict[torch.dtype, FloatKind]] = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
"""Dtypes of exact copies, and what the library calls them; the first one that is exact is taken."""
PANEL: Final = 16  # output rows of a tile of numbers of 16 bits; US_PANEL
_SCALES: Final = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}


class CMatrix(ctypes.Structure):
    """us_matrix."""

    _fields_ = [
        ("kind", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("columns", ctypes.c_int32),
        ("own", ctypes.c_int32),
        ("data", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("rest", ctypes.c_void_p),
    ]


class CNorm(ctypes.Structure):
    """us_norm."""

    _fields_ = [
        ("kind", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    ]


class CLayer(ctypes.Structure):
    """us_layer."""

    _fields_ = [
        *((name, CNorm) for name in ("attn_norm", "ffn_norm", "post_attn_norm", "post_ffn_norm", "q_norm", "k_norm")),
        *((name, ctypes.c_int32) for name in ("has_ffn_norm", "has_post_norms", "head_norm", "window")),
        *((name, CMatrix) for name in ("qkv", "out", "up", "down")),
        ("rope", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        ("is_halved", ctypes.c_int32),
        ("cross_norm", CNorm),
        ("cross_q", CMatrix),
        ("cross_out", CMatrix),
        ("biases", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("is_mixed", "unused2")),
        *((name, CMatrix) for name in ("router", "shared_up", "shared_down")),
        *((name, ctypes.c_void_p) for name in ("shared_gate", "choice_bias")),
    ]


class CSketch(ctypes.Structure):
    """us_sketch."""

    _fields_ = [
        ("matrix", CMatrix),
        ("powers", ctypes.c_void_p),
        ("reaches", ctypes.c_void_p),
        ("margin", ctypes.c_float),
        ("unused", ctypes.c_int32),
    ]


class CModel(ctypes.Structure):
    """us_model."""

    _fields_ = [
        *(
            (name, ctypes.c_int32)
            for name in ["num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim", "ffn", "vocab", "rope_width"]
        ),
        *((name, ctypes.c_int32) for name in ("is_parallel", "is_gated", "activation", "has_embedding_norm")),
        *((name, ctypes.c_float) for name in ("embedding_scale", "attention_cap", "logit_cap", "head_scale")),
        *((name, ctypes.c_int32) for name in ("is_post", "has_cross", "num_distances")),
        *((name, ctypes.c_int32) for name in ("num_experts", "num_chosen", "expert_ffn", "shared_ffn")),
        *((name, ctypes.c_int32) for name in ("is_sigmoid", "is_normalised")),
        *((name, ctypes.c_float) for name in ("weight_scale", "gate_gain", "gate_limit")),
        ("embedding", CMatrix),
        ("head", CMatrix),
        ("sketch", CSketch),
        ("embedding_norm", CNorm),
        ("final_norm", CNorm),
        ("positions", ctypes.c_void_p),
        ("slopes", ctypes.c_void_p),
        ("layers", ctypes.POINTER(CLayer)),
    ]


class CRows(ctypes.Structure):
    """us_rows."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("form", "rows")),
        *((name, ctypes.c_void_p) for name in ("data", "scales", "minimums")),
    ]


class CStore(ctypes.Structure):
    """us_store."""

    _fields_ = [
        ("layers", ctypes.c_void_p),
        ("row_stride", ctypes.c_int64),
        ("position_stride", ctypes.c_int64),
        ("rooms", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("width", ctypes.c_int32),
        ("block", ctypes.c_int32),
        ("is_half", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    ]


class CScheme(ctypes.Structure):
    """us_scheme."""

    _fields_ = [(name, ctypes.c_int32) for name in ("bits", "bytes", "by_channel", "block", "group", "dtype")]


class CPacking(ctypes.Structure):
    """us_packing."""

    _fields_ = [("keys", CScheme), ("values", CScheme)]


class CPacked(ctypes.Structure):
    """us_packed."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("codes", "scales", "zeros")]


class CPackedLayer(ctypes.Structure):
    """us_packed_layer."""

    _fields_ = [
        ("keys", CPacked),
        ("values", CPacked),
        ("places", ctypes.c_int64),
        ("slides", ctypes.c_int32),
        ("width", ctypes.c_int32),
        ("table", ctypes.c_void_p),
    ]


class CJob(ctypes.Structure):
    """us_job."""

    _fields_ = [
        ("num_tokens", ctypes.c_int32),
        ("num_wanted", ctypes.c_int32),
        ("most_keys", ctypes.c_int32),
        ("num_early", ctypes.c_int32),
        *(
            (name, ctypes.c_void_p)
            for name in ["tokens", "positions", "own_rows", "own_places", "shared_rows", "shared_counts", "wanted"]
        ),
        ("bases", ctypes.c_void_p),
        ("firsts", ctypes.c_void_p),
        ("early", ctypes.c_void_p),
        ("own", CStore),
        ("shared", CStore),
        ("packing", CPacking),
        ("packed", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
        ("likeliest", ctypes.c_void_p),
        ("early_states", ctypes.c_void_p),
        ("states", ctypes.c_void_p),
        ("cross", CStore),
        ("sources", ctypes.c_void_p),
        ("source_lengths", ctypes.c_void_p),
        ("most_source", ctypes.c_int32),
        ("num_forbidden", ctypes.c_int32),
        ("forbidden", ctypes.c_void_p),
        ("num_close", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
    ]


class CAttention(ctypes.Structure):
    """us_attention."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("queries", "keys", "values", "mask")),
        *((name, ctypes.c_int64) for name in ("key_row", "key_head", "key_place")),
        *((name, ctypes.c_int64) for name in ("value_row", "value_head", "value_place", "mask_row")),
        *((name, ctypes.c_int32) for name in ("kind", "rows", "heads", "asked", "num_keys", "width")),
        ("scale", ctypes.c_float),
        ("unused", ctypes.c_int32),
    ]


class CSteps(ctypes.Structure):
    """us_steps."""

    _fields_ = [
        ("num_steps", ctypes.c_int32),
        ("num_ends", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("ends", "tokens", "positions", "own_places", "chosen")),
        ("num_done", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    ]


def point(tensor: torch.Tensor | None) -> int | None:
    """The address of a contiguous tensor."""
    if tensor is None:
        return None
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    return tensor.data_ptr()


def number_kind(kind: AnyKind | FloatKind) -> int:
    """The number of a kind of matrices; us_kind."""
    return _KINDS[kind]


def count_narrow_bytes(rows: int, columns: int) -> int | None:
    """The bytes of a matrix of numbers of 16 bits; None if its columns are not whole tiles."""
    return None if columns % BLOCK else 2 * -(-rows // PANEL) * PANEL * columns


def _count_bytes(kind: AnyKind | FloatKind, rows: int, columns: int) -> int | None:
    if kind == "float32":
        return 4 * rows * columns
    if kind == "bfloat16" or kind == "float16":
        return count_narrow_bytes(rows, columns)
    return count_tile_bytes(kind, rows, columns)


def describe_matrix(
    data: torch.Tensor,
    bias: torch.Tensor | None,
    kind: AnyKind | FloatKind,
    rows: int,
    columns: int,
    rest: CMatrix | None = None,
) -> CMatrix:
    """The C struct of a matrix; its size in bytes must match its shape exactly.

    The last of the rows may be `rest`'s: of another quantised kind, and kept alive by the caller.
    """
    own = rows - (rest.rows if rest is not None else 0)
    if own < 1 or columns < 1 or data.nbytes != _count_bytes(kind, rows if kind in _FLOATS else own, columns):
        raise SettingError(f"{data.nbytes} bytes are no {kind} matrix of {own} rows and {columns} columns")
    if bias is not None and (bias.dtype != torch.float32 or bias.numel() != rows):
        raise SettingError(f"a bias of {bias.numel()} numbers does not fit {rows} rows")
    if rest is None:
        return CMatrix(_KINDS[kind], rows, columns, own, point(data), point(bias), None)
    if own % TILE or rest.columns != columns or rest.bias or {kind, _NAMES[rest.kind]} & (_FLOATS | {*TABLE_KINDS}):
        raise SettingError(
            f"a {_NAMES[rest.kind]} matrix of {rest.columns} columns can't follow {own} rows of a {kind} matrix of "
            f"{columns} columns"
        )
    return CMatrix(_KINDS[kind], rows, columns, own, point(data), point(bias), ctypes.addressof(rest))


def describe_scheme(scheme: packing.Scheme) -> CScheme:
    """The C struct of a packing scheme."""
    dtype = _SCALES[scheme.dtype]
    return CScheme(scheme.nbits, scheme.num_bytes, int(scheme.by_channel), scheme.block, scheme.group, dtype)


def describe_packed(packed: packing.Packed, rows: int, heads: int) -> CPacked:
    """The C struct of packed numbers; their sizes must match the scheme exactly."""
    scheme, places = packed.scheme, packed.num_positions
    shape = (packed.codes.shape[0], heads, *scheme.scales_of(places))
    is_sound = (
        packed.codes.shape == (packed.codes.shape[0], heads, places, scheme.num_bytes)
        and packed.codes.shape[0] >= rows
        and places % scheme.block == 0
        and scheme.width % scheme.group == 0
        and scheme.nbits in packing.BITS
        and packed.codes.dtype == torch.uint8
        and packed.scale.shape == packed.zero.shape == shape
        and packed.scale.dtype == packed.zero.dtype == scheme.dtype
    )
    if not is_sound:
        raise SettingError(
            f"codes {list(packed.codes.shape)} and scales {list(packed.scale.shape)} are not {rows} rows of {heads} "
            f"heads packed as {scheme}"
        )
    return CPacked(*map(point, packed.tensors()))
