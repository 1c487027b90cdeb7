"""The library lays matrices out, and quantises, to the bit as torch's operators do."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unspool.errors import LoadError, SettingError
from unspool.kernels.cpu import (
    AnyBlocks,
    AnyRows,
    Kind,
    Library,
    RawBlocks,
    find_layouts,
    join_blocks,
    join_rows,
    lay_out,
    pack_tiles,
    quantise,
    quantise_rows,
    read_blocks,
    read_plain,
    read_stored,
    read_supers,
    unpack_tiles,
)

BYTES = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210}
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
KINDS: tuple[Kind, ...] = ("int8", "int4")
# A library that was built before it could lay matrices out is skipped here.
pytestmark = pytest.mark.skipif(find_layouts() is None, reason="no CPU library that lays matrices out")
shared = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def count_columns(stored: str) -> int:
    return 256 if stored.endswith("_K") else 32


def make_raw(stored: str, rows: int, blocks: int, seed: int, *, most: int = 0x7C00) -> torch.Tensor:
    """Random bytes, whose float16 are any finite ones whose bits are below `most`, of both signs: (bytes,) uint8."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (rows * blocks, BYTES[stored]), generator=generator, dtype=torch.uint8)
    for at in HALVES.get(stored, (0,)):
        bits = torch.randint(0, most, (rows * blocks, 1), generator=generator).to(torch.int16)
        signs = torch.randint(0, 2, (rows * blocks, 1), generator=generator).to(torch.int16) << 15
        raw[:, at : at + 2] = (bits | signs).view(torch.uint8)
    return raw.flatten()


def read(raw: torch.Tensor, stored: str, shape: tuple[int, ...]) -> AnyBlocks:
    """The reference."""
    found = read_supers(raw, stored, shape) or read_blocks(raw, stored, shape)
    assert found is not None
    return found


@shared
@given(
    stored=st.sampled_from(sorted(BYTES)),
    rows=st.lists(st.integers(1, 21), min_size=1, max_size=3),
    blocks=st.integers(1, 4),
    is_ordered=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_a_files_blocks_are_laid_out_as_torch_does(
    library: Library, stored: str, rows: list[int], blocks: int, is_ordered: bool, seed: int
) -> None:
    columns = blocks * count_columns(stored)
    raws = [make_raw(stored, count, blocks, seed + n, most=0x4000) for n, count in enumerate(rows)]
    found: list[AnyRows] = []
    for raw, count in zip(raws, rows, strict=True):
        part = read_stored(library, raw, stored, (count, columns))
        assert part is not None
        found.append(part)
    plain = join_blocks([read(raw, stored, (count, columns)) for raw, count in zip(raws, rows, strict=True)])
    made = join_rows(found)
    if is_ordered:
        order = torch.randperm(sum(rows), generator=torch.Generator().manual_seed(seed))
        made, plain = made.select_rows(order).select_rows(order.flip(0)), plain.select_rows(order[order.flip(0)])
    assert made.kind == plain.kind and made.shape == plain.shape
    assert torch.equal(lay_out(made), pack_tiles(plain))
    assert torch.equal(lay_out(plain), pack_tiles(plain))  # plain blocks, through the library too
    assert torch.equal(pack_tiles(read_plain(made)), pack_tiles(plain))


@pytest.mark.parametrize("stored", sorted(BYTES))
def test_every_float16_of_a_file(library: Library, stored: str) -> None:
    """Subnormal ones, zeros of both signs and infinities; minimums that overflow change the kind, or refuse it."""
    every = torch.arange(1 << 16, dtype=torch.int32)
    every = every[(every & 0x7FFF) <= 0x7C00].to(torch.int16)
    for halves in (every[(every & 0x7FFF) < 0x4C00], every):
        count = len(halves) // 16 * 16
        raw = make_raw(stored, count, 1, 3).view(count, -1).clone()
        for at in HALVES.get(stored, (0,)):
            raw[:, at : at + 2] = halves[:count, None].view(torch.uint8)
        shape = (16, count // 16 * count_columns(stored))
        found = read_stored(library, raw.flatten(), stored, shape)
        plain = read_supers(raw.flatten(), stored, shape) or read_blocks(raw.flatten(), stored, shape)
        assert (found is None) == (plain is None)
        if found is not None and plain is not None:
            assert found.kind == plain.kind and torch.equal(lay_out(found), pack_tiles(plain))


def test_a_minimum_beside_a_finite_scale_may_not_overflow(library: Library) -> None:
    raw = make_raw("Q5_1", 8, 1, 0).view(8, -1)
    raw[3, 2:4] = torch.tensor([0x7C00], dtype=torch.int16).view(torch.uint8)
    assert read_stored(library, raw.flatten(), "Q5_1", (8, 32)) is None
    assert read_supers(raw.flatten(), "Q5_1", (8, 32)) is None


@pytest.mark.parametrize("stored", sorted(BYTES))
def test_nan_is_seen(library: Library, stored: str) -> None:
    for at in HALVES.get(stored, (0,)):
        raw = make_raw(stored, 8, 2, 0).view(16, -1)
        raw[13, at : at + 2] = torch.tensor([0x7C01], dtype=torch.int16).view(torch.uint8)
        with pytest.raises(FloatingPointError):
            read_stored(library, raw.flatten(), stored, (8, 2 * count_columns(stored)))


def test_matrices_of_three_dimensions_stand_one_below_the_other(library: Library) -> None:
    raw = make_raw("Q4_K", 12, 2, 5)
    found = read_stored(library, raw, "Q4_K", (3, 4, 512))
    assert found is not None and found.shape == (12, 512)
    assert torch.equal(lay_out(found), pack_tiles(read(raw, "Q4_K", (3, 4, 512))))


@pytest.mark.parametrize(("stored", "shape"), [("F16", (2, 32)), ("Q8_0", (64,)), ("Q4_K", (8, 32)), ("Q8_0", (8, 40))])
def test_what_has_no_blocks(library: Library, stored: str, shape: tuple[int, ...]) -> None:
    assert read_stored(library, torch.zeros(4096, dtype=torch.uint8), stored, shape) is None


@shared
@given(
    kind=st.sampled_from(KINDS),
    rows=st.integers(1, 20),
    blocks=st.integers(1, 5),
    scale=st.sampled_from([1e-40, 1e-9, 3e-6, 1e-3, 1.0, 300.0, 6e4, 1e6, 1e30]),
    shift=st.sampled_from([0.0, 0.0, 1.0, -3.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 10_000),
)
def test_quantising_rounds_as_torch_does(
    library: Library,
    kind: Kind,
    rows: int,
    blocks: int,
    scale: float,
    shift: float,
    dtype: torch.dtype,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = (scale * (torch.randn(rows, 32 * blocks, generator=generator) + shift)).to(dtype)
    weight = weight.nan_to_num(posinf=1.0, neginf=1.0)
    weight[torch.rand(weight.shape, generator=generator) < 0.1] = 0.0
    weight[0, :32] = weight[0, 0]
    made, expected = quantise(weight, kind), quantise_rows(weight, kind)
    assert torch.equal(made.scales.view(torch.int16), expected.scales.view(torch.int16))
    if expected.scales.isfinite().all():
        assert torch.equal(made.quants, expected.quants)
    assert (made.minimums is None) == (expected.minimums is None)
    if made.minimums is not None and expected.minimums is not None:
        assert torch.equal(made.minimums.view(torch.int16), expected.minimums.view(torch.int16))
    assert torch.equal(lay_out(made), pack_tiles(made))


def test_halves_between_two_whole_numbers_go_to_the_even_one(library: Library) -> None:
    weight = torch.arange(-63, 64, dtype=torch.float32).repeat(2)[: 7 * 32].view(7, 32) + 0.5
    weight[:, 0] = 127.0
    assert torch.equal(quantise(weight, "int8").quants, quantise_rows(weight, "int8").quants)


def test_large_matrices_are_shared_out(library: Library) -> None:
    weight = torch.randn(1003, 1024, generator=torch.Generator().manual_seed(0))
    for library.threads in (1, 2, 3):
        for kind in KINDS:
            made, expected = quantise(weight, kind), quantise_rows(weight, kind)
            assert torch.equal(made.quants, expected.quants) and torch.equal(made.scales, expected.scales)
            assert torch.equal(lay_out(made), pack_tiles(expected))


def test_parts_of_several_origins_make_one_matrix(library: Library) -> None:
    raw = make_raw("Q8_0", 5, 2, 1, most=0x3000)
    found = read_stored(library, raw, "Q8_0", (5, 64))
    other = quantise(torch.randn(4, 64, generator=torch.Generator().manual_seed(1)), "int8")
    assert found is not None
    moved = found.select_rows(torch.tensor([4, 2, 0, 1, 3]))
    made, plain = join_rows([found, other, moved]), join_blocks([read_plain(found), other, read_plain(moved)])
    assert isinstance(made, RawBlocks)
    assert torch.equal(lay_out(made), pack_tiles(plain))
    back = unpack_tiles(lay_out(made), "int8", 14)
    assert torch.equal(back.dequantise(), plain.dequantise())


def test_without_the_library_torch_does_it(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = make_raw("Q6_K", 9, 1, 2)
    found = read_stored(library, raw, "Q6_K", (9, 256))
    assert found is not None
    expected = lay_out(found)
    monkeypatch.setattr("unspool.kernels.cpu.raw.find_library", lambda: None)
    assert torch.equal(lay_out(found), expected)


def test_sizes_are_checked_before_the_library_is_called(library: Library) -> None:
    found = read_stored(library, make_raw("Q8_0", 8, 1, 0), "Q8_0", (8, 32))
    assert found is not None
    with pytest.raises(LoadError, match="rows from 0 to 8"):
        found.select_rows(torch.tensor([0, 8]))
    with pytest.raises(SettingError, match="8 rows can't become"):
        RawBlocks(found.parts, "int8", 32, torch.tensor([0, -1])).lay_out(library)
    with pytest.raises(LoadError, match="int8 and q6_k"):
        join_rows([found, read(make_raw("Q6_K", 1, 1, 0), "Q6_K", (1, 256))])
    with pytest.raises(LoadError, match="33 columns"):
        quantise(torch.zeros(2, 33), "int8")
