"""Steps taken several at a time give what steps one by one give, at every turn."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import unspool
from tests.conformance.cases import load_model
from tests.fakes import FakeModel, pad_left
from unspool.api.starting import start
from unspool.cache import Cache
from unspool.decoding import choice
from unspool.decoding.strategies import stretch
from unspool.errors import NoTokenLeftError, SettingError
from unspool.kernels.cpu import find_library
from unspool.logits import RepetitionPenaltyLogitsProcessor
from unspool.protocols import Choose, Stretch
from unspool.stopping import MaxTimeCriteria, StoppingCriteria

needs_library = pytest.mark.skipif(find_library() is None, reason="the C library is not built")


class Stretching(FakeModel):
    """A fake that takes several steps in a call, by passes of its own."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.info = type(self.info)(**{**vars(self.info), "can": self.info.can | {"stretches"}})
        self.sizes: list[int] = []  # steps asked for, a call each

    def take_steps(
        self,
        tokens: Sequence[int],
        cache: Cache,
        num_steps: int,
        ends: tuple[int, ...],
        choose: Choose | None = None,
        forbidden: tuple[int, ...] = (),
    ) -> Stretch | None:
        self.sizes.append(num_steps)
        held, passes, steps = list(cache.lengths), self.num_passes, []
        for _ in range(num_steps):
            logits = self.forward(torch.tensor(tokens)[:, None], cache).logits
            is_bad = ~logits.isfinite().all(dim=1)
            logits[:, list(forbidden)] = -torch.inf
            tokens = [-1 if bad else int(row.argmax()) for row, bad in zip(logits, is_bad, strict=True)]
            tokens = tokens if choose is None else choose(tokens, logits)
            steps.append(list(tokens))
            if min(tokens) < 0 or set(tokens) & set(ends):
                break
        cache.truncate(held)
        self.num_passes = passes
        return Stretch(steps, path="stretched")


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time limits nothing, so that calls are as long as they may be."""
    monkeypatch.setattr(stretch, "SECONDS_AT_ONCE", 1e9)


def one_by_one(call: Any) -> Any:
    """What a call gives whose steps are taken one by one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "can_stretch", lambda step, rows: False)
        return call()


def follow(model: Any, inputs: dict[str, Any], **more: Any) -> list[Any]:
    """Every turn of a stream: what it told, what the cache then held, and the figures."""
    cache, told = unspool.DynamicCache(), []
    run = start(model, **inputs, past_key_values=cache, pad_token_id=0, **more)
    for emitted in run:
        told.append((emitted.tokens, emitted.finished, list(cache.lengths), run.stats.forward_passes))
    held = [row[:, :length].tolist() for row, length in zip(cache.key_cache[0], cache.lengths, strict=True)]
    return [*told, list(cache.lengths), held]  # what lies past a row's end is nobody's


WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"do_sample": True, "top_k": 0, "seed": 3},
    {"do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "seed": 4},
    {"do_sample": True, "top_k": 0, "top_p": 0.8, "min_p": 0.02, "temperature": 1.3, "seed": 5},
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 2, "min_new_tokens": 3},
    {"do_sample": True, "repetition_penalty": 1.2, "sequence_bias": {(3,): 2.0}, "seed": 6},
    {"do_sample": True, "top_k": 0, "watermarking_config": unspool.WatermarkingConfig(bias=3.0), "seed": 7},
    {
        "do_sample": True,
        "top_k": 0,
        "watermarking_config": unspool.GumbelWatermarkingConfig(context_width=2),
        "seed": 8,
    },
    {"do_sample": True, "typical_p": 0.8, "epsilon_cutoff": 0.01, "seed": 9},
    {
        "do_sample": True,
        "temperature": 0.8,
        "repetition_penalty": 1.1,
        "watermarking_config": unspool.SynthIDTextWatermarkingConfig(ngram_len=3, keys=[7, 12, 99]),
        "seed": 10,
    },
    {
        "do_sample": True,
        "top_k": 0,
        "watermarking_config": unspool.WatermarkingConfig(bias=3.0, seeding_scheme="selfhash", context_width=3),
        "seed": 11,
    },
    {  # the first tokens of a short text are unmarked
        "do_sample": True,
        "top_k": 0,
        "watermarking_config": unspool.WatermarkingConfig(bias=8.0, context_width=5),
        "seed": 13,
    },
    {
        "do_sample": True,
        "top_k": 4,
        "watermarking_config": unspool.GumbelWatermarkingConfig(context_width=1),
        "seed": 12,
    },
)


@settings(max_examples=40)
@given(
    rows=st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=7), min_size=1, max_size=4),
    ends=st.lists(st.integers(0, 22), max_size=3),
    num_new=st.integers(3, 20),
    most=st.integers(1, 9),
    stop=st.none() | st.integers(0, 22),
    way=st.sampled_from(WAYS),
)
def test_every_turn_is_that_of_single_steps(
    rows: list[list[int]], ends: list[int], num_new: int, most: int, stop: int | None, way: dict[str, Any]
) -> None:
    class Stops(StoppingCriteria):
        """Ends the rows whose last token this is: what a model does not know of."""

        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return input_ids[:, -1] == stop

    model, inputs = Stretching(), pad_left(rows)
    more: dict[str, Any] = {"max_new_tokens": num_new, "eos_token_id": ends or None, **way}
    if stop is not None:
        more["stopping_criteria"] = [Stops()]
    expected = one_by_one(lambda: follow(model, inputs, **more))
    generated = one_by_one(lambda: unspool.generate(model, **inputs, **more))
    assert not model.sizes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stretch.StretchTurns, "__init__", _limited(most))
        assert follow(model, inputs, **more) == expected
        assert unspool.generate(model, **inputs, **more).tolist() == generated.tolist()
    assert max(model.sizes, default=0) <= most


@pytest.mark.parametrize("seed", range(8))
def test_a_text_shorter_than_its_context_is_not_marked_yet(seed: int) -> None:
    def call() -> Any:
        mark = unspool.WatermarkingConfig(bias=20.0, context_width=5)
        more: dict[str, Any] = {"do_sample": True, "top_k": 0, "seed": seed, "watermarking_config": mark}
        return unspool.generate(Stretching(), **pad_left([[3]]), max_new_tokens=7, eos_token_id=None, **more)

    assert torch.equal(call(), one_by_one(call))


START = stretch.StretchTurns.__init__


def _limited(most: int) -> Any:
    def start(self: stretch.StretchTurns, *args: Any, **more: Any) -> None:
        START(self, *args, **more)
        self.most_steps = most

    return start


def test_a_call_takes_as_many_steps_as_time_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Stretching()
    unspool.generate(model, torch.tensor([[1, 2]]), max_new_tokens=200, eos_token_id=None)
    assert model.sizes[0] == 64 and sum(model.sizes) == 199  # the first token is the prompt's
    monkeypatch.setattr(stretch, "SECONDS_AT_ONCE", 1e-12)
    model.sizes.clear()
    unspool.generate(model, torch.tensor([[1, 2]]), max_new_tokens=8, eos_token_id=None)
    assert model.sizes == [1] * 7
    monkeypatch.setattr(stretch, "SECONDS_AT_ONCE", 0.02)
    turns = stretch.StretchTurns(None, None, None, None, False)
    assert stretch.SECONDS_AT_ONCE / turns.seconds >= 1, "the first call measures"


@pytest.mark.parametrize(
    "more",
    [
        {"logits_processor": [lambda ids, scores: scores]},
        {"output_scores": True, "return_dict_in_generate": True},
        {"logprobs": 1, "return_dict_in_generate": True},
        {"output_hidden_states": True, "return_dict_in_generate": True},
        {"use_cache": False},
        {"num_beams": 2},
        {"guidance_scale": 1.5},
    ],
    ids=" and ".join,
)
def test_what_must_be_seen_in_between_is(more: dict[str, Any]) -> None:
    model = Stretching()
    unspool.generate(model, torch.tensor([[1, 2]]), max_new_tokens=6, eos_token_id=3, **more)
    assert not model.sizes


def test_time_is_asked_for_at_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(MaxTimeCriteria, "is_over", lambda self: asked.append(0) or len(asked) == 5)
    model, cache = Stretching(), unspool.DynamicCache()
    output = unspool.generate(
        model,
        torch.tensor([[1, 2]]),
        max_new_tokens=30,
        max_time=100.0,
        eos_token_id=None,
        past_key_values=cache,
        return_dict_in_generate=True,
    )
    assert output.sequences.shape == (1, 7) and cache.lengths == [6] and output.stats.forward_passes == 5


def test_a_stream_that_is_closed_leaves_what_single_steps_leave() -> None:
    model, ids = Stretching(), torch.tensor([[1, 2, 3]])

    def begin() -> tuple[list[int], Any]:
        cache = unspool.DynamicCache()
        run = unspool.stream(model, ids, max_new_tokens=30, eos_token_id=None, past_key_values=cache)
        tokens = [next(run).tokens[0][0] for _ in range(4)]
        run.close()
        return tokens, cache

    (tokens, cache), (expected, other) = begin(), one_by_one(begin)
    assert tokens == expected and cache.lengths == other.lengths == [6]
    assert model.sizes == [29]
    whole = torch.tensor([[*ids[0].tolist(), *tokens]])
    found = unspool.generate(model, whole, max_new_tokens=9, eos_token_id=None, past_key_values=cache)
    assert (
        found.tolist()
        == one_by_one(lambda: unspool.generate(model, ids, max_new_tokens=13, eos_token_id=None)).tolist()
    )


def test_no_token_left_is_explained_at_its_own_step() -> None:
    class Failing(Stretching):
        def forward(self, *args: Any, **more: Any) -> Any:
            forward = super().forward(*args, **more)
            if max(args[1].lengths) > 6:
                forward.logits.fill_(float("nan"))
            return forward

    errors = []
    for call in (one_by_one, lambda call: call()):
        model = Failing()
        with pytest.raises(NoTokenLeftError) as caught:
            call(
                lambda model=model: unspool.generate(
                    model, torch.tensor([[1, 2, 3]]), max_new_tokens=9, eos_token_id=None
                )
            )
        errors.append((str(caught.value), model.sizes))
    assert errors[0][0] == errors[1][0] and "position 7" in errors[0][0] and errors[1][1] == [8, 5]


# --- the library -------------------------------------------------------------------------------------------
IDS = torch.randint(3, 90, (5, 6), generator=torch.Generator().manual_seed(2))
MASK = torch.tensor([[1] * 6, [0] * 2 + [1] * 4, [0] * 5 + [1], [1] * 6, [0] + [1] * 5])


@needs_library
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "mistral", "gpt_neox", "qwen3"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("ends", [None, list(range(0, 160, 9))], ids=["no ends", "ends"])
def test_the_library_takes_the_steps_of_single_calls(
    name: str, kind: str, ends: list[int] | None, request: Any
) -> None:
    """Same tokens, and keys that are the same bit by bit."""
    model = load_model(name).model
    calls: list[int] = []
    take = type(model).take_steps

    def note(self: Any, tokens: Any, *args: Any) -> Any:
        calls.append(len(tokens))
        return take(self, tokens, *args)

    request.getfixturevalue("monkeypatch").setattr(type(model), "take_steps", note)
    ways = WAYS if (name, kind) == ("llama", "dynamic") else WAYS[:3]

    def call(rows: int, way: dict[str, Any]) -> Any:
        output = unspool.generate(
            model,
            IDS[:rows],
            attention_mask=MASK[:rows],
            max_new_tokens=24,
            eos_token_id=ends,
            pad_token_id=0,
            cache_implementation=kind,
            return_dict_in_generate=True,
            **way,
        )
        keys = [
            [buffer[row, :length].tolist() for row, length in enumerate(output.past_key_values.lengths)]
            for buffer in output.past_key_values.places().buffers
        ]
        return output.sequences.tolist(), output.stats.forward_passes, output.stats.path, keys

    for way, rows in product(ways, (1, 5)):
        expected = one_by_one(lambda rows=rows, way=way: call(rows, way))
        assert not calls
        assert call(rows, way) == expected
        assert ends or calls[0] == rows
        calls.clear()


@needs_library
def test_rows_that_leave_are_left_out() -> None:
    model = load_model("llama").model
    more: dict[str, Any] = {"max_new_tokens": 40, "eos_token_id": list(range(0, 160, 9)), "pad_token_id": 0}
    expected = one_by_one(lambda: unspool.generate(model, IDS, attention_mask=MASK, **more))
    assert len({row.index(0) for row in expected[:, 6:].tolist() if 0 in row}) > 1, "choose other ends"
    assert unspool.generate(model, IDS, attention_mask=MASK, **more).tolist() == expected.tolist()


@needs_library
@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("kind", ["quantized", "quantized_static"])
@pytest.mark.parametrize("rows", [1, 5])
def test_a_stretch_ends_where_a_block_is_packed(
    name: str, kind: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What single steps read packed is read packed in a stretch: same tokens, and the same blocks bit by bit."""
    model = load_model(name).model
    lengths: list[int] = []
    take = type(model).take_steps

    def note(self: Any, *args: Any) -> Any:
        made = take(self, *args)
        lengths.append(len(made.steps))
        assert made.path == "library"
        return made

    monkeypatch.setattr(type(model), "take_steps", note)

    def call() -> Any:
        output = unspool.generate(
            model,
            IDS[:rows],
            attention_mask=MASK[:rows],
            max_new_tokens=40,
            eos_token_id=None,
            pad_token_id=0,
            cache_implementation=kind,
            cache_config={"nbits": 2, "q_group_size": 6, "residual_length": 3},
            return_dict_in_generate=True,
        )
        cache = output.past_key_values
        held = [
            tensor.tolist() for store in cache._store.layers for tensor in store.keys.tensors() + store.values.tensors()
        ]
        return output.sequences.tolist(), output.stats.forward_passes, held, cache._store.layers[0].num_packed

    expected = one_by_one(call)
    assert not lengths and min(expected[-1]) > 20
    assert call() == expected
    assert max(lengths) == 6 if rows == 1 else 1 < max(lengths) < 6  # rows of several lengths pack at different steps


@needs_library
@pytest.mark.parametrize("kind", ["sliding_window", "sink", "offloaded", "paged"])
def test_kinds_that_keep_keys_otherwise_take_single_steps(kind: str) -> None:
    model = load_model("mistral").model
    more: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": None, "cache_implementation": kind}
    expected = one_by_one(lambda: unspool.generate(model, IDS[:1], **more))
    assert unspool.generate(model, IDS[:1], **more).tolist() == expected.tolist()


@needs_library
def test_a_drafter_that_rests_stretches() -> None:
    model = load_model("llama").model
    more: dict[str, Any] = {"max_new_tokens": 90, "eos_token_id": None}
    expected = unspool.generate(model, IDS[:1], **more)
    found = unspool.generate(model, IDS[:1], speculate="auto", return_dict_in_generate=True, **more)
    assert found.sequences.tolist() == expected.tolist() and found.stats.forward_passes <= 90


@needs_library
def test_what_was_chosen_before_a_failure_is_told_first(monkeypatch: pytest.MonkeyPatch) -> None:
    model, told = load_model("llama").model, []
    process = RepetitionPenaltyLogitsProcessor.__call__

    def fail(self: Any, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] >= 9:
            raise SettingError("no more than nine")
        return process(self, input_ids, scores)

    monkeypatch.setattr(RepetitionPenaltyLogitsProcessor, "__call__", fail)
    with pytest.raises(SettingError, match="no more than nine"):
        for emitted in start(model, torch.tensor([[5, 17, 90]]), max_new_tokens=20, repetition_penalty=1.2):
            told.append(emitted.tokens)
    assert len(told) == 6


def test_mirostat_goes_on_when_other_rows_have_ended() -> None:
    """What it remembers of a step is its row's, whoever has left in between."""
    lm = load_model("llama")
    told = {"do_sample": True, "mirostat_tau": 2.0, "eos_token_id": None}
    alone = lm.generate([[5, 6, 7]], max_new_tokens=16, seed=3, **told)
    for others in ([2, 3], [5, 1], [7, 8]):
        found = lm.generate([[5, 6, 7], [9, 8], [11, 12, 13]], max_new_tokens=[16, *others], seed=[3, 4, 5], **told)
        assert found.token_ids[0] == alone.token_ids[0]
