"""Constrained beam search: what is returned contains what was asked, or an error says why it can't."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import unspool
from tests.conformance.cases import GOLDENS
from tests.fakes import FakeEncoderDecoder, FakeModel
from unspool import Constraint, DisjunctiveConstraint, PhrasalConstraint, generate
from unspool.errors import NoTokenLeftError, SettingError, UnfulfilledError

VOCAB, EOS, PAD = 9, 1, 0


class Either(Constraint):
    """Someone's own: the token `short`, or `long` several times; `remaining` counts the long way."""

    def __init__(self, short: int, long: int, times: int) -> None:
        self.short, self.long, self.times = short, long, times
        self.written = 0
        super().__init__()

    def advance(self) -> list[int] | None:
        if self.written == self.times:
            return None
        return [self.long, self.short] if self.written == 0 else [self.long]

    def does_advance(self, token_id: int) -> bool:
        return token_id in (self.advance() or [])

    def update(self, token_id: int) -> tuple[bool, bool, bool]:
        if not self.does_advance(token_id):
            self.reset()
            return False, False, True
        self.written = self.times if token_id == self.short else self.written + 1
        return True, self.written == self.times, False

    def reset(self) -> None:
        self.written = 0

    def remaining(self) -> int:
        return self.times - self.written

    def copy(self, stateful: bool = False) -> Either:
        twin = Either.__new__(Either)
        twin.short, twin.long, twin.times = self.short, self.long, self.times
        twin.written = self.written if stateful else 0
        return twin

    def is_in(self, tokens: list[int]) -> bool:
        return self.short in tokens or holds(tokens, [self.long] * self.times)


def holds(tokens: list[int], phrase: list[int]) -> bool:
    return any(tokens[start : start + len(phrase)] == phrase for start in range(len(tokens)))


def fulfils(tokens: list[int], constraint: Any) -> bool:
    if isinstance(constraint, Either):
        return constraint.is_in(tokens)
    phrases = constraint.token_ids if isinstance(constraint, DisjunctiveConstraint) else [constraint.token_ids]
    return any(holds(tokens, phrase) for phrase in phrases)


token = st.integers(2, VOCAB - 1)
phrase = st.lists(token, min_size=1, max_size=3)
constraint = st.one_of(
    phrase.map(PhrasalConstraint),
    st.lists(phrase, min_size=1, max_size=3, unique_by=lambda one: one[0]).map(DisjunctiveConstraint),
    st.builds(Either, st.integers(2, 4), st.integers(5, 8), st.integers(2, 3)),
)
hindrance = st.fixed_dictionaries(
    {},
    optional={
        "bad_words_ids": st.lists(st.lists(token, min_size=1, max_size=2), min_size=1, max_size=2),
        "no_repeat_ngram_size": st.integers(1, 3),
        "forced_eos_token_id": st.just(EOS),
        "min_new_tokens": st.integers(1, 3),
        "suppress_tokens": st.lists(token, min_size=1, max_size=2),
    },
)


@settings(max_examples=50)
@given(
    constraints=st.lists(constraint, min_size=1, max_size=3),
    num_beams=st.integers(2, 4),
    num_returned=st.integers(1, 3),
    max_new_tokens=st.integers(3, 9),
    seed=st.integers(0, 50),
    early_stopping=st.sampled_from([True, False, "never"]),
    is_strict=st.booleans(),
    hindrances=hindrance,
)
def test_everything_is_there_or_an_error_says_what_is_not(
    constraints: list[Any],
    num_beams: int,
    num_returned: int,
    max_new_tokens: int,
    seed: int,
    early_stopping: bool | str,
    is_strict: bool,
    hindrances: dict[str, Any],
) -> None:
    """With `strict_constraints` for every sequence; as the reference counts (the prompt too), for a single one."""
    prompts = [[3, 4, 2], [5, 6, 7]]
    num_returned = min(num_returned, num_beams) if is_strict else 1
    try:
        found = generate(
            FakeModel(VOCAB, seed=seed),
            prompts,
            constraints=constraints,
            num_beams=num_beams,
            num_return_sequences=num_returned,
            max_new_tokens=max_new_tokens,
            early_stopping=early_stopping,
            eos_token_id=EOS,
            pad_token_id=PAD,
            strict_constraints=is_strict,
            **hindrances,
        ).tolist()
    except SettingError:
        return  # it was certain before the first step
    except UnfulfilledError as error:
        assert "everything that is forced" in str(error)
        # Nothing stands in the way of a search with room enough: there it must get to the end.
        needed = sum(one.remaining() for one in constraints)
        assert hindrances or is_strict or needed > max_new_tokens
        assert hindrances or num_returned > 1 or needed > max_new_tokens
        return
    except NoTokenLeftError:
        assert hindrances
        return
    assert len(found) == len(prompts) * num_returned
    for row in found:
        tokens = row[3:] if is_strict else row
        assert all(fulfils(tokens, one) for one in constraints), (row, [vars(one) for one in constraints])
        assert not is_strict or EOS not in tokens[: max(place for place, one in enumerate(tokens) if one > EOS)]
    if num_returned > 1:
        for first in range(0, len(found), num_returned):
            assert len({tuple(row) for row in found[first : first + num_returned]}) == num_returned


@pytest.mark.parametrize("is_strict", [False, True])
def test_a_phrase_that_fills_all_the_room(is_strict: bool) -> None:
    """The likeliest tokens would leave no room; the beams that can still get there are kept."""
    for seed in range(8):
        words = [[7, 8, 7], [6, 5]]
        found = generate(
            FakeModel(VOCAB, seed=seed),
            [[3, 4, 2]],
            force_words_ids=words,
            num_beams=2,
            max_new_tokens=5,
            strict_constraints=is_strict,
        )[0, 3:].tolist()
        assert all(holds(found, word) for word in words)


def test_strictly_every_sequence_and_by_new_tokens_alone() -> None:
    """The reference counts the prompt, and fills up with sequences that lack something; see docs/beams.md."""
    model = FakeModel(VOCAB, seed=3)
    common = {"force_words_ids": [[3, 4], [7]], "num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 8}
    as_reference = generate(model, [[3, 4, 2]], **common)[:, 3:].tolist()
    assert not all(holds(row, [3, 4]) and holds(row, [7]) for row in as_reference)
    strictly = generate(model, [[3, 4, 2]], strict_constraints=True, **common)[:, 3:].tolist()
    assert all(holds(row, [3, 4]) and holds(row, [7]) for row in strictly)
    assert len({tuple(row) for row in strictly}) == 4


def test_the_short_way_is_strict() -> None:
    lm = unspool.load(GOLDENS / "models" / "llama")
    answer = lm.generate([5, 6, 7], force_words_ids=[[6, 7]], num_beams=4, num_return_sequences=4, max_new_tokens=8)
    assert all(holds(tokens, [6, 7]) for tokens in answer.token_ids)
    model = unspool.generate(
        lm.model, [[5, 6, 7]], force_words_ids=[[6, 7]], num_beams=4, num_return_sequences=4, max_new_tokens=8
    )
    assert not all(holds(row, [6, 7]) for row in model[:, 3:].tolist())


def test_an_encoder_decoders_prompt_is_its_source() -> None:
    found = generate(
        FakeEncoderDecoder(VOCAB),
        [[3, 4, 2]],
        force_words_ids=[[3, 4]],
        num_beams=3,
        max_new_tokens=6,
        decoder_start_token_id=2,
        strict_constraints=True,
    )
    assert holds(found[0, 1:].tolist(), [3, 4])


def test_constraints_and_words_come_together() -> None:
    found = generate(
        FakeModel(VOCAB),
        [[3, 4, 2]],
        constraints=[PhrasalConstraint([5, 6])],
        force_words_ids=[[8]],
        num_beams=3,
        max_new_tokens=8,
        strict_constraints=True,
    )[0, 3:].tolist()
    assert holds(found, [5, 6]) and holds(found, [8])


# --- errors at the end ------------------------------------------------------------------------------------
def forbid(step: int, *tokens: int) -> Any:
    """A rule that leaves out tokens after `step` columns."""
    return lambda _, ids: [one for one in range(VOCAB) if one not in tokens or len(ids) < step]


def test_the_error_names_what_is_missing_and_what_forbade_it() -> None:
    with pytest.raises(UnfulfilledError) as error:
        generate(
            FakeModel(VOCAB),
            [[3, 4, 2]],
            force_words_ids=[[5, 6], [8]],
            num_beams=3,
            max_new_tokens=5,
            prefix_allowed_tokens_fn=forbid(0, 6),
        )
    message = str(error.value)
    assert "prompt 0" in message and "lacks [5, 6]" in message and "in 5 new tokens" in message
    assert "forbade the tokens [6]" in message


def test_a_search_that_is_stopped_early_says_so() -> None:
    with pytest.raises(UnfulfilledError, match="ended early by a stop"):
        generate(
            FakeModel(VOCAB),
            [[3, 4, 2]],
            force_words_ids=[[5, 6, 7, 8]],
            num_beams=2,
            max_new_tokens=8,
            stopping_criteria=[lambda ids, _: torch.full((len(ids),), ids.shape[1] > 4)],
        )


def test_more_sequences_than_there_are() -> None:
    """Three tokens of room and a phrase of three: there is one such sequence, and two are asked for."""
    common = {"force_words_ids": [[5, 6, 7]], "num_beams": 3, "max_new_tokens": 3, "strict_constraints": True}
    assert generate(FakeModel(VOCAB), [[3]], **common)[0].tolist() == [3, 5, 6, 7]
    with pytest.raises(UnfulfilledError, match=r"2 sequences .* and 1 were found .* fewer sequences"):
        generate(FakeModel(VOCAB), [[3]], num_return_sequences=2, **common)


# --- errors before the first step -------------------------------------------------------------------------
WORD = {"num_beams": 4, "max_new_tokens": 4}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"num_beams": 4, "num_beam_groups": 3, "diversity_penalty": 1.0}, r"`num_beams` \(4\) must be divisible by `num_"),
    ({"num_beams": 4, "diversity_penalty": 1.0}, "between groups of beams, and there is one group"),
    ({"num_beams": 4, "num_beam_groups": 2}, "`diversity_penalty` should be greater than 0.0"),
    ({"num_beams": 2, "num_return_sequences": 3}, r"`num_return_sequences` \(3\) has to be smaller"),
    ({**WORD, "force_words_ids": []}, "`force_words_ids` must be a list that is not empty"),
    ({**WORD, "force_words_ids": [[]]}, "`force_words_ids` must be a list that is not empty"),
    ({**WORD, "force_words_ids": [[[]]]}, "`force_words_ids` must be a list that is not empty"),
    ({**WORD, "constraints": []}, "`constraints` is empty"),
    ({**WORD, "constraints": ["a word"]}, r"holds 'a word', which has no advance\(\)"),
    ({**WORD, "force_words_ids": [[5, 6, 7, 5, 6]]}, "asks for at least 5 tokens, and this call writes at most 4"),
    ({**WORD, "force_words_ids": [[5, 6], [7, 8, 5]]}, "asks for at least 5 tokens"),
    ({**WORD, "constraints": [Either(5, 6, 3)] * 5}, "`constraints` asks for at least 5 tokens"),
    ({**WORD, "force_words_ids": [[5, 6, 7, 8]], "forced_eos_token_id": EOS}, "writes at most 3 that are not forced"),
    ({**WORD, "force_words_ids": [[5, 6]], "bad_words_ids": [[6]]}, r"\[5, 6\] is to be .* `bad_words_ids`"),
    ({**WORD, "force_words_ids": [[5, 6, 7]], "bad_words_ids": [[6, 7]]}, "`bad_words_ids` or `suppress_tokens` forb"),
    ({**WORD, "force_words_ids": [[5, 6]], "suppress_tokens": [5]}, "`bad_words_ids` or `suppress_tokens` forbids"),
    ({**WORD, "constraints": [PhrasalConstraint([5, 6])], "suppress_tokens": [5]}, "`suppress_tokens` forbids"),
    ({**WORD, "constraints": [Either(5, 6, 2)], "suppress_tokens": [5, 6]}, "every way leads over tokens that end"),
    ({**WORD, "force_words_ids": [[[5, 6], [7]]], "bad_words_ids": [[6], [7]]}, "one of .* forbids it"),
    ({**WORD, "force_words_ids": [[5, EOS]], "eos_token_id": EOS}, "1 is an end token"),
    ({**WORD, "force_words_ids": [[5, VOCAB]]}, "the id 9 is outside the model's vocabulary of 9"),
    ({**WORD, "force_words_ids": [[5, 5, 5]], "no_repeat_ngram_size": 2}, "no_repeat_ngram_size=2 forbids that"),
    ({**WORD, "force_words_ids": [[5]], "num_beam_groups": 2}, "has no groups"),
    ({**WORD, "force_words_ids": [[5]], "do_sample": True}, "does not sample"),
    ({**WORD, "strict_constraints": True}, "nothing is forced"),
    ({"force_words_ids": [[5]]}, "`force_words_ids`.* beam search alone"),
]


@pytest.mark.parametrize(("asked", "message"), BAD, ids=lambda value: str(value)[:60])
def test_what_can_not_be_is_told_before_the_first_pass(asked: dict[str, Any], message: str) -> None:
    model = FakeModel(VOCAB)
    with pytest.raises(SettingError, match=message):
        generate(model, [[3, 4, 2]], **{"pad_token_id": PAD, **asked})
    assert model.num_passes == 0


def test_one_of_the_alternatives_is_enough() -> None:
    """What forbids one of them leaves the others; what is too long leaves the short one."""
    for more in ({"bad_words_ids": [[6]]}, {"max_new_tokens": 2}, {"eos_token_id": 6, "max_new_tokens": 6}):
        settings = {"max_new_tokens": 4, **more}
        found = generate(
            FakeModel(VOCAB), [[3]], num_beams=3, pad_token_id=0, force_words_ids=[[[5, 6, 6], [7, 8]]], **settings
        )
        assert holds(found[0].tolist(), [7, 8])


def test_forced_ends_need_no_room_where_nothing_is_constrained() -> None:
    asked = {"num_beams": 2, "max_new_tokens": 1, "forced_bos_token_id": 5, "forced_eos_token_id": 6}
    found = generate(FakeModel(VOCAB), [[3]], pad_token_id=0, eos_token_id=6, **asked)
    assert found.shape == (1, 2)


def test_ends_that_are_switched_off_take_no_room() -> None:
    asked = {"num_beams": 2, "max_new_tokens": 4, "force_words_ids": [[5, 6, 7, 8]], "pad_token_id": 0}
    off = {"forced_bos_token_id": -1, "forced_eos_token_id": -1}
    found = [generate(FakeModel(VOCAB), [[3]], **asked, **more).tolist() for more in ({}, off)]
    assert found[0] == found[1] == [[3, 5, 6, 7, 8]]


def test_an_end_token_does_not_go_on() -> None:
    """A beam that a constraint pushes over an end token would be a sequence with an end in its middle."""
    found = generate(
        FakeModel(VOCAB), [[3]], num_beams=3, pad_token_id=0, eos_token_id=6, force_words_ids=[[[5, 6, 6], [7, 8]]]
    )
    assert holds(found[0].tolist(), [7, 8])


class Endless(Either):
    """Someone's own that never ends."""

    def __init__(self) -> None:
        self.short, self.long, self.times, self.written = 2, 3, 2, 0

    def update(self, token_id: int) -> tuple[bool, bool, bool]:
        return self.does_advance(token_id), False, False

    def copy(self, stateful: bool = False) -> Endless:
        return Endless()


def test_a_constraint_that_breaks_the_contract_is_told_first() -> None:
    model = FakeModel(VOCAB)
    with pytest.raises(SettingError, match="Endless is not well defined"):
        generate(model, [[3]], num_beams=2, constraints=[Endless()], max_new_tokens=4)
    assert model.num_passes == 0
