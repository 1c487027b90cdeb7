"""Products of the CPU library beside torch's: every instruction set, every kind, any shape."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unspool.errors import SettingError
from unspool.kernels.cpu import BLOCK, Library, find_library, pack_tiles, quantise_rows
from unspool.kernels.cpu.structures import PANEL, CMatrix, describe_matrix

NARROW = {"bfloat16": torch.bfloat16, "float16": torch.float16}
FLOATS = ("float32", *NARROW)
KINDS = (*FLOATS, "int8", "int4")


def make(kind: str, rows: int, columns: int, seed: int, has_bias: bool) -> tuple[CMatrix, torch.Tensor, object]:
    """A matrix of the library, the numbers that it stands for, and what must be kept alive."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    bias = torch.randn(rows, generator=generator) if has_bias else None
    data = weight.clone()
    if kind in NARROW:
        weight = weight.to(NARROW[kind]).float()
        data = narrow(weight, kind)
    elif kind != "float32":
        blocks = quantise_rows(weight, "int8" if kind == "int8" else "int4")
        data, weight = pack_tiles(blocks), blocks.dequantise()
    return describe_matrix(data, bias, kind, rows, columns), weight, (data, bias)


def narrow(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """A matrix of bfloat16 or float16 numbers as the library wants it."""
    library = find_library()
    assert library is not None
    rows = -(-weight.shape[0] // PANEL) * PANEL
    data = torch.empty(rows * weight.shape[1], dtype=NARROW[kind])
    assert library.narrow_rows(weight, data)
    return data


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(KINDS),
    rows=st.integers(1, 40),
    blocks=st.integers(1, 9),
    num_rows=st.integers(1, 35),
    seed=st.integers(0, 1000),
    has_bias=st.booleans(),
    threads=st.integers(1, 3),
)
def test_products_agree_with_torch(
    library: Library, kind: str, rows: int, blocks: int, num_rows: int, seed: int, has_bias: bool, threads: int
) -> None:
    columns = blocks * BLOCK
    matrix, weight, kept = make(kind, rows, columns, seed, has_bias)
    x = torch.randn(num_rows, columns, generator=torch.Generator().manual_seed(seed + 1))
    expected = torch.nn.functional.linear(x.double(), weight.double(), kept[1].double() if has_bias else None)
    library.threads = threads
    for name in library.available:
        library.use_instructions(name)
        made = library.multiply(matrix, x)
        # int8 activations: half a step of the block's largest, times the weights' length.
        steps = x.view(num_rows, -1, BLOCK).abs().amax(-1) / 127  # (rows, blocks)
        bound = (steps.repeat_interleave(BLOCK, 1) * 0.51) @ weight.abs().T if kind not in FLOATS else 0.0
        assert ((made - expected).abs() <= bound + 2e-4).all(), name


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("kind", "columns"), [*((kind, 192) for kind in KINDS), ("float32", 197)])
def test_a_row_alone_is_a_row_in_a_batch(library: Library, kind: str, columns: int, threads: int) -> None:
    """To the bit, whatever the number of rows makes of panels and blocks of them, and at a matrix's uneven end."""
    matrix, _, _kept = make(kind, 93, columns, 0, True)
    x = torch.randn(261, columns, generator=torch.Generator().manual_seed(1))
    library.threads = threads
    for name in library.available:
        library.use_instructions(name)
        alone = torch.cat([library.multiply(matrix, row[None]) for row in x])
        for count in (*range(2, 18), 23, 34, 64, 121, 261):
            assert torch.equal(library.multiply(matrix, x[:count]), alone[:count]), (name, count)


@pytest.mark.parametrize("kind", list(NARROW))
def test_floats_keep_all_of_their_bits(library: Library, kind: str) -> None:
    """Products with numbers of 16 bits lose none of a float's 24 bits, and keep what is no number."""
    generator = torch.Generator().manual_seed(2)
    weight = torch.eye(64)
    matrix = describe_matrix(data := narrow(weight, kind), None, kind, 64, 64)
    x = torch.randn(21, 64, generator=generator) * 10.0 ** torch.randint(-20, 20, (21, 64), generator=generator)
    x[3, :4] = torch.tensor([3.4028e38, -3.4028e38, 0.0, -0.0])
    strange = torch.randn(3, 64, generator=generator)
    strange[0, 7], strange[1, 9], strange[2, 11] = torch.inf, -torch.inf, torch.nan
    for name in library.available:
        library.use_instructions(name)
        assert torch.equal(library.multiply(matrix, x), x), name
        assert all(torch.equal(library.multiply(matrix, row[None])[0], row) for row in x), name
        made = library.multiply(matrix, strange)
        assert made[0, 7] == torch.inf and made[1, 9] == -torch.inf and made[2].isnan().all(), name
        alone = torch.cat([library.multiply(matrix, row[None]) for row in strange])
        assert torch.equal(alone.nan_to_num(7.0), made.nan_to_num(7.0)), name
    assert len(data)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.integers(1, 70), blocks=st.integers(1, 5), num_rows=st.integers(1, 20), seed=st.integers(0, 1000))
def test_numbers_of_16_bits_multiply_as_floats_do(
    library: Library, rows: int, blocks: int, num_rows: int, seed: int
) -> None:
    """To the bit where every sum is exact, and between the kinds of 16 bits where sums are rounded."""
    generator = torch.Generator().manual_seed(seed)
    columns = blocks * BLOCK
    weight = torch.randint(-128, 129, (rows, columns), generator=generator) / 64
    data = {"float32": weight, **{kind: narrow(weight, kind) for kind in NARROW}}
    matrices = {kind: describe_matrix(numbers, None, kind, rows, columns) for kind, numbers in data.items()}
    whole = torch.randint(-512, 513, (num_rows, columns), generator=generator) / 8
    rounded = torch.randn(num_rows, columns, generator=generator)
    for name in library.available:
        library.use_instructions(name)
        exact = [library.multiply(matrix, whole) for matrix in matrices.values()]
        assert all(torch.equal(made, exact[0]) for made in exact), name
        made = {kind: library.multiply(matrix, rounded) for kind, matrix in matrices.items()}
        if name != "amx":  # its sums are of three numbers to a float
            assert torch.equal(made["bfloat16"], made["float16"]), name


LARGEST, LEAST = 65504.0, 2.0**-24  # of float16


@pytest.mark.parametrize(
    ("kind", "held", "wrong"),
    [
        ("bfloat16", [3e38, -1e-38, 2.0**-133], [1.0001, 1 + 2**-8]),
        ("float16", [LARGEST, -LARGEST, LEAST, -1023 * LEAST, 2.0**-14, 1 + 2**-10], [65536.0, 65520.0, LEAST / 2]),
        ("float16", [0.0, -0.0], [1.5 * LEAST, 1 + 2**-11, 2.0**-14 + 2**-25, -1e30]),
    ],
)
def test_only_numbers_that_16_bits_hold_are_narrowed(
    library: Library, kind: str, held: list[float], wrong: list[float]
) -> None:
    data = torch.empty(16 * 32, dtype=NARROW[kind])
    weight = torch.ones(5, 32)
    weight[1, : len(held)] = weight[4, -len(held) :] = torch.tensor(held).to(NARROW[kind]).float()
    assert library.narrow_rows(weight, data)
    matrix = describe_matrix(data, None, kind, 5, 32)
    assert torch.equal(library.read_rows(matrix, torch.arange(5)).view(torch.int32), weight.view(torch.int32))
    for number in (*wrong, torch.inf, -torch.inf, torch.nan):
        weight[4, 31] = number
        assert not library.narrow_rows(weight, data)
    with pytest.raises(SettingError, match="no place for 17 rows"):
        library.narrow_rows(torch.ones(17, 32), data)
    with pytest.raises(SettingError, match="float32 are no place"):
        library.narrow_rows(weight, torch.empty(8 * 32))
    with pytest.raises(SettingError, match=f"no {kind} matrix"):
        describe_matrix(data, None, kind, 16, 31)


@pytest.mark.parametrize("flushes", [False, True], ids=["small floats", "no small floats"])
def test_every_float16_is_widened_alike(library: Library, flushes: bool) -> None:
    """All finite ones, subnormal ones among them, times one; whether small floats count as zero here or not."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    numbers = every.where(every.isfinite(), torch.zeros((), dtype=torch.float16)).float().view(2048, 32)
    matrix = describe_matrix(data := narrow(numbers, "float16"), None, "float16", 2048, 32)
    if flushes and not torch.set_flush_denormal(True):
        pytest.skip("this processor can't")
    try:
        for name in library.available:
            library.use_instructions(name)
            for num_rows in (1, 5, 9, 70):
                made = library.multiply(matrix, torch.eye(32).repeat(3, 1)[:num_rows])
                assert torch.equal(made, numbers.T.repeat(3, 1)[:num_rows]), (name, num_rows)
    finally:
        torch.set_flush_denormal(False)
    assert len(data)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_read_back(library: Library, kind: str) -> None:
    matrix, weight, _kept = make(kind, 21, 64, 3, False)
    rows = torch.tensor([20, 0, 7, 8, 20])
    assert torch.allclose(library.read_rows(matrix, rows), weight[rows], atol=1e-6)


def test_shapes_are_checked_before_memory_is_read(library: Library) -> None:
    matrix, _, _kept = make("int8", 8, 64, 0, False)
    with pytest.raises(SettingError, match="rows of 64 float32"):
        library.multiply(matrix, torch.zeros(1, 32))
    with pytest.raises(SettingError, match="a matrix of 8"):
        library.read_rows(matrix, torch.tensor([8]))
    with pytest.raises(SettingError, match="no int8 matrix"):
        describe_matrix(torch.zeros(100, dtype=torch.uint8), None, "int8", 8, 64)
    with pytest.raises(SettingError, match="bias of 3"):
        describe_matrix(torch.zeros(2, 2), torch.zeros(3), "float32", 2, 2)
    with pytest.raises(SettingError, match="no 'mmx' instructions"):
        library.use_instructions("mmx")


def test_no_rows_make_no_rows(library: Library) -> None:
    matrix, _, _kept = make("int4", 8, 64, 0, False)
    assert library.multiply(matrix, torch.zeros(0, 64)).shape == (0, 8)


def test_small_floats_stay_the_callers(library: Library) -> None:
    """On x86 they are zeros within a product, and not behind it."""
    matrix, _, kept = make("float32", 8, 32, 0, has_bias=False)
    library.multiply(matrix, torch.full((3, 32), 1e-39))
    assert torch.tensor(1e-39) * 1 > 0
    del kept
