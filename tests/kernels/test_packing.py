"""Packing loses half a step and no more, in every number of bits and along both axes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unspool.cache.stores.quantization import BACKENDS
from unspool.errors import SettingError
from unspool.kernels.packing import BITS, Packed, Scheme, fit_range, join_codes, pack, split_codes, unpack


def spread_scale(packed: Packed) -> torch.Tensor:
    """The step of every number: (rows, heads, positions, width)."""
    scheme, scale = packed.scheme, packed.scale.float()
    if scheme.by_channel:
        return scale.repeat_interleave(scheme.block, dim=2)
    return scale.repeat_interleave(scheme.group, dim=3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("by_channel", [True, False])
@pytest.mark.parametrize("nbits", BITS)
@settings(max_examples=15)
@given(
    width=st.sampled_from([3, 8, 16, 24, 64]),
    group_size=st.sampled_from([4, 8, 16, 64]),
    num_blocks=st.integers(1, 3),
    shift=st.sampled_from([0.0, 5.0, -40.0]),
    size=st.sampled_from([1e-9, 1e-3, 1.0, 300.0]),
    seed=st.integers(0, 1000),
)
def test_no_number_is_off_by_more_than_half_a_step(
    nbits: int,
    by_channel: bool,
    dtype: torch.dtype,
    width: int,
    group_size: int,
    num_blocks: int,
    shift: float,
    size: float,
    seed: int,
) -> None:
    scheme = Scheme.of(width, nbits, group_size, by_channel, dtype)
    x = torch.randn(2, 3, num_blocks * scheme.block, width, generator=torch.Generator().manual_seed(seed))
    x = x * size + shift
    packed = pack(x, scheme)
    step = spread_scale(packed)
    error = (unpack(packed, torch.float32) - x).abs()
    # Half a step, and what float32 itself rounds; where the step is below what its type can hold, the range is left.
    tiny = torch.finfo(dtype).tiny * 256
    assert (error <= step / 2 * (1 + 1e-4) + x.abs() * 1e-6 + tiny).all()
    # The step is the group's range over the levels, but for the rounding of scale and zero point to their type.
    if by_channel:
        groups = x.view(2, 3, num_blocks, scheme.block, width)
        least, most = (part.repeat_interleave(scheme.block, dim=2) for part in groups.aminmax(dim=3))
    else:
        groups = x.view(2, 3, x.shape[2], -1, scheme.group)
        least, most = (part.repeat_interleave(scheme.group, dim=3) for part in groups.aminmax(dim=4))
    eps = torch.finfo(dtype).eps
    bound = ((most - least) + 3 * eps * least.abs()) / (2**nbits - 1) * (1 + 3 * eps)
    assert (step <= bound + tiny).all()


@pytest.mark.parametrize("nbits", BITS)
@pytest.mark.parametrize("width", [1, 3, 8, 13, 64])
def test_codes_are_split_as_they_were_joined(nbits: int, width: int) -> None:
    scheme = Scheme.of(width, nbits, 64, True, torch.float16)
    codes = torch.randint(0, 2**nbits, (2, 5, width), dtype=torch.uint8)
    joined = join_codes(codes, scheme)
    assert joined.shape == (2, 5, -(-width * nbits // 8))
    assert torch.equal(split_codes(joined, scheme), codes)


def test_a_shift_and_a_mask_give_neighbouring_channels() -> None:
    scheme = Scheme.of(8, 4, 8, False, torch.float16)
    joined = join_codes(torch.arange(8, dtype=torch.uint8), scheme)
    assert (joined & 15).tolist() == [0, 1, 2, 3]
    assert (joined >> 4).tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize(
    ("width", "group_size", "group"),
    [(64, 64, 64), (64, 128, 64), (96, 64, 48), (80, 64, 40), (3, 64, 3), (128, 64, 64)],
)
def test_groups_along_a_head_are_its_largest_even_parts(width: int, group_size: int, group: int) -> None:
    assert Scheme.of(width, 4, group_size, False, torch.float16).group == group


def test_a_head_that_has_no_even_parts_is_refused() -> None:
    with pytest.raises(SettingError, match=r"heads of 67 channels .* q_group_size=64; use q_group_size=67"):
        Scheme.of(67, 4, 64, False, torch.float16)
    assert Scheme.of(67, 4, 64, True, torch.float16).block == 64  # down the positions any width will do


@pytest.mark.parametrize("by_channel", [True, False])
def test_four_bits_take_nine_thirtyseconds_of_half_precision(by_channel: bool) -> None:
    packed = Packed.empty(Scheme.of(128, 4, 64, by_channel, torch.float16), 1, 8, 32768, torch.device("cpu"))
    assert packed.nbytes / (8 * 32768 * 128 * 2) == 9 / 32


def test_constant_groups_and_numbers_of_any_size_are_exact() -> None:
    scheme = Scheme.of(4, 2, 4, False, torch.float32)
    x = torch.tensor([[[[7.5] * 4, [0.0] * 4, [-1e30] * 4, [0.0, 1.0, 2.0, 3.0]]]])
    torch.testing.assert_close(unpack(pack(x, scheme), torch.float32), x, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", BACKENDS)
def test_every_backend_fits_close_to_half_a_step(name: str) -> None:
    """Theirs where they are installed, ours where not: none may be off by more than a step."""
    groups = torch.randn(50, 64, generator=torch.Generator().manual_seed(1)) * 3 + 1
    for nbits in BACKENDS[name].nbits:
        codes, scale, zero = BACKENDS[name].find_fit()(groups, nbits, torch.float16)
        made = codes.float() * scale.float()[:, None] + zero.float()[:, None]
        step = (groups.amax(1) - groups.amin(1)) / (2**nbits - 1)
        assert ((made - groups).abs() <= 1.1 * step[:, None]).all()
        assert codes.max() <= 2**nbits - 1


def test_ours_is_what_stands_in() -> None:
    assert BACKENDS["unspool"].find_fit() is fit_range
