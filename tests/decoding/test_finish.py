"""The host's own look at the last tokens says what the criteria say of the whole history."""

from __future__ import annotations

import random

import torch

from unspool.decoding.finish import Finish
from unspool.stopping import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StoppingCriteriaList


def test_the_last_tokens_say_what_the_history_says() -> None:
    chance = random.Random(0)
    for _ in range(200):
        ends = [chance.randrange(6) for _ in range(chance.randrange(1, 4))]
        criteria = StoppingCriteriaList([MaxLengthCriteria(chance.randrange(1, 9)), EosTokenCriteria(ends)])
        if chance.random() < 0.5:
            criteria.append(MaxTimeCriteria(chance.choice([-1.0, 1e9])))
        is_last_forced = chance.random() < 0.5
        finish = Finish(criteria, is_last_forced=is_last_forced)
        history = torch.tensor([[chance.randrange(6) for _ in range(5)] for _ in range(4)])
        assert not finish.needs_history
        found = [finish.explain_token(token, 5) for token in history[:, -1].tolist()]
        assert found == finish.explain(history, None)
        if is_last_forced and finish.ends_at(5):  # an end token was put there: the limit cut the text
            assert set(found) == {"length"}
        assert finish.ends_at(5) == ("length" in finish.explain(torch.full((1, 5), 9), None))


def test_criteria_of_a_callers_own_need_the_history() -> None:
    class Own(EosTokenCriteria):
        pass

    for one in (Own(3), lambda ids, scores: ids[:, 0] == 3):
        assert Finish(StoppingCriteriaList([MaxLengthCriteria(5), one])).needs_history
