"""transformers objects on a GPU that are changed between two calls; sums of bits beside their reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from unspool.kernels.bit_sums import _lay_whole, sum_bits, sum_by_operators

pytest.importorskip("transformers")

from tests.models.adapters.live_changes import CHANGES, PREPARED, AbsentError
from tests.models.adapters.live_models import FAMILIES, check_alike, make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64])
def test_sums_are_the_reference_s_and_the_cpu_s(dtype: torch.dtype) -> None:
    rows = [(torch.randn(count) * 50).to(dtype) for count in (1, 7, 4096, 32768, 32769, 1_000_003)]
    flat = torch.cat(rows)
    views = [flat[3:40], flat[5:70_001]]  # at addresses that are those of numbers alone
    held = [*rows, *views]
    on_gpu = [one.cuda() for one in rows]
    moved = flat.cuda()
    given = [*on_gpu, moved[3:40], moved[5:70_001]]
    expected = sum_bits(held)
    assert sum_bits(given) == expected == sum_by_operators([_lay_whole(one) for one in given])
    given[5][777_777] += 1
    assert [one == other for one, other in zip(sum_bits(given), expected, strict=True)] == [True] * 5 + [False] + [
        True
    ] * 2


def prepare(name: str, family: str, dtype: torch.dtype) -> Any:
    if name == "write_shared_memory":
        pytest.skip("memory of a GPU is shared otherwise")
    model = make(family, "cuda", dtype)
    if name in PREPARED:
        model.__dict__["prepared"] = PREPARED[name](model)
    return model


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", CHANGES)
def test_what_is_changed_between_two_calls_is_seen(name: str, family: str, dtype: torch.dtype) -> None:
    model = prepare(name, family, dtype)
    check_alike(model, native=not any(one.data_ptr() % 16 for one in model.parameters()))
    try:
        with CHANGES[name](model, torch.Generator().manual_seed(1)):
            check_alike(model)
    except AbsentError:
        pytest.skip(f"{family} has nothing to change")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_parameter_is_moved_and_copies_go_with_what_they_are_of(family: str, dtype: torch.dtype) -> None:
    model = make(family, "cuda", dtype)
    at = [(one.data_ptr(), one.stride()) for one in model.parameters()]
    taken = model.state_dict()
    check_alike(model, native=True)
    assert at == [(one.data_ptr(), one.stride()) for one in model.parameters()]
    for value in taken.values():
        value.mul_(1.25)
    check_alike(model, native=True)


def test_copies_that_there_is_no_room_for_leave_the_object_s_own_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    from unspool.models.adapters import twin

    monkeypatch.setattr(twin, "find_room", lambda _device: 1000)
    check_alike(make("llama", "cuda"), native=False)
