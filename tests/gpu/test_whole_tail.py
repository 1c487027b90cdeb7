"""The sampling tail over whole rows beside the plain chain of processors and the draw.

They run on a GPU, or slowly in Triton's interpreter: `TRITON_INTERPRET=1 pytest tests/gpu/test_whole_tail.py`.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.gpu.kernel_checks import DEVICE, HAS_GPU, needs_gpu, pytestmark

from unspool import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopALogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from unspool.decoding.randomness import draw_uniform
from unspool.decoding.select import NO_TOKEN, draw_plainly
from unspool.decoding.tails import draw_by_operators, draw_by_search, draw_from_tail
from unspool.logits.fused import FusedTail, split_tail

__all__ = ["pytestmark"]

INF = float("inf")
NAN = float("nan")
KINDS: dict[str, Any] = {
    "temperature": TemperatureLogitsWarper,
    "top_k": TopKLogitsWarper,
    "top_p": TopPLogitsWarper,
    "min_p": MinPLogitsWarper,
    "top_a": TopALogitsWarper,
    "typical": TypicalLogitsWarper,
    "epsilon": EpsilonLogitsWarper,
    "eta": EtaLogitsWarper,
}
CHAINS: dict[str, dict[str, Any]] = {
    "top-p": {"top_p": 0.9},
    "tempered top-p": {"temperature": 0.8, "top_p": 0.95},
    "typical": {"typical": 0.8},
    "min-p": {"temperature": 1.3, "min_p": 0.02},
    "chain": {"min_p": 0.003, "typical": 0.9},
    "a wide top-k": {"top_k": 700, "top_p": 0.8},
    "cuts": {"top_p": 0.97, "epsilon": 1e-4, "eta": 1e-3},
    "all of them": {
        "temperature": 0.9,
        "top_k": 900,
        "top_p": 0.98,
        "min_p": 1e-4,
        "top_a": 1e-3,
        "typical": 0.95,
        "epsilon": 1e-5,
        "eta": 1e-4,
    },
}
SCORES = ("spread", "peaked", "coarse", "flat", "few")


def make_tail(hair: float = 0.0, **settings: Any) -> FusedTail:
    """A tail of these parts, at places a hair away."""
    moved = {"top_p", "typical", "min_p", "top_a", "epsilon", "eta"}
    given = {name: value * (1 + hair) if name in moved and hair else value for name, value in settings.items()}
    _, tail = split_tail(LogitsProcessorList([KINDS[name](given[name]) for name in KINDS if name in given]))
    assert tail is not None
    return tail


def make_scores(kind: str, rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, vocab, generator=generator) * 2
    if kind == "peaked":
        scores[:, vocab // 3] += 12.0
    elif kind == "coarse":  # as bfloat16 leaves them: many tie
        scores = scores.bfloat16().float()
    elif kind == "flat":
        scores = scores * 0.1
    elif kind == "few":
        scores[:, ::3] = -INF
    return scores


def make_uniforms(rows: int, seed: int = 0) -> torch.Tensor:
    return draw_uniform(torch.arange(rows), torch.full((rows,), seed))


def draw_here(tail: FusedTail, scores: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    return draw_by_search(tail, scores.to(DEVICE), uniforms.to(DEVICE)).cpu()


def run_chain(tail: FusedTail, scores: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The plain chain, in float64 after the temperature: sums of 100,000 float32 numbers are off by several tokens."""
    if tail.temperature is not None:
        scores = tail.temperature(torch.zeros(0, 0, dtype=torch.int64), scores)
    return draw_plainly(replace(tail, temperature=None).run_plainly(scores.double()), uniforms)


@pytest.mark.parametrize("vocab", [5_008, 128_256] if HAS_GPU else [5_008])
@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("name", CHAINS)
def test_tokens_are_the_plain_chains(name: str, kind: str, vocab: int) -> None:
    rows = 6 if HAS_GPU else 2
    for seed in range(5 if HAS_GPU else 1):  # the last runs are replays
        scores, uniforms = make_scores(kind, rows, vocab, seed), make_uniforms(rows, seed)
        found = draw_here(make_tail(**CHAINS[name]), scores, uniforms)
        exact = run_chain(make_tail(**CHAINS[name]), scores, uniforms)
        is_right = found == exact
        if not bool(is_right.all()):  # where rounding may decide, those of a cut a hair away
            for hair in (-1e-5, -1e-6, 1e-6, 1e-5):
                is_right |= found == run_chain(make_tail(hair, **CHAINS[name]), scores, uniforms)
        assert bool(is_right.all()), (found.tolist(), exact.tolist())
        assert int((found != exact).sum()) <= max(1, rows // 8)


@needs_gpu
@pytest.mark.parametrize("name", CHAINS)
def test_tokens_are_those_of_the_processors_kernels(name: str) -> None:
    """Replays beside single launches, over settings and scores that change."""
    for step in range(8):
        scores, uniforms = make_scores(SCORES[step % 5], 4, 128_256, step).cuda(), make_uniforms(4, step).cuda()
        settings = dict(CHAINS[name])
        if step >= 6:
            settings = {part: value * 0.9 if part != "top_k" else value for part, value in settings.items()}
        tail = make_tail(**settings)
        expected = draw_plainly(tail.run_plainly(scores), uniforms)
        assert torch.equal(draw_by_search(tail, scores, uniforms), expected)


def test_one_number_a_row() -> None:
    settings: dict[str, Any] = {"temperature": [0.5, 0.7, 1.0, 2.0], "top_p": [0.9, 1.0, 0.2, 0.99]}
    settings |= {"min_p": [0.0, 0.1, 0.05, 0.001], "typical": [1.0, 0.9, 0.5, 0.8]}
    tail, scores, uniforms = make_tail(**settings), make_scores("spread", 4, 5_008), make_uniforms(4)
    found = draw_here(tail, scores, uniforms)
    assert torch.equal(found, run_chain(tail, scores, uniforms))
    index = torch.tensor([2, 0])
    chosen = draw_here(tail.select_rows(index.to(DEVICE)), scores[index], uniforms[index])
    assert torch.equal(chosen, found[index])


@pytest.mark.parametrize("name", ["top-p", "chain", "a wide top-k"])
def test_rows_alone_are_rows_among_others(name: str) -> None:
    rows = 9 if HAS_GPU else 3
    tail, scores, uniforms = make_tail(**CHAINS[name]), make_scores("coarse", rows, 5_008), make_uniforms(rows)
    found = draw_here(tail, scores, uniforms)
    for row in range(rows):
        assert draw_here(tail, scores[row : row + 1], uniforms[row : row + 1]).item() == found[row].item()


def test_rows_without_a_token_do_not_disturb_others() -> None:
    scores = make_scores("spread", 7, 5_008)
    scores[1] = -INF
    scores[2, 77] = NAN
    scores[3, 5_007] = INF
    scores[4, :5_000] = -INF
    scores[5, 1:] = -INF
    tail, uniforms = make_tail(temperature=0.8, top_p=0.9, min_p=1e-3), make_uniforms(7)
    found = draw_here(tail, scores, uniforms)
    assert found[1:4].tolist() == [NO_TOKEN] * 3
    assert torch.equal(found, run_chain(tail, scores, uniforms))


def test_scores_whose_rows_lie_apart() -> None:
    wide, uniforms = make_scores("spread", 3, 9_008), make_uniforms(6)
    tail = make_tail(temperature=0.8, top_p=0.9)
    expected = draw_here(tail, wide[:, :5_008].contiguous(), uniforms[::2].contiguous())
    assert torch.equal(draw_here(tail, wide[:, :5_008], uniforms[::2]), expected)
    turned = wide[:, :5_008].t().contiguous().t()
    assert torch.equal(draw_here(tail, turned, uniforms[::2]), expected)


@needs_gpu
def test_the_host_never_waits_and_a_graph_can_hold_it() -> None:
    tail = make_tail(temperature=0.8, top_p=0.9)
    scores, uniforms = make_scores("spread", 4, 128_256).cuda(), make_uniforms(4).cuda()
    expected = [draw_from_tail(tail, scores, uniforms) for _ in range(6)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = draw_from_tail(tail, scores, uniforms)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(one, again) for one in expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = draw_from_tail(tail, scores, uniforms)
    scores.copy_(make_scores("peaked", 4, 128_256, seed=1))
    graph.replay()
    assert torch.equal(captured, draw_from_tail(tail, scores, uniforms))


@needs_gpu
def test_threads_have_memory_of_their_own() -> None:
    tail, failures = make_tail(top_p=0.9), []

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for step in range(12):
                scores = make_scores("spread", 2, 5_008, 100 * number + step).cuda()
                uniforms = make_uniforms(2, step).cuda()
                if not torch.equal(draw_from_tail(tail, scores, uniforms), draw_by_operators(tail, scores, uniforms)):
                    failures.append((number, step))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@needs_gpu
@pytest.mark.parametrize("is_inference", [True, False])
def test_either_mode_of_torch_may_come_first(is_inference: bool) -> None:
    vocab = 5_008 + 16 * is_inference
    for step in range(10):
        tail = make_tail(top_p=0.9, typical=0.8)
        scores, uniforms = make_scores("spread", 2, vocab, step).cuda(), make_uniforms(2, step).cuda()
        with torch.inference_mode(is_inference if step < 5 else not is_inference):
            found = draw_from_tail(tail, scores, uniforms)
            assert torch.equal(found, draw_plainly(tail.run_plainly(scores), uniforms))
