from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from unspool.kernels.splitmix import MASK, STEP, as_signed, mix, mix_tensor


def test_the_published_generator() -> None:
    """The first numbers of SplitMix64 from the seed 1234567."""
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [mix(1234567 + index * STEP) for index in range(1, 5)] == known


@given(st.integers(-(2**63), 2**63 - 1))
def test_tensors_are_mixed_as_numbers_are(value: int) -> None:
    assert int(mix_tensor(torch.tensor(value))) == as_signed(mix(value))
    assert as_signed(value & MASK) == value
