"""The comparison with transformers sees a wrong token, a wrong score and a refusal, and writes them as a program."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import unspool
from tests.fuzz.beside.calls import Call
from tests.fuzz.beside.trying import shrink, try_call, turn_round, write_script
from unspool.errors import SettingError

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers
CALL = Call(
    model="llama",
    seed=0,
    strategy="greedy",
    ids=[[5, 6, 7], [0, 8, 9]],
    mask=[[1, 1, 1], [0, 1, 1]],
    settings={
        "do_sample": False,
        "max_new_tokens": 3,
        "repetition_penalty": 1.2,
        "return_dict_in_generate": True,
        "output_scores": True,
    },
)
GENERATE = unspool.generate


def spoil_token(output: Any) -> None:
    output.sequences[0, -1] = (output.sequences[0, -1] + 1) % 97


def spoil_score(output: Any) -> None:
    output.scores[0][0, 5] += 0.1


def refuse(output: Any) -> None:
    raise SettingError("no")


def fail(output: Any) -> None:
    raise IndexError("no")


def test_a_call_that_agrees_is_no_finding() -> None:
    assert try_call(CALL) == []


@pytest.mark.parametrize(
    ("spoil", "kind"), [(spoil_token, "differs"), (spoil_score, "differs"), (refuse, "refused"), (fail, "raised")]
)
def test_what_is_wrong_is_found_and_made_smaller(monkeypatch: pytest.MonkeyPatch, spoil: Any, kind: str) -> None:
    def generate(*args: Any, **kwargs: Any) -> Any:
        output = GENERATE(*args, **kwargs)
        if isinstance(output, torch.Tensor):
            return output
        spoil(output)
        return output

    monkeypatch.setattr(unspool, "generate", generate)
    found = try_call(CALL)
    assert [one.kind for one in found] == [kind] * 3 and {one.way for one in found} == {"native", "object", "adapter"}
    smaller, unlike = shrink(CALL, found[0])
    assert unlike.kind == kind and "repetition_penalty" not in smaller.settings and len(smaller.ids) == 1
    compile(write_script(smaller), "script", "exec")


def test_rows_that_are_padded_on_the_right_are_asked_for_padded_on_the_left() -> None:
    turned = turn_round(CALL.change(ids=[[5, 6, 7], [8, 9, 0]], mask=[[1, 1, 1], [1, 1, 0]]))
    assert (turned.ids, turned.mask) == (CALL.ids, CALL.mask)
