"""Products of the CPU library beside torch's: every instruction set, every kind, any shape."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unspool.errors import SettingError
from unspool.kernels.cpu import BLOCK, Library, find_library, pack_tiles, quantise_rows
from unspool.kernels.cpu.structures import PANEL, CMatrix, describe_matrix

KINDS = ("float32", "bfloat16", "int8", "int4")
FLOATS = ("float32", "bfloat16")


def make(kind: str, rows: int, columns: int, seed: int, has_bias: bool) -> tuple[CMatrix, torch.Tensor, object]:
    """A matrix of the library, the numbers that it stands for, and what must be kept alive."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    bias = torch.randn(rows, generator=generator) if has_bias else None
    data = weight.clone()
    if kind == "bfloat16":
        weight = weight.bfloat16().float()
        data = narrow(weight)
    elif kind != "float32":
        blocks = quantise_rows(weight, "int8" if kind == "int8" else "int4")
        data, weight = pack_tiles(blocks), blocks.dequantise()
    return describe_matrix(data, bias, kind, rows, columns), weight, (data, bias)


def narrow(weight: torch.Tensor) -> torch.Tensor:
    """A matrix of bfloat16 numbers as the library wants it."""
    library = find_library()
    assert library is not None
    rows = -(-weight.shape[0] // PANEL) * PANEL
    data = torch.empty(rows * weight.shape[1], dtype=torch.bfloat16)
    assert library.narrow_rows(weight, data)
    return data


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_alone_is_a_row_in_a_batch(library: Library, kind: str, threads: int) -> None:
    """To the bit, whatever the number of rows makes of panels, and at a matrix's uneven end."""
    columns = 192 if kind != "float32" else 197
    matrix, _, _kept = make(kind, 93, columns, 0, True)
    x = torch.randn(34, columns, generator=torch.Generator().manual_seed(1))
    library.threads = threads
    for name in library.available:
        library.use_instructions(name)
        alone = torch.cat([library.multiply(matrix, row[None]) for row in x])
        for count in (*range(2, 18), 23, 34):
            assert torch.equal(library.multiply(matrix, x[:count]), alone[:count]), (name, count)


def test_floats_keep_all_of_their_bits(library: Library) -> None:
    """Products with bfloat16 numbers lose none of a float's 24 bits, and keep what is no number."""
    generator = torch.Generator().manual_seed(2)
    weight = torch.eye(64)
    matrix = describe_matrix(data := narrow(weight), None, "bfloat16", 64, 64)
    x = torch.randn(21, 64, generator=generator) * 10.0 ** torch.randint(-20, 20, (21, 64), generator=generator)
    x[3, :4] = torch.tensor([3.4028e38, -3.4028e38, 0.0, -0.0])
    strange = torch.randn(3, 64, generator=generator)
    strange[0, 7], strange[1, 9], strange[2, 11] = torch.inf, -torch.inf, torch.nan
    for name in library.available:
        library.use_instructions(name)
        assert torch.equal(library.multiply(matrix, x), x), name
        made = library.multiply(matrix, strange)
        assert made[0, 7] == torch.inf and made[1, 9] == -torch.inf and made[2].isnan().all(), name
    assert len(data)


def test_only_bfloat16_numbers_are_narrowed(library: Library) -> None:
    data = torch.empty(16 * 32, dtype=torch.bfloat16)
    weight = torch.ones(5, 32)
    assert library.narrow_rows(weight, data)
    for wrong in (1.0001, torch.inf, torch.nan):
        weight[4, 31] = wrong
        assert not library.narrow_rows(weight, data)
    with pytest.raises(SettingError, match="no place for 17 rows"):
        library.narrow_rows(torch.ones(17, 32), data)
    with pytest.raises(SettingError, match="no bfloat16 matrix"):
        describe_matrix(data, None, "bfloat16", 16, 31)


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
