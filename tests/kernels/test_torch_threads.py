"""Torch's operators on one thread between passes of the CPU library, and on all of them in passes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tests.conformance.cases import load_model

import unspool
from unspool.kernels.cpu.library import find_library
from unspool.kernels.torch_threads import MOST_ELEMENTS, _find_setter, all_threads, one_thread


@pytest.fixture(autouse=True)
def three() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    assert torch.get_num_threads() == 3
    torch.set_num_threads(before)


needs_openmp = pytest.mark.skipif(_find_setter() is None, reason="torch's OpenMP is not found in this process")


@needs_openmp
def test_scopes_nest_and_end() -> None:
    with one_thread(100):
        assert torch.get_num_threads() == 1
        with one_thread(100), all_threads():
            assert torch.get_num_threads() == 3
            with one_thread(100):
                assert torch.get_num_threads() == 1
            assert torch.get_num_threads() == 3
        assert torch.get_num_threads() == 1
    with all_threads():
        assert torch.get_num_threads() == 3
    with pytest.raises(KeyError), one_thread(1), all_threads():
        raise KeyError


@needs_openmp
def test_other_threads_keep_theirs() -> None:
    with ThreadPoolExecutor(1) as other:
        assert other.submit(torch.get_num_threads).result() == 3
        with one_thread(100):
            assert other.submit(torch.get_num_threads).result() == 3
        with ThreadPoolExecutor(1) as new, one_thread(100):
            assert new.submit(torch.get_num_threads).result() == 3


def test_large_tensors_keep_all_threads() -> None:
    with one_thread(MOST_ELEMENTS + 1):
        assert torch.get_num_threads() == 3


class Watching(unspool.LogitsProcessor):
    """Notes the number of threads that processors have."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen.add(torch.get_num_threads())
        return scores


@needs_openmp
@pytest.mark.skipif(find_library() is None, reason="the CPU library is not built")
@pytest.mark.parametrize("asked", [{}, {"num_beams": 3}, {"do_sample": True, "seed": 1}])
def test_between_passes_of_the_library_there_is_one(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, watching, passes = load_model("llama").model, Watching(), set[int]()
    forward = model.forward

    def watch(*args: Any, **named: Any) -> Any:
        passes.add(torch.get_num_threads())
        return forward(*args, **named)

    monkeypatch.setattr(model, "forward", watch)
    prompt = torch.tensor([[5, 6, 7]])
    unspool.generate(model, prompt, max_new_tokens=4, logits_processor=[watching], **asked)
    assert (watching.seen, passes) == ({1}, {3})
    with unspool.Engine(model, memory=1 << 24) as engine:
        watching.seen.clear()
        engine.submit([5, 6, 7], max_new_tokens=4, logits_processor=[watching], **asked).result()
        assert watching.seen == {1}


def test_models_without_the_library_keep_all_threads() -> None:
    model, watching = load_model("llama").model, Watching()
    with model.without_paths("library"):
        unspool.generate(model, torch.tensor([[5, 6, 7]]), max_new_tokens=4, logits_processor=[watching])
    assert watching.seen == {3}
