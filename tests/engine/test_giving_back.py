"""What an engine took is given back when it is closed, whatever of it a caller still holds."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import unspool
from tests.engine.fakes import Fake, make_engine, make_lm
from tests.fakes import _take
from unspool.cache import BlockPool, KeyShape, PagedCache
from unspool.errors import ResourceError
from unspool.protocols import LAST, Forward, Want

HEADS, WIDTH = 8, 2048
POSITION_BYTES = 2 * HEADS * WIDTH * 4


class Wide(Fake):
    """A model whose keys take 128 KiB a position."""

    key_shape = KeyShape(1, HEADS, WIDTH, torch.float32, torch.device("cpu"))

    def forward(self, tokens: Any, cache: Any, *, counts: Any = None, want: Want = LAST, **_: Any) -> Forward:
        span = cache.begin(*tokens.shape, counts)
        cache.write(0, tokens.float()[:, :, None, None, None].expand(-1, -1, 2, HEADS, WIDTH))
        cache.end()
        logits = self.places[span.positions % 7]
        states = torch.ones(*tokens.shape, 4) if want.last_states else None
        return Forward(_take(logits, span.counts, want), last_states=states)


class Refuse:
    def __call__(self, ids: Any, scores: Any) -> Any:
        kept = [scores] * 3
        raise ZeroDivisionError(f"by a caller's own code, with {len(kept)}")


def measure() -> int:
    """Bytes of memory that this process takes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


ASKED: tuple[dict[str, Any], ...] = ({}, {"num_beams": 2}, {"penalty_alpha": 0.6, "top_k": 3}, {"logprobs": 2})


def serve(lm: Any, **options: Any) -> list[Any]:
    """Everything that a caller may hold of an engine that was closed."""
    held: list[Any] = []
    with unspool.Engine(lm, memory=400 << 20, max_rows=16, **options) as engine:
        prompts = [[3 + (place * step) % 18 for step in range(400)] for place in range(1, 5)]
        requests = [
            engine.submit(prompt, max_new_tokens=4, eos_token_id=None, **asked)
            for prompt, asked in zip(prompts, ASKED, strict=True)
        ]
        held += [request.result(60) for request in requests] + requests + [engine.stats, engine]
        failing = engine.submit([5] * 300, max_new_tokens=4, logits_processor=[Refuse()])
        try:
            failing.result(60)
        except ZeroDivisionError as error:
            held += [error, error.__traceback__, failing]
        streamed = engine.submit([6] * 300, max_new_tokens=400, eos_token_id=None)
        held += [next(iter(streamed)), streamed]  # and it is left there, at work
        assert measure() > 200 << 20
    return held


def check_size() -> None:
    """In a process of its own: three engines, one after the other, all of them held."""
    lm, held = make_lm(Wide()), [serve(make_lm(), block_size=16)]
    before = measure()
    for options in ({}, {"cache_implementation": "paged_hybrid"}, {}):
        held.append(serve(lm, **options))
        gc.collect()
        grown = (measure() - before) >> 20
        assert grown < 60, f"{grown} MiB are left of an engine that is closed"
    assert held[-1][8].blocks and not held[-1][9].stats.blocks_used


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's process sizes")
def test_the_process_is_as_small_as_before() -> None:
    pytest.importorskip("greenlet")
    code = "from tests.engine.test_giving_back import check_size; check_size()"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr[-3000:]


def test_an_engine_that_served_nobody() -> None:
    engine = make_engine(make_lm())
    pool = engine._memory.pool
    assert pool is not None
    engine.close()
    with pytest.raises(ResourceError, match="closed"):
        pool.take(1)


def test_a_pool_that_is_closed() -> None:
    pool = BlockPool(16, 4)
    cache = PagedCache(pool)
    Fake().forward(torch.tensor([[3, 4, 5]]), cache)
    places, buffer = cache.places(), weakref.ref(pool.buffers[0])
    pool.close()
    pool.close()
    gc.collect()
    assert not pool.nbytes and buffer() is None and places is not None and not places.buffers
    for work in (lambda: pool.take(1), lambda: Fake().forward(torch.tensor([[3]]), cache)):
        with pytest.raises(ResourceError, match="closed"):
            work()
    cache.select_rows([])  # what it held can still be given back
    assert pool.num_free == 4


def test_what_is_held_of_a_language_model_keeps_no_weights() -> None:
    lm = make_lm(has_tokenizer=True)
    model = weakref.ref(lm.model)
    held: list[Any] = [lm.generate([3, 4], max_new_tokens=3), lm.generate([3, 4], max_new_tokens=3, num_beams=2)]
    held.append(lm.generate([3, 4], max_new_tokens=3, logprobs=1).stats)
    held += list(lm.stream([3, 4], max_new_tokens=3))
    stream = lm.stream([3, 4], max_new_tokens=30)
    held.append(next(iter(stream)))
    trace = lm.trace([3, 4], max_new_tokens=3)
    held += list(trace)
    try:
        lm.generate([3, 4], max_new_tokens=3, logits_processor=[Refuse()])
    except ZeroDivisionError as error:
        held.append(str(error))
    del lm, stream, trace
    gc.collect()
    assert model() is None and held
