"""Processors on a GPU: the CPU's values, and no step at which the host waits for the device."""

from __future__ import annotations

import pytest
import torch
from tests.logits.cases import PAIRS, Pair, random_ids, random_scores, run

from unspool import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from unspool.decoding.randomness import draw_uniform
from unspool.decoding.select import draw, take_likeliest
from unspool.logits.fused import split_tail

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ASKS_THE_CALLER = {"prefix"}  # the caller's function decides on the host


@pytest.fixture
def refuse_waiting():
    """A switch: from when it is called until the test ends, whatever makes the host wait is an error."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", PAIRS)
def test_values_are_the_cpus_and_the_host_never_waits(name: str, refuse_waiting) -> None:
    pair: Pair = PAIRS[name]
    ids, scores = random_ids(3), random_scores(3)
    expected = run(pair.make(), ids, scores, **pair.extra)
    processor = pair.make()
    extra = {key: value.cuda() for key, value in pair.extra.items()}
    ids, scores = ids.cuda(), scores.cuda()
    found = run(processor, ids, scores, **extra)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)
    if name not in ASKS_THE_CALLER:
        refuse_waiting()
        run(processor, ids, scores, **extra)  # what it keeps on the device is there by now


@pytest.mark.parametrize("vocab", [60, 20_000, 128_256])
def test_the_fused_tail_and_the_draw(vocab: int, refuse_waiting) -> None:
    chain = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.2),
            TemperatureLogitsWarper([0.5, 0.7, 1.0, 2.0]),
            TopKLogitsWarper([50, 3, 7, 20]),
            TopPLogitsWarper(0.9),
            MinPLogitsWarper(0.01),
        ]
    )
    head, tail = split_tail(chain)
    assert tail is not None
    ids, scores = random_ids(3).cuda(), random_scores(3, vocab=vocab).cuda()
    seeds = torch.arange(4, device="cuda")
    expected = draw(chain(ids, scores), draw_uniform(seeds, seeds))
    take_likeliest(chain(ids, scores))
    tail.find_candidates(head(ids, scores))
    refuse_waiting()
    tokens, values = tail.find_candidates(head(ids, scores))
    found = draw(values, draw_uniform(seeds, seeds), tokens)
    take_likeliest(scores)
    torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found, expected)
