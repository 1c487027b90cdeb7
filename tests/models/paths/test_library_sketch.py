"""Greedy steps by a sketch of the head choose what all logits choose, to the bit of a tie."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.conformance.cases import load_model
from tests.models.paths import replacing

import unspool
from unspool.decoding import choice
from unspool.kernels.cpu import find_library, why_missing
from unspool.kernels.cpu.blocks import Blocks
from unspool.kernels.cpu.tiles import unpack_tiles
from unspool.models.paths import sketching
from unspool.models.paths.library_sketch import HeadSketch, can_sketch_in_library
from unspool.models.weights import Linear, iterate_tensors
from unspool.protocols import Want

pytestmark = pytest.mark.skipif(find_library() is None, reason=f"no CPU library: {why_missing()}")


@pytest.fixture(autouse=True)
def small_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sketching, "_FEWEST", 16)
    monkeypatch.setattr(sketching, "_MOST_CLOSE", 2.0)  # a panel has a tenth of these tokens


def make_head(rows: int, columns: int, seed: int, *, bias: bool = False) -> Linear:
    """A head with columns of very different size, as trained ones have."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * torch.randn(columns, generator=generator).exp()
    return Linear(weight, torch.randn(rows, generator=generator) if bias else None)


@pytest.mark.parametrize(("rows", "columns"), [(16, 32), (4100, 64), (333, 160)])
def test_a_sketch_is_as_far_off_as_it_says(rows: int, columns: int) -> None:
    """No logit of any activation is further from the sketch's than its reach, and the reach is no more than needed."""
    library = find_library()
    assert library is not None
    head = make_head(rows, columns, 0)
    sketch = HeadSketch(head, library)
    assert sketch.is_sound
    blocks = unpack_tiles(sketch._tiles.view(-1, columns // 32, 272), "int8", rows)
    assert isinstance(blocks, Blocks)
    levelled, made = head.weight / sketch._powers, blocks.dequantise()
    assert set(torch.frexp(sketch._powers).mantissa.tolist()) == {0.5}, "powers of two lose nothing"
    missing = torch.linalg.vector_norm(levelled - made, dim=1)
    sizes, errors = sketch._reaches
    assert (missing <= sizes).all() and (
        sizes <= 1.01 * missing + 1e-3 * torch.linalg.vector_norm(levelled, dim=1)
    ).all()
    norms = torch.linalg.vector_norm(made, dim=1)
    assert (norms <= errors).all() and (errors <= 1.01 * norms).all()
    x = torch.randn(5, columns, generator=torch.Generator().manual_seed(1)) * 30
    off = (x.double() @ head.weight.double().T - (x * sketch._powers).double() @ made.double().T).abs()
    assert (off <= sizes * torch.linalg.vector_norm(x * sketch._powers, dim=1)[:, None]).all()


def make(name: str, *, dtype: torch.dtype | None = None, sketches: bool = True) -> Any:
    """A model whose weights a dtype holds, with a sketch or without."""
    model = copy.deepcopy(load_model(name).model)
    for tensor in iterate_tensors(model.weights) if dtype is not None else ():
        tensor.copy_(tensor.to(dtype))
    model._refresh()
    model.find_path("library")._described._may_sketch &= sketches
    return model


def find_sketch(model: Any) -> HeadSketch | None:
    found: HeadSketch | None = model.find_path("library")._described._sketch
    return found


PROMPTS = torch.randint(4, 150, (5, 7), generator=torch.Generator().manual_seed(3))
LIKELIEST = Want(is_brief=True, likeliest_only=True)
WAYS: list[dict[str, Any]] = [
    {},
    {"suppress_tokens": list(range(0, 150, 3))},
    {"min_new_tokens": 9, "eos_token_id": list(range(0, 150, 7)), "bad_words_ids": [[5], [11], [140]]},
    {"begin_suppress_tokens": [3, 9], "forced_eos_token_id": 8},
]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", WAYS, ids=["plain", "suppressed", "short", "forced"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "phi", "t5", "bart", "marian"])
def test_the_tokens_are_those_of_all_logits(name: str, way: dict[str, Any], dtype: torch.dtype | None) -> None:
    model, plain = make(name, dtype=dtype), make(name, dtype=dtype, sketches=False)
    for rows in (1, 2, 5):
        check(model, plain, rows, way)


def check(model: Any, plain: Any, rows: int, way: dict[str, Any]) -> None:
    told = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, **way}
    made = unspool.generate(model, PROMPTS[:rows], **told)
    assert find_sketch(model) is not None
    assert torch.equal(made, unspool.generate(plain, PROMPTS[:rows], **told))
    assert find_sketch(plain) is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "can_stretch", lambda step, rows: False)
        assert torch.equal(made, unspool.generate(model, PROMPTS[:rows], **told))


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
def test_a_pass_for_the_likeliest_tokens_alone(name: str) -> None:
    model = make(name)
    for rows in (1, 2, 5):
        cache, other = model.new_cache(rows=rows), model.new_cache(rows=rows)
        prompt = model.forward(PROMPTS[:rows], cache, want=LIKELIEST)  # of several tokens it has logits
        assert torch.equal(prompt.logits, model.forward(PROMPTS[:rows], other).logits)
        tokens = prompt.logits.argmax(-1)[:, None]
        for _ in range(12):
            found, whole = model.forward(tokens, cache, want=LIKELIEST), model.forward(tokens, other)
            assert found.path == "library" and found.logits.shape == (rows, 0) and found.likeliest is not None
            assert found.likeliest.tolist() == whole.logits.argmax(-1).tolist()
            tokens = found.likeliest[:, None]
    assert find_sketch(model) is not None


def test_an_engine_asks_for_the_likeliest_tokens() -> None:
    lm, told = load_model("llama"), {"max_new_tokens": 24, "do_sample": False}
    lm = copy.copy(lm)
    lm.model = make("llama")
    with unspool.Engine(lm) as engine:
        requests = [engine.submit(prompt.tolist(), **told) for prompt in PROMPTS]
        found = [request.result(30).token_ids for request in requests]
    assert find_sketch(lm.model) is not None
    plain = make("llama", sketches=False)
    assert found == [[unspool.generate(plain, prompt[None], **told)[0, 7:].tolist()] for prompt in PROMPTS]


def test_of_equal_logits_the_first_token_is_chosen() -> None:
    model = make("llama")
    weight = model.get_output_embeddings().weight
    first = unspool.generate(model, PROMPTS[:1], max_new_tokens=8, do_sample=False)
    chosen = first[0, 7:].tolist()
    for token in chosen[:4]:
        weight[(token + 40) % len(weight)] = weight[token]  # a twin, before it or after it
    model._refresh()
    plain = make("llama", sketches=False)
    plain.get_output_embeddings().weight.copy_(weight)
    plain._refresh()
    plain.find_path("library")._described._may_sketch = False
    told = {"max_new_tokens": 24, "do_sample": False}
    made = unspool.generate(model, PROMPTS, **told)
    assert find_sketch(model) is not None
    assert torch.equal(made, unspool.generate(plain, PROMPTS, **told))


@pytest.mark.parametrize("way", replacing.WAYS)
def test_a_sketch_never_outlives_its_head(way: str) -> None:
    model, told = make("llama"), {"max_new_tokens": 12, "do_sample": False}
    before = unspool.generate(model, PROMPTS, **told)
    assert find_sketch(model) is not None
    weight = model.get_output_embeddings().weight
    replacing.replace(weight, weight.flip(0), way)
    after = unspool.generate(model, PROMPTS, **told)
    assert not torch.equal(after, before)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "can_stretch", lambda step, rows: False)
        assert torch.equal(after, unspool.generate(model, PROMPTS, **told))


def test_a_sketch_that_leaves_too_many_tokens_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sketching, "_FIRST", 4)
    monkeypatch.setattr(sketching, "_MOST_CLOSE", 0.0)
    model, told = make("llama"), {"max_new_tokens": 24, "do_sample": False}
    made = unspool.generate(model, PROMPTS, **told)
    assert find_sketch(model) is None
    assert torch.equal(made, unspool.generate(model, PROMPTS, **told))
    assert find_sketch(model) is None, "it is not made again"


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e30])
def test_heads_without_a_sketch(bad: float) -> None:
    library = find_library()
    assert library is not None
    head = make_head(64, 32, 0)
    head.weight[7, 3] = bad
    assert not HeadSketch(head, library).is_sound or bad == 1e30  # a power of two makes it small
    assert not can_sketch_in_library(Linear(head.weight.half()))
    assert not can_sketch_in_library(Linear(head.weight[:, :31].contiguous()))
    assert not can_sketch_in_library(Linear(head.weight.T))
    assert not can_sketch_in_library(Linear(head.weight[:15]))
    with torch.inference_mode():
        unwatched = head.weight.clone()
    assert not can_sketch_in_library(Linear(unwatched))


def test_a_bias_of_minus_infinity_is_no_token() -> None:
    library = find_library()
    assert library is not None
    head = make_head(64, 32, 0, bias=True)
    assert head.bias is not None
    head.bias[5] = -torch.inf
    assert HeadSketch(head, library).is_sound
    head.bias[5] = torch.inf
    assert not HeadSketch(head, library).is_sound
