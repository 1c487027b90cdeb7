"""Steps whose attention is left in parts: logits of a prompt that is read at once, below and beyond their limits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.gpu.models import make_model

import unspool
from unspool.protocols import Want

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")]


def list_limits(model: Any) -> list[int]:
    """The limits of the graphs that were made."""
    return sorted({key[0].most_keys for key in model.find_path("captured")._waiting})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("length", [1, 5, 127, 300, 510, 511, 512, 513, 1000])
def test_logits_are_those_of_a_prompt(dtype: torch.dtype, length: int) -> None:
    model = make_model(None, dtype, width=64)
    ids = torch.randint(3, 90, (1, length + 2), generator=torch.Generator().manual_seed(length)).cuda()
    with torch.no_grad():
        whole = model.forward(ids, model.new_cache("static", 1, 1024)).logits.double()
        cache = model.new_cache("static", 1, 1024)
        model.forward(ids[:, :-2], cache)
        for place in (-2, -1):  # the second reads the key that the first has written
            step = model.forward(ids[:, place:][:, :1], cache)
    assert step.path == "captured"
    assert float((step.logits.double() - whole).norm() / whole.norm()) < (2e-2 if dtype == torch.bfloat16 else 4e-3)
    expected = {512 if length + place <= 512 else 2048 for place in (1, 2)}
    assert set(list_limits(model)) == expected


def test_a_text_goes_on_beyond_a_limit() -> None:
    """Steps that are launched together end before it, or behind it."""
    model = make_model(None, torch.float16, width=64)
    ids = torch.randint(3, 90, (1, 480), generator=torch.Generator().manual_seed(1)).cuda()
    asked: dict[str, Any] = {"max_new_tokens": 60, "eos_token_id": None, "do_sample": False}
    found = unspool.generate(model, ids, **asked)
    assert list_limits(model) == [512, 2048]
    with torch.no_grad():
        logits = model.forward(found, model.new_cache("dynamic", 1), want=Want(logits="all")).logits
    picked = logits[0, 479:-1].double()
    best = picked.max(-1).values
    chosen = picked.gather(1, found[0, 480:, None])[:, 0]
    assert float((best - chosen).max()) < 0.02 * float(picked.abs().max())  # the likeliest, but for rounding


@pytest.mark.parametrize("window", [None, 400, 2048])
def test_windows_end_before_a_limit(window: int | None) -> None:
    from unspool.models.paths.captured_parted import list_limits

    model = make_model(window, torch.bfloat16, width=64)
    limits = list_limits(model.spec, model.weights, torch.bfloat16)
    assert limits == tuple(limit for limit in (512, 2048, 12_288) if window is None or limit <= window)
    assert list_limits(model.spec, model.weights, torch.float32) == ()
    narrow = make_model(window, torch.bfloat16)
    assert list_limits(narrow.spec, narrow.weights, torch.bfloat16) == ()
