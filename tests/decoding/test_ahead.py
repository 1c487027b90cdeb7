"""Steps launched ahead of their tokens give what steps one by one give. The device is played by the CPU here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import unspool
from tests.conformance.cases import load_model
from tests.grammar.tiny import load_tiny
from unspool.decoding import choice
from unspool.decoding.randomness import draw_uniform
from unspool.decoding.rows import Rows
from unspool.decoding.select import draw
from unspool.decoding.strategies import ahead as strategies_ahead
from unspool.decoding.strategies.ahead import AheadTurns
from unspool.errors import NoTokenLeftError
from unspool.kernels.token_choice import TokenChoice


def read_history(rows: Rows, width: int | None = None) -> torch.Tensor:
    return rows._on_host.read(rows.history(width))


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> list[AheadTurns]:
    """Calls run ahead from now on; the turns that were made for them."""
    made: list[AheadTurns] = []
    start = AheadTurns.__init__

    def note(self: AheadTurns, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(AheadTurns, "__init__", note)
    monkeypatch.setattr(Rows, "read_history", read_history)
    monkeypatch.setattr(choice, "can_run_ahead", lambda *_, **__: True)
    return made


def generate(ids: torch.Tensor, **settings: Any) -> Any:
    return unspool.generate(load_model("llama").model, ids, pad_token_id=0, **settings)


IDS = torch.randint(3, 90, (5, 6), generator=torch.Generator().manual_seed(2))
SETTINGS: list[dict[str, Any]] = [
    {"eos_token_id": None},
    {"eos_token_id": list(range(0, 160, 9))},  # rows end at different steps
    {"do_sample": True, "seed": 3, "top_k": 20, "temperature": 1.5, "eos_token_id": list(range(0, 160, 7))},
    {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "eos_token_id": 5},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("count", [1, 2, 17])
def test_tokens_are_those_of_steps_one_by_one(settings: dict[str, Any], count: int, request: Any) -> None:
    expected = generate(IDS, max_new_tokens=count, **settings)
    made = request.getfixturevalue("ahead")
    assert generate(IDS, max_new_tokens=count, **settings).tolist() == expected.tolist()
    assert len(made) == 1 and not made[0].flights


@pytest.mark.parametrize(
    "asked",
    [{"logprobs": 2}, {"logprobs": 0, "do_sample": True, "seed": 3}, {"logprobs": 1, "num_return_sequences": 2}],
)
def test_log_probabilities_and_stop_strings_come_behind_the_step(asked: dict[str, Any], request: Any) -> None:
    lm = load_tiny("llama")
    prompts = [[5, 17, 90], [40, 41], [100, 7, 8]]
    asked = {"max_new_tokens": 30, "eos_token_id": None, "seed": 3, "do_sample": True, "temperature": 2.0, **asked}
    free = lm.generate(prompts, **asked)
    stops = [free.texts[1][6:9], free.texts[0][12:14]]
    expected = lm.generate(prompts, stop_strings=stops, **asked)
    assert len({len(tokens) for tokens in expected.token_ids}) > 1
    made = request.getfixturevalue("ahead")
    for settings, wanted in (({}, free), ({"stop_strings": stops}, expected)):
        found = lm.generate(prompts, **settings, **asked)
        assert found.token_ids == wanted.token_ids and found.finish_reasons == wanted.finish_reasons
        assert found.logprobs == wanted.logprobs and found.texts == wanted.texts
    assert len(made) == 2


@pytest.mark.parametrize(
    ("asked", "runs"),
    [
        ({}, True),
        ({"logprobs": 2}, True),
        ({"stop_strings": ["never there"]}, True),
        ({"stop_strings": ["never there"], "logprobs": 1}, True),
        ({"logits_processor": [lambda ids, scores: scores]}, False),
        ({"stopping_criteria": [lambda ids, scores: False]}, False),
    ],
    ids=["greedy", "logprobs", "a stop string", "both", "a caller's processor", "a caller's criterion"],
)
def test_what_steps_can_be_launched_ahead_for(
    asked: dict[str, Any], runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[bool] = []

    def ask(scorer: Any, strategy: Any, rows: Rows, finish: Any, *, rows_may_leave: bool) -> bool:
        monkeypatch.setattr(Rows, "device", torch.device("cuda"))
        answers.append(strategies_ahead.can_run_ahead(scorer, strategy, rows, finish, rows_may_leave=rows_may_leave))
        monkeypatch.undo()
        return False

    monkeypatch.setattr(choice, "can_run_ahead", ask)
    load_tiny("llama").generate([[5, 17, 90], [40, 41]], max_new_tokens=3, **asked)
    assert answers == [runs]


def test_grammars_read_the_tokens_that_are_on_their_way(request: Any) -> None:
    schemas = [{"enum": ["ab", 7]}, {"type": "array", "items": {"type": "boolean"}, "minItems": 3}, None]
    asked: dict[str, Any] = {"json_schema": schemas, "max_new_tokens": 24, "eos_token_id": 2, "drafter": False}
    prompts = [[5, 17, 90], [40, 41], [100, 7, 8]]
    expected = load_tiny("llama").generate(prompts, **asked)
    made = request.getfixturevalue("ahead")
    assert load_tiny("llama").generate(prompts, **asked).token_ids == expected.token_ids
    assert len(made) == 1 and len({len(tokens) for tokens in expected.token_ids}) > 1  # rows left at different steps


def test_a_given_cache_is_left_as_steps_one_by_one_leave_it(ahead: list[AheadTurns]) -> None:
    cache = unspool.DynamicCache()
    first = generate(IDS[:1], max_new_tokens=4, eos_token_id=None, past_key_values=cache)
    assert cache.lengths == [first.shape[1] - 1]
    second = generate(first, max_new_tokens=4, eos_token_id=None, past_key_values=cache)
    assert second.tolist() == generate(IDS[:1], max_new_tokens=8, eos_token_id=None).tolist()
    assert len(ahead) == 3


def test_a_stream_that_is_closed_forgets_what_was_launched(ahead: list[AheadTurns]) -> None:
    cache = unspool.DynamicCache()
    stream = unspool.stream(
        load_model("llama").model, IDS[:1], max_new_tokens=9, eos_token_id=None, past_key_values=cache
    )
    for _ in range(3):
        next(stream)
    stream.close()
    assert cache.lengths == [IDS.shape[1] + 2] and not ahead[0].flights


MAMBA_SETTINGS = [*SETTINGS, {"num_return_sequences": 2, "do_sample": True, "seed": 1, "eos_token_id": [9, 18, 27]}]


@pytest.mark.parametrize("settings", MAMBA_SETTINGS, ids=str)
@pytest.mark.parametrize("count", [1, 2, 17])
def test_states_run_ahead_too(settings: dict[str, Any], count: int, request: Any) -> None:
    model = load_model("mamba").model
    expected = unspool.generate(model, IDS, max_new_tokens=count, pad_token_id=0, **settings)
    made = request.getfixturevalue("ahead")
    found = unspool.generate(model, IDS, max_new_tokens=count, pad_token_id=0, **settings)
    assert found.tolist() == expected.tolist()
    assert len(made) == 1 and not made[0].flights


@pytest.mark.parametrize("ends", [None, list(range(0, 160, 3))], ids=["by length", "by an end"])
def test_a_cache_of_states_is_left_as_steps_one_by_one_leave_it(ends: list[int] | None, request: Any) -> None:
    model = load_model("mamba").model

    def run() -> tuple[list[list[int]], list[int], torch.Tensor]:
        cache = model.new_cache(rows=1)
        told = {"max_new_tokens": 12, "eos_token_id": ends, "pad_token_id": 0, "past_key_values": cache}
        made = unspool.generate(model, IDS[:1], **told)
        return made.tolist(), list(cache.lengths), cache.ssm_states.clone()

    tokens, lengths, states = run()
    made = request.getfixturevalue("ahead")
    again, new_lengths, new_states = run()
    assert (again, new_lengths) == (tokens, lengths) and lengths == [len(tokens[0]) - 1]
    assert torch.equal(new_states, states)
    assert len(made) == 1


def test_a_stream_of_states_that_is_closed_forgets_what_was_launched(ahead: list[AheadTurns]) -> None:
    model = load_model("mamba").model
    cache = model.new_cache(rows=1)
    stream = unspool.stream(model, IDS[:1], max_new_tokens=9, eos_token_id=None, past_key_values=cache)
    for _ in range(3):
        next(stream)
    stream.close()
    assert cache.lengths == [IDS.shape[1] + 2] and not ahead[0].flights


@pytest.mark.parametrize("first", [0, 2])
def test_no_token_left_of_states_is_explained_at_its_own_step(ahead: list[AheadTurns], first: int) -> None:
    """A state can't go back two steps: the logits of the step in question are still there."""
    model, place = load_model("mamba").model, IDS.shape[1] + first

    class Silence(unspool.LogitsProcessor):
        """Leaves no token from a place on."""

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return torch.full_like(scores, -torch.inf) if input_ids.shape[1] >= place else scores

    with pytest.raises(NoTokenLeftError, match=rf"row 0, at position {place}\b"):
        unspool.generate(
            model, IDS[:1], pad_token_id=0, eos_token_id=None, logits_processor=[Silence()], max_new_tokens=6
        )
    assert len(ahead) == 1


def test_forward_passes_do_not_count_the_forgotten(ahead: list[AheadTurns]) -> None:
    output = generate(IDS[:1], max_new_tokens=6, eos_token_id=list(range(160)), return_dict_in_generate=True)
    assert output.stats.forward_passes == 1 and output.stats.new_tokens == 1
    assert len(ahead) == 1


def test_no_token_left_is_explained_at_its_own_step(ahead: list[AheadTurns]) -> None:
    with pytest.raises(NoTokenLeftError, match=r"row 0, at position 6\b"):
        generate(IDS, suppress_tokens=list(range(load_model("llama").model.info.vocab_size)), max_new_tokens=5)


CONTRASTIVE: list[dict[str, Any]] = [
    {"eos_token_id": None},
    {"eos_token_id": list(range(0, 160, 9))},
    {"low_memory": True, "eos_token_id": None},
    {"repetition_penalty": 1.4, "eos_token_id": 5},
]


@pytest.mark.parametrize("settings", CONTRASTIVE, ids=str)
@pytest.mark.parametrize("count", [1, 2, 11])
def test_candidates_are_tried_ahead_too(settings: dict[str, Any], count: int, request: Any) -> None:
    asked = {"penalty_alpha": 0.6, "top_k": 4, "max_new_tokens": count, **settings}
    ids = IDS.clone()
    ids[1, :3] = 0
    asked["attention_mask"] = (ids != 0).long()
    expected = generate(ids, return_dict_in_generate=True, **asked)
    made = request.getfixturevalue("ahead")
    found = generate(ids, return_dict_in_generate=True, **asked)
    assert found.sequences.tolist() == expected.sequences.tolist()
    assert found.stats.forward_passes == expected.stats.forward_passes
    assert len(made) == 1 and not made[0].flights


def test_a_cache_is_left_as_candidates_one_by_one_leave_it(ahead: list[AheadTurns]) -> None:
    cache = unspool.DynamicCache()
    asked = {"penalty_alpha": 0.6, "top_k": 4, "eos_token_id": None}
    first = generate(IDS[:1], max_new_tokens=4, past_key_values=cache, **asked)
    assert cache.lengths == [first.shape[1] - 1]
    second = generate(first, max_new_tokens=4, past_key_values=cache, eos_token_id=None)
    assert second.tolist() == generate(first, max_new_tokens=4, eos_token_id=None).tolist()
    assert len(ahead) == 3


def test_no_token_left_is_explained_at_the_step_of_its_candidates(ahead: list[AheadTurns]) -> None:
    model = load_model("llama").model
    asked = {"penalty_alpha": 0.6, "top_k": 4, "max_new_tokens": 6}

    class Silence(unspool.LogitsProcessor):
        """Leaves no token from the third place on."""

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return torch.full_like(scores, -torch.inf) if input_ids.shape[1] > IDS.shape[1] + 1 else scores

    with pytest.raises(NoTokenLeftError, match=r"row 0, at position 8\b"):
        unspool.generate(model, IDS[:2], pad_token_id=0, eos_token_id=None, logits_processor=[Silence()], **asked)
    assert len(ahead) == 1


# --- several steps launched together ------------------------------------------------------------------------------
def choose(logits: torch.Tensor, choice: TokenChoice, positions: torch.Tensor) -> torch.Tensor:
    """What a captured pass chooses, in plain torch."""
    scores, given = logits, choice.settings
    assert choice.sizes.is_masked == (choice.mask is not None) and set(given) == set(choice.sizes.parts or ())
    if choice.mask is not None:
        scores = scores + choice.mask
    if choice.sizes.parts is None:
        return scores.argmax(-1)
    assert choice.seeds is not None and set(given) <= {"temperature", "top_k", "top_p", "min_p"}
    if "temperature" in given:
        scores = scores / given["temperature"]
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    place = torch.arange(scores.shape[1])
    if "top_k" in given:
        ordered = ordered.masked_fill(place >= given["top_k"], float("-inf"))
    if "top_p" in given:
        above = ordered.double().softmax(-1).cumsum(-1).roll(1, -1)
        ordered = ordered.masked_fill((above >= given["top_p"]) & (place >= choice.sizes.fewest), float("-inf"))
    if "min_p" in given:
        ordered = ordered.masked_fill(ordered < ordered[:, :1] + given["min_p"], float("-inf"))
    return draw(torch.empty_like(scores).scatter(-1, order, ordered), draw_uniform(choice.seeds, positions))


@pytest.fixture
def together(ahead: list[AheadTurns], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps are launched together from now on, three or four at a time; how many were."""
    launched: list[int] = []

    def launch_steps(
        model: Any, tokens: torch.Tensor, cache: Any, num_steps: int, choice: TokenChoice | None = None
    ) -> torch.Tensor:
        chosen = []
        for _ in range(min(num_steps, 3 + len(launched) % 2)):
            positions = torch.tensor(cache.lengths) + 1
            logits = model.forward(tokens, cache).logits
            chosen.append(logits.argmax(-1) if choice is None else choose(logits, choice, positions))
            tokens = chosen[-1][:, None]
        launched.append(len(chosen))
        return torch.stack(chosen)

    monkeypatch.setattr(type(load_model("llama").model), "launch_steps", launch_steps)
    monkeypatch.setattr(strategies_ahead, "SECONDS_AT_ONCE", 1e3)  # no step takes so long
    return launched


@pytest.mark.parametrize("ends", [None, list(range(0, 160, 9)), list(range(0, 160, 3))], ids=str)
@pytest.mark.parametrize("count", [1, 2, 17, 80])
@pytest.mark.parametrize("rows", [1, 5])
def test_steps_launched_together_are_those_one_by_one(ends: Any, count: int, rows: int, request: Any) -> None:
    asked = {"max_new_tokens": count, "eos_token_id": ends}
    expected = generate(IDS[:rows], **asked)
    launched = request.getfixturevalue("together")
    assert generate(IDS[:rows], **asked).tolist() == expected.tolist()
    assert all(1 <= num <= 4 for num in launched)
    if ends is None and count > 4:
        assert max(launched) > 2 and sum(launched) < count


CHOICES: list[dict[str, Any]] = [
    {"do_sample": True},  # top-k 50
    {"do_sample": True, "top_k": 0},
    {"do_sample": True, "top_k": 0, "temperature": 1.7},
    {"do_sample": True, "top_k": 0, "temperature": 1.7, "top_p": 0.9},
    {"do_sample": True, "top_k": 30, "top_p": 0.9, "min_p": 0.02, "temperature": 2.0},
    {"do_sample": True, "temperature": 2.0, "suppress_tokens": list(range(40, 150))},
    {"suppress_tokens": list(range(20, 90))},
    {"bad_words_ids": [[7], [60], [61]], "min_new_tokens": 6},  # the end may come in the middle of a launch
    {"forced_eos_token_id": 11},  # the last token, which no launch has
    {"do_sample": True, "temperature": 2.0, "min_new_tokens": 7},
]


@pytest.mark.parametrize("settings", CHOICES, ids=str)
@pytest.mark.parametrize("ends", [None, list(range(0, 160, 9))], ids=str)
def test_steps_that_choose_are_those_one_by_one(settings: dict[str, Any], ends: Any, request: Any) -> None:
    asked = {"max_new_tokens": 17, "eos_token_id": ends, "seed": 5, **settings}
    expected = generate(IDS, **asked)
    launched = request.getfixturevalue("together")
    assert generate(IDS, **asked).tolist() == expected.tolist()
    assert launched and max(launched) <= 4
    if ends is None:
        assert max(launched) > 2


def test_rows_of_their_own_settings_choose_together(request: Any) -> None:
    asked = {"max_new_tokens": 12, "eos_token_id": [3, 30, 90], "do_sample": True, "seed": 2}
    asked["temperature"] = [0.5, 1.0, 3.0, 1.5, 2.0]
    expected = generate(IDS, **asked)
    launched = request.getfixturevalue("together")
    assert generate(IDS, **asked).tolist() == expected.tolist() and launched


@pytest.mark.parametrize("num_read", [2, 3, 4, 5, 6, 7])
def test_a_closed_stream_forgets_steps_launched_together(together: list[int], num_read: int) -> None:
    cache = unspool.DynamicCache()
    asked = {"max_new_tokens": 20, "eos_token_id": None, "past_key_values": cache}
    stream = unspool.stream(load_model("llama").model, IDS[:1], **asked)
    for _ in range(num_read):
        next(stream)
    stream.close()
    assert cache.lengths == [IDS.shape[1] + num_read - 1] and (together or num_read < 3)


def test_a_cache_is_left_as_steps_one_by_one_leave_it(together: list[int]) -> None:
    cache = unspool.DynamicCache()
    first = generate(IDS[:1], max_new_tokens=9, eos_token_id=None, past_key_values=cache)
    assert cache.lengths == [first.shape[1] - 1] and together
    second = generate(first, max_new_tokens=7, eos_token_id=None, past_key_values=cache)
    assert second.tolist() == generate(IDS[:1], max_new_tokens=16, eos_token_id=None).tolist()


@pytest.mark.parametrize(
    "settings",
    [
        {"do_sample": True, "seed": 1, "repetition_penalty": 1.3},
        {"repetition_penalty": 1.3},
        {"bad_words_ids": [[4, 5]]},
        {"output_scores": True, "return_dict_in_generate": True},
    ],
    ids=str,
)
def test_steps_with_something_between_them_are_taken_one_by_one(together: list[int], settings: dict[str, Any]) -> None:
    generate(IDS[:2], max_new_tokens=9, eos_token_id=None, **settings)
    assert not together


@pytest.mark.parametrize("ends", [None, list(range(0, 160, 5))])
@pytest.mark.parametrize("count", [1, 2, 9])
def test_scores_of_a_row_are_those_of_its_tokens(ends: list[int] | None, count: int, request: Any) -> None:
    """What was kept of steps that nobody took is dropped."""
    asked = {"max_new_tokens": count, "eos_token_id": ends, "repetition_penalty": 1.4}
    asked |= {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    expected = generate(IDS[:1], **asked)
    made = request.getfixturevalue("ahead")
    found = generate(IDS[:1], **asked)
    assert len(made) == 1 and found.sequences.tolist() == expected.sequences.tolist()
    assert len(found.scores) == len(found.logits) == found.sequences.shape[1] - IDS.shape[1]
    for one, two in zip((*found.scores, *found.logits), (*expected.scores, *expected.logits), strict=True):
        assert torch.equal(one, two)
