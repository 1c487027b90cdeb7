"""Passes that there is no memory for become smaller: no request ends by it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import unspool
from tests.engine.fakes import Fake, FakeWithLayers, make_engine, make_lm
from unspool.errors import ResourceError
from unspool.shortage import ShortageError

PROMPTS = [[3 + (7 * place + step) % 18 for step in range(4 + 11 * place % 40)] for place in range(12)]
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"do_sample": True, "seed": 5, "top_k": 6},
    {"logprobs": 2},
    {"num_beams": 2},
    {"repetition_penalty": 1.4},
    {"num_return_sequences": 2, "do_sample": True, "seed": 1},
    {"prompt_lookup_num_tokens": 3},
)


def small(kind: type, most_tokens: int, most_rows: int, late: bool, error: type[Exception]) -> Any:
    """A model that finds no memory for passes of more tokens or rows; `late`: after it has written its keys."""

    class Small(kind):  # type: ignore[misc, valid-type]
        num_short = 0

        def forward(self, tokens: torch.Tensor, cache: Any, **named: Any) -> Any:
            is_large = tokens.numel() > most_tokens or (tokens.shape[1] == 1 and len(tokens) > most_rows)
            if is_large and not late:
                self.num_short += 1
                raise error("CUDA out of memory. Tried to allocate 616.00 MiB")
            answer = super().forward(tokens, cache, **named)
            if is_large:
                self.num_short += 1
                raise error("CUDA out of memory. Tried to allocate 616.00 MiB")
            return answer

    return Small()


@pytest.mark.parametrize("late", [False, True], ids=["before its keys", "after them"])
@pytest.mark.parametrize("error", [torch.cuda.OutOfMemoryError, ShortageError])
@pytest.mark.parametrize(("most_tokens", "most_rows"), [(16, 100), (1000, 3), (9, 4)])
def test_no_request_ends_by_a_shortage(most_tokens: int, most_rows: int, error: type[Exception], late: bool) -> None:
    pytest.importorskip("greenlet")
    asked = [{"max_new_tokens": 12, **KINDS[place % len(KINDS)]} for place in range(len(PROMPTS))]
    alone = [make_lm().generate(prompt, **one).token_ids for prompt, one in zip(PROMPTS, asked, strict=True)]
    model = small(Fake, most_tokens, most_rows, late, error)
    with make_engine(make_lm(model), num_blocks=400, max_rows=32) as engine:
        requests = [engine.submit(prompt, **one) for prompt, one in zip(PROMPTS, asked, strict=True)]
        assert [request.result(60).token_ids for request in requests] == alone
        assert model.num_short and not engine.stats.requests_failed and not engine.stats.blocks_used


def test_what_one_token_has_no_memory_for_is_said() -> None:
    model = small(Fake, 0, 0, False, torch.cuda.OutOfMemoryError)
    with make_engine(make_lm(model)) as engine:
        request = engine.submit([3, 4, 5], max_new_tokens=4)
        with pytest.raises((ResourceError, RuntimeError), match="out of memory"):
            request.result(30)
        assert not engine.stats.blocks_used and not engine.is_closed


def test_passes_become_larger_again() -> None:
    class Passing(Fake):
        most, is_short, largest = 8, True, 0

        def forward(self, tokens: torch.Tensor, cache: Any, **named: Any) -> Any:
            if self.is_short and tokens.numel() > self.most:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory")
            if not self.is_short:
                self.largest = max(self.largest, tokens.numel())
            return super().forward(tokens, cache, **named)

    model = Passing()
    with make_engine(make_lm(model), tokens_per_pass=64) as engine:
        engine.submit([3] * 60, max_new_tokens=2).result(30)
        model.is_short = False
        engine.submit([4], max_new_tokens=900, eos_token_id=None).result(60)
        engine.submit([5] * 60, max_new_tokens=2).result(30)
    assert model.largest > 4 * Passing.most


def test_rows_with_layers_that_are_read_early() -> None:
    pytest.importorskip("greenlet")
    model = small(FakeWithLayers, 12, 2, False, torch.cuda.OutOfMemoryError)
    asked = {"max_new_tokens": 8, "dola_layers": "high"}
    alone = [make_lm(FakeWithLayers()).generate(prompt, **asked).token_ids for prompt in PROMPTS[:4]]
    with make_engine(make_lm(model), num_blocks=400) as engine:
        requests = [engine.submit(prompt, **asked) for prompt in PROMPTS[:4]]
        assert [request.result(60).token_ids for request in requests] == alone


def test_the_usual_memory_leaves_room_for_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    from unspool.engine import memory

    model = make_lm().model
    few, many = memory.count_pass_bytes(model, 512, 8), memory.count_pass_bytes(model, 1 << 20, 4096)
    assert 0 < few < many
    spare = 1 << 20
    monkeypatch.setattr(memory, "_find_free", lambda _: spare)
    blocks = []
    for most in (512, 1 << 14):
        with unspool.Engine(make_lm(), max_rows=8, tokens_per_pass=most) as engine:
            blocks.append(engine.stats.blocks)
    assert blocks[0] > blocks[1]
