"""GGUF's super-blocks: the file's numbers to the bit, and products straight from them."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unspool.errors import LoadError, SettingError
from unspool.kernels.cpu import (
    BLOCK,
    AnyKind,
    Library,
    SuperBlocks,
    join_blocks,
    pack_tiles,
    quantise_rows,
    read_supers,
    unpack_tiles,
)
from unspool.kernels.cpu.structures import CMatrix, describe_matrix
from unspool.kernels.cpu.supers import SUPER, SUPER_BYTES

SIZES = {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210, "Q5_0": 22, "Q5_1": 24}  # bytes in a file
STORED = tuple(SIZES)
HALVES = {"Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "Q5_0": [0], "Q5_1": [0, 2]}  # where the float16 are


def make_raw(stored: str, rows: int, columns: int, seed: int, scale: float = 3e-3) -> torch.Tensor:
    """Random bytes with sound scales: (bytes,) uint8."""
    generator = torch.Generator().manual_seed(seed)
    count = rows * columns // (SUPER if stored.endswith("_K") else BLOCK)
    raw = torch.randint(0, 256, (count, SIZES[stored]), generator=generator, dtype=torch.uint8)
    for at in HALVES[stored]:
        sizes = scale * (0.5 + torch.rand(count, 1, generator=generator))
        raw[:, at : at + 2] = sizes.half().view(torch.uint8)
    return raw.flatten()


def make(stored: str, rows: int, columns: int, seed: int, scale: float = 3e-3) -> SuperBlocks:
    found = read_supers(make_raw(stored, rows, columns, seed, scale), stored, (rows, columns))
    assert found is not None
    return found


@pytest.mark.parametrize("scale", [3e-3, 6e-8, 900.0])
@pytest.mark.parametrize("stored", STORED)
def test_numbers_are_the_files_to_the_bit(library: Library, stored: str, scale: float) -> None:
    raw = make_raw(stored, 11, 512, 1, scale)
    blocks = read_supers(raw, stored, (11, 512))
    assert blocks is not None
    kind = gguf.GGMLQuantizationType[stored]
    reference = torch.from_numpy(gguf.dequantize(raw.numpy().reshape(11, -1), kind).astype(np.float32))
    assert torch.equal(blocks.dequantise(), reference)
    tiles = pack_tiles(blocks)
    matrix = describe_matrix(tiles, None, blocks.kind, 11, 512)
    for name in library.available:
        library.use_instructions(name)
        assert torch.equal(library.read_rows(matrix, torch.arange(11)), reference), name


@settings(max_examples=30)
@given(rows=st.integers(1, 20), supers=st.integers(1, 3), stored=st.sampled_from(STORED), seed=st.integers(0, 99))
def test_tiles_hold_what_was_packed_and_no_more(rows: int, supers: int, stored: str, seed: int) -> None:
    made = make(stored, rows, supers * SUPER, seed)
    tiles = pack_tiles(made)
    assert tiles.numel() == -(-rows // 8) * 8 * made.headers.shape[1] * SUPER_BYTES[made.kind]
    assert SUPER_BYTES[made.kind] == SIZES[stored] or stored == "Q5_0"
    back = unpack_tiles(tiles, made.kind, rows)
    assert isinstance(back, SuperBlocks)
    assert torch.equal(back.codes, made.codes) and torch.equal(back.headers, made.headers)


def bound(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """How far int8 activations may be off: half a step of the block's largest, times the weights' length."""
    steps = x.view(x.shape[0], -1, BLOCK).abs().amax(-1) / 127
    return (steps.repeat_interleave(BLOCK, 1) * 0.51) @ weight.abs().T + 1e-5 * (x.abs() @ weight.abs().T)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    stored=st.sampled_from(STORED),
    rows=st.integers(1, 40),
    supers=st.integers(1, 3),
    num_rows=st.integers(1, 11),
    seed=st.integers(0, 1000),
    threads=st.integers(1, 3),
)
def test_products_agree_with_torch(
    library: Library, stored: str, rows: int, supers: int, num_rows: int, seed: int, threads: int
) -> None:
    blocks = make(stored, rows, supers * SUPER, seed)
    weight, tiles = blocks.dequantise(), pack_tiles(blocks)
    x = torch.randn(num_rows, supers * SUPER, generator=torch.Generator().manual_seed(seed))
    matrix = describe_matrix(tiles, None, blocks.kind, rows, supers * SUPER)
    library.threads = threads
    for name in library.available:
        library.use_instructions(name)
        off = (library.multiply(matrix, x) - x.double() @ weight.double().T).abs()
        assert (off <= bound(x, weight)).all(), name


@pytest.mark.parametrize("stored", STORED)
def test_products_of_whole_numbers_are_exact(library: Library, stored: str) -> None:
    """Activations that int8 holds exactly leave nothing but the rounding of float32."""
    blocks = make(stored, 24, 512, 3)
    weight, tiles = blocks.dequantise().double(), pack_tiles(blocks)
    x = torch.randint(-127, 128, (9, 512), generator=torch.Generator().manual_seed(4)).float()
    x[:, ::BLOCK] = 127
    matrix = describe_matrix(tiles, None, blocks.kind, 24, 512)
    for name in library.available:
        library.use_instructions(name)
        off = (library.multiply(matrix, x) - x.double() @ weight.T).abs()
        assert (off <= 1e-6 * (x.double().abs() @ weight.T.abs())).all(), name


def make_mixed(kinds: tuple[str, ...], rows: tuple[int, ...], columns: int) -> tuple[CMatrix, torch.Tensor, object]:
    """A matrix of parts of several kinds with a bias, the numbers that it stands for, and what must be kept alive."""
    numbers: list[torch.Tensor] = []
    kept: list[object] = []
    matrix: CMatrix | None = None
    bias = torch.randn(sum(rows), generator=torch.Generator().manual_seed(8))
    below = 0
    for place in reversed(range(len(kinds))):
        stored = kinds[place]
        plain = torch.randn(rows[place], columns, generator=torch.Generator().manual_seed(place))
        blocks = make(stored, rows[place], columns, place) if stored in STORED else quantise_rows(plain, stored)
        below += rows[place]
        tiles = pack_tiles(blocks)
        matrix = describe_matrix(tiles, bias if place == 0 else None, blocks.kind, below, columns, matrix)
        kept += [tiles, matrix]
        numbers.insert(0, blocks.dequantise())
    assert matrix is not None
    return matrix, torch.cat(numbers), (kept, bias)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    "kinds", [("Q4_K",), ("Q5_K",), ("Q6_K",), ("Q4_K", "int8", "Q6_K"), ("Q6_K", "Q5_1"), ("int4", "int8")]
)
def test_a_row_alone_is_a_row_in_a_batch(library: Library, kinds: tuple[str, ...], threads: int) -> None:
    """To the bit, whatever the number of rows makes of panels, where kinds meet, and at a matrix's uneven end."""
    rows = {1: (93,), 2: (40, 53), 3: (24, 40, 29)}[len(kinds)]
    matrix, weight, kept = make_mixed(kinds, rows, 512)
    x = torch.randn(34, 512, generator=torch.Generator().manual_seed(1))
    expected = x.double() @ weight.double().T + kept[1]
    library.threads = threads
    for name in library.available:
        library.use_instructions(name)
        alone = torch.cat([library.multiply(matrix, row[None]) for row in x])
        assert ((alone - expected).abs() <= bound(x, weight) + 1e-4).all(), name
        for count in (*range(2, 18), 23, 34):
            assert torch.equal(library.multiply(matrix, x[:count]), alone[:count]), (name, count)


@pytest.mark.parametrize("scale", [3e-3, 1e-5, 6e-8])
def test_q4_k_simplified_keeps_its_codes_and_rounds_its_scales(scale: float) -> None:
    made = make("Q4_K", 6, 512, 2, scale)
    blocks = made.simplify()
    assert blocks is not None and blocks.minimums is not None
    off = (blocks.dequantise() - made.dequantise()).abs().view(6, -1, BLOCK).amax(-1)
    assert (off <= (15 * blocks.scales.float() + blocks.minimums.float().abs()) / 2000).all()


def test_what_can_not_be_simplified() -> None:
    assert make("Q4_K", 2, 256, 0, 5e3).simplify() is None  # its scales overflow
    assert all(make(stored, 2, 256, 0).simplify() is None for stored in ("Q5_K", "Q6_K", "Q5_1"))


def test_q5_0_simplified_is_exact() -> None:
    made = make("Q5_0", 4, 64, 0)
    blocks = made.simplify()
    assert blocks is not None and blocks.kind == "int8" and torch.equal(blocks.dequantise(), made.dequantise())
    assert read_supers(make_raw("Q5_0", 4, 64, 0, 2e4), "Q5_0", (4, 64)) is None  # its minimums overflow


def test_other_formats_have_no_supers() -> None:
    assert read_supers(torch.zeros(34, dtype=torch.uint8), "Q8_0", (1, 32)) is None
    assert read_supers(torch.zeros(144, dtype=torch.uint8), "Q4_K", (256,)) is None


@pytest.mark.parametrize("stored", STORED)
def test_rows_can_be_joined_and_reordered(stored: str) -> None:
    upper, lower = make(stored, 3, 256, 1), make(stored, 5, 256, 2)
    order = torch.tensor([7, 0, 3, 1, 2, 4, 5, 6])
    joined = join_blocks([upper, lower]).select_rows(order)
    assert torch.equal(joined.dequantise(), torch.cat([upper.dequantise(), lower.dequantise()])[order])


def test_kinds_that_do_not_fit_are_refused() -> None:
    with pytest.raises(LoadError, match="q4_k and q6_k"):
        join_blocks([make("Q4_K", 3, 256, 1), make("Q6_K", 3, 256, 1)])
    tiles = pack_tiles(make("Q6_K", 8, 256, 1))
    six = describe_matrix(tiles, None, "q6_k", 8, 256)
    kind: AnyKind = "q4_k"
    with pytest.raises(SettingError, match="no q4_k matrix"):
        describe_matrix(tiles, None, kind, 8, 256)
    with pytest.raises(SettingError, match="no q6_k matrix"):
        describe_matrix(tiles, None, "q6_k", 8, 128)
    four = pack_tiles(make("Q4_K", 3, 256, 1))
    with pytest.raises(SettingError, match="can't follow 3 rows"):
        describe_matrix(four, None, kind, 11, 256, six)
    with pytest.raises(SettingError, match="can't follow 8 rows of a float32"):
        describe_matrix(torch.zeros(16, 256), None, "float32", 16, 256, six)
