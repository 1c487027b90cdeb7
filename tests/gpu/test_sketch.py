"""Tokens that captured steps find by a sketch of the head: those of all logits.

The kernels of several rows run on a GPU, or slowly in Triton's interpreter, with `TRITON_INTERPRET=1`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.conformance.cases import GOLDENS
from tests.gpu.kernel_checks import DEVICE, DTYPES, HAS_GPU, needs_gpu, pytestmark
from tests.gpu.models import make_model
from tests.gpu.test_captured_choice import check, launched
from tests.gpu.test_captured_pairs import draw_sources, load
from tests.gpu.test_engine import ASKED, PROMPTS

import unspool
from unspool.models.paths import captured_sketch, sketching
from unspool.models.paths.captured_sketch import CapturedSketch, can_sketch_captured, make_sketch
from unspool.models.weights import Linear

__all__ = ["launched", "pytestmark"]

ROWS = [1, 2, 5, 17, 64] if HAS_GPU else [2, 5]
HIDDEN = 96


def draw(vocab: int, dtype: torch.dtype, *, has_bias: bool = False) -> Linear:
    generator = torch.Generator().manual_seed(vocab)
    weight = torch.randn(vocab, HIDDEN, generator=generator) * torch.logspace(-2, 1, HIDDEN)  # columns of all sizes
    bias = torch.randn(vocab, generator=generator) if has_bias else None
    return Linear(weight.to(DEVICE, dtype), None if bias is None else bias.to(DEVICE, dtype))


def choose(sketch: CapturedSketch, x: torch.Tensor, **given: Any) -> list[int]:
    """What a sketch chooses for states (rows, hidden), and that lengths and the log follow."""
    from unspool.kernels.gpu.sampling.sketch import HeadInput

    rows, cap, mask = len(x), given.pop("cap", None), given.pop("mask", None)
    tokens = torch.full((rows,), -7, dtype=torch.int64, device=DEVICE)
    lengths = torch.arange(-1, rows - 1, dtype=torch.int32, device=DEVICE)
    log = torch.full((4, rows), -7, dtype=torch.int64, device=DEVICE)
    sketch.make_choice(rows).choose(HeadInput(x, **given), tokens, lengths, cap, log, mask)
    assert lengths.tolist() == [-1, *range(1, rows)]
    assert [int(log[max(row - 1, 0) % 4, row]) for row in range(rows)] == tokens.tolist()
    return tokens.tolist()


def check_tokens(found: list[int], logits: torch.Tensor) -> None:
    """Each row's token is the likeliest, but for what rounding can change."""
    highest = logits.amax(1)
    allowed = 1e-6 * logits.abs().where(logits.isfinite(), torch.zeros(())).amax(1)
    for row, token in enumerate(found):
        assert logits[row, token] >= highest[row] - allowed[row], (row, token, int(logits[row].argmax()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("vocab", [4096, 5003])
def test_tokens_are_the_likeliest_ones(vocab: int, rows: int, dtype: torch.dtype) -> None:
    head = draw(vocab, dtype, has_bias=vocab % 2 > 0)
    sketch = make_sketch(head)
    assert sketch is not None
    generator = torch.Generator().manual_seed(rows)
    x = (torch.randn(rows, HIDDEN, generator=generator) + 0.5).to(DEVICE, dtype)
    norm, shift = (torch.rand(HIDDEN, generator=generator).to(DEVICE, dtype) for _ in range(2))
    mask = (torch.rand(vocab, generator=generator) < 0.5).to(DEVICE)

    def multiply(state: torch.Tensor) -> torch.Tensor:
        made = state.double() @ head.weight.double().T
        return (made if head.bias is None else made + head.bias.double()).cpu()

    squared = F.rms_norm(x.float(), (HIDDEN,), norm.float(), 1e-5)
    centred = F.layer_norm(x.float(), (HIDDEN,), norm.float(), shift.float(), 1e-5).to(dtype)
    check_tokens(choose(sketch, x), multiply(x))
    check_tokens(choose(sketch, x, has_norm=True, norm=norm, eps=1e-5), multiply(squared))
    given = {"has_norm": True, "norm": norm, "eps": 1e-5, "centres": True, "shift": shift, "is_rounded": True}
    check_tokens(choose(sketch, x, **given), multiply(centred))
    capped = torch.tanh(multiply(x) / 30) * 30
    check_tokens(choose(sketch, x, cap=30.0), capped)
    check_tokens(choose(sketch, x, mask=mask), multiply(x).masked_fill(mask.cpu(), -torch.inf))
    check_tokens(choose(sketch, x, scale=0.125), multiply((x.float() * 0.125).to(dtype)))
    assert sketch._count.item() < 0.2 * 6 * rows * vocab


@pytest.mark.parametrize("rows", ROWS[:3])
def test_ties_and_what_is_no_number(rows: int) -> None:
    head = draw(4500, torch.float32)
    head.weight[700] *= 20  # by far the highest of states of its own direction
    head.weight[3000] = head.weight[700]
    sketch = make_sketch(head)
    assert sketch is not None
    x = head.weight[700].expand(rows, -1).clone()
    x /= x.norm()
    assert choose(sketch, x * 1e3) == [700] * rows
    mask = torch.zeros(4500, dtype=torch.bool, device=DEVICE)
    mask[:11] = True
    assert choose(sketch, torch.zeros_like(x), mask=mask) == [11] * rows  # every token ties
    assert choose(sketch, x, mask=torch.ones_like(mask)) == [-1] * rows
    x[0, 5] = torch.nan
    assert choose(sketch, x)[0] == -1
    x[0, 5] = torch.inf
    expected = (x @ head.weight.T).cpu()
    found = choose(sketch, x)
    assert expected[0, found[0]] == torch.inf
    check_tokens(found[1:], expected[1:].double())


def test_biases_may_forbid_tokens() -> None:
    head = draw(4500, torch.float32, has_bias=True)
    assert head.bias is not None
    head.bias[: 4500 - 3] = -torch.inf
    sketch = make_sketch(head)
    assert sketch is not None
    x = torch.randn(2, HIDDEN, device=DEVICE)
    expected = x @ head.weight[-3:].T + head.bias[-3:]
    assert choose(sketch, x) == (4497 + expected.argmax(1)).tolist()


def test_heads_that_are_not_sketched(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not can_sketch_captured(draw(4500, torch.float32))  # too small to gain
    monkeypatch.setattr(captured_sketch, "LEAST_NUMBERS", 0)
    assert not can_sketch_captured(draw(4500, torch.float32))  # 96 columns
    monkeypatch.setattr(captured_sketch, "COLUMNS", 32)
    head = draw(4500, torch.float32)
    assert can_sketch_captured(head)
    assert not can_sketch_captured(draw(4000, torch.float32))
    head.weight[7, 7] = torch.inf
    assert make_sketch(head) is None
    if HAS_GPU:
        monkeypatch.setattr(captured_sketch, "_OF_FREE_MEMORY", 1e-9)
        assert make_sketch(draw(4500, torch.float32)) is None


@pytest.fixture
def sketched(monkeypatch: pytest.MonkeyPatch) -> list[CapturedSketch]:
    """Heads of any size are sketched; the sketches that were made."""
    made: list[CapturedSketch] = []
    make = captured_sketch.CapturedSketch.__init__

    def note(self: CapturedSketch, head: Linear, *given: Any) -> None:
        if head.weight.is_cuda:  # otherwise kernels are compiled ahead
            made.append(self)
        make(self, head, *given)

    monkeypatch.setattr(captured_sketch.CapturedSketch, "__init__", note)
    monkeypatch.setattr(captured_sketch, "LEAST_NUMBERS", 0)
    monkeypatch.setattr(captured_sketch, "COLUMNS", 4)
    monkeypatch.setattr(sketching, "_FEWEST", 2)
    monkeypatch.setattr(sketching, "_MOST_CLOSE", 2.0)  # most of so few tokens are close
    return made


WAYS: list[dict[str, Any]] = [
    {},
    {"suppress_tokens": [4, 5, 6]},
    {"bad_words_ids": [[7], [8]], "min_new_tokens": 9},
]


@needs_gpu
@pytest.mark.parametrize("settings", WAYS, ids=str)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("window", [None, 9])
def test_a_decoder_chooses_the_same(
    settings: dict[str, Any], rows: int, window: int | None, sketched: list[CapturedSketch], request: Any
) -> None:
    ids = torch.randint(3, 90, (rows, 7), generator=torch.Generator().manual_seed(rows)).cuda()
    check(make_model(window, torch.float32), {"inputs": ids}, {**settings, "do_sample": False}, request)
    assert len(sketched) == 1 and sketched[0]._count.item() > 0


@needs_gpu
@pytest.mark.parametrize("settings", WAYS, ids=str)
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["bart", "whisper", "t5-gated-wide", "t5-wide", "marian", "m2m_100", "pegasus-wide"])
def test_an_encoder_decoder_chooses_the_same(
    settings: dict[str, Any], rows: int, name: str, dtype: torch.dtype, sketched: list[CapturedSketch], request: Any
) -> None:
    source = {key: value.cuda() for key, value in draw_sources(name, rows, 9).items()}
    source |= {key: value.to(dtype) for key, value in source.items() if value.is_floating_point()}
    check(load(name, "cuda", dtype), source, {**settings, "do_sample": False}, request)
    is_fused = rows == 1 or dtype != torch.float32 or name not in ("bart", "marian")  # others are torch's operators
    assert [sketch._count.item() > 0 for sketch in sketched] == [True] * is_fused


def test_a_change_of_the_head_is_seen() -> None:
    for change in (
        lambda weight: weight.neg_(),
        lambda weight: weight.data.neg_(),
        lambda weight: weight.data[9].add_(1),
    ):
        head = draw(4500, torch.float32)
        sketch = make_sketch(head)
        assert sketch is not None and sketch.is_same(begins=True)
        change(head.weight)
        assert not sketch.is_same(begins=True)
        assert sketch.is_same(begins=False) == sketch.is_current()  # looked at a moment ago
        sketch._compared_at -= 2.0
        assert not sketch.is_same(begins=False)


@needs_gpu
@pytest.mark.parametrize("is_counted", [False, True])
def test_a_head_that_changes_is_read_again(
    is_counted: bool, sketched: list[CapturedSketch], launched: list[int]
) -> None:
    model = make_model(None, torch.float32)
    ids = torch.randint(3, 90, (1, 7), generator=torch.Generator().manual_seed(1)).cuda()
    asked: dict[str, Any] = {"max_new_tokens": 20, "eos_token_id": None, "do_sample": False}
    before = unspool.generate(model, ids, **asked).tolist()
    with torch.no_grad():
        weight = model.weights.head.weight
        (weight if is_counted else weight.data).neg_()
    after = unspool.generate(model, ids, **asked).tolist()
    fresh = make_model(None, torch.float32)
    with torch.no_grad():
        fresh.weights.head.weight.neg_()
    assert after == unspool.generate(fresh, ids, **asked).tolist() != before
    assert max(launched) > 1 and len(sketched) == 2


@needs_gpu
def test_a_sketch_that_leaves_too_many_tokens_is_given_up(
    sketched: list[CapturedSketch], monkeypatch: pytest.MonkeyPatch, launched: list[int]
) -> None:
    model = make_model(None, torch.float32)
    ids = torch.randint(3, 90, (1, 7), generator=torch.Generator().manual_seed(1)).cuda()
    monkeypatch.setattr(sketching, "_MOST_CLOSE", 0.0)
    asked: dict[str, Any] = {"max_new_tokens": 150, "eos_token_id": None, "do_sample": False}
    found = unspool.generate(model, ids, **asked).tolist()
    count = sketched[0]._count.item()
    assert count > 0 and max(launched) > 1
    assert unspool.generate(model, ids, **asked).tolist() == found
    assert len(sketched) == 1 and sketched[0]._count.item() == count


@needs_gpu
@pytest.mark.parametrize("is_mixed", [False, True])
def test_an_engine_chooses_the_same(is_mixed: bool, sketched: list[CapturedSketch]) -> None:
    """Greedy rows alone, and with rows of other kinds that come and go beside them."""
    lm = unspool.load(GOLDENS / "models" / "llama", device="cuda", dtype=torch.float32)
    asked = [ASKED[place % len(ASKED)] if is_mixed and place % 3 else {"max_new_tokens": 40} for place in range(24)]
    with unspool.Engine(lm) as engine:
        first = engine.submit(PROMPTS[0], max_new_tokens=60, eos_token_id=None)
        next(iter(first))
        requests = [engine.submit(prompt, **one) for prompt, one in zip(PROMPTS, asked, strict=True)]
        found = [request.result(60).token_ids for request in requests]
        whole = first.result(60).token_ids
    assert len(sketched) == 1 and sketched[0]._count.item() > 0
    lm.model.find_path("captured")._may_sketch = False
    assert found == [lm.generate(prompt, **one).token_ids for prompt, one in zip(PROMPTS, asked, strict=True)]
    assert whole == lm.generate(PROMPTS[0], max_new_tokens=60, eos_token_id=None).token_ids
