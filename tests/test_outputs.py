"""The output classes: attributes, keys and tuples, in the reference's order, without what is None."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.copies import copy_by_pickle
from unspool.outputs import (
    GenerateBeamDecoderOnlyOutput,
    GenerateBeamEncoderDecoderOutput,
    GenerateDecoderOnlyOutput,
    GenerateEncoderDecoderOutput,
    Generation,
    Output,
    Stats,
    TokenLogprob,
)

_BEAMS = ["sequences", "sequences_scores", "scores", "logits", "beam_indices"]
_STATES = ["attentions", "hidden_states", "past_key_values"]
_PAIR = [
    "encoder_attentions",
    "encoder_hidden_states",
    "decoder_attentions",
    "cross_attentions",
    "decoder_hidden_states",
    "past_key_values",
]
# The reference's fields, in its order. Ours come after them, so that a tuple begins as it does there.
REFERENCE: dict[type[Output], list[str]] = {
    GenerateDecoderOnlyOutput: ["sequences", "scores", "logits", *_STATES],
    GenerateEncoderDecoderOutput: ["sequences", "scores", "logits", *_PAIR],
    GenerateBeamDecoderOnlyOutput: [*_BEAMS, *_STATES],
    GenerateBeamEncoderDecoderOutput: [*_BEAMS, *_PAIR],
}


def fill(kind: type[Output], **changes: Any) -> Output:
    """An output whose every field of the reference holds its own name."""
    return kind(**{name: name for name in REFERENCE[kind]} | changes)


@pytest.mark.parametrize("kind", REFERENCE)
def test_fields_by_attribute_key_place_and_slice(kind: type[Output]) -> None:
    names = REFERENCE[kind]
    output = fill(kind)
    assert list(output) == list(output.keys()) == names
    assert list(output.values()) == list(output.to_tuple()) == names
    for place, name in enumerate(names):
        assert getattr(output, name) == output[name] == output[place] == output.get(name) == name
        assert output[place - len(names)] == name
    assert output[:2] == tuple(names[:2]) and output[1::3] == tuple(names[1::3])
    assert list(output.items()) == [(name, name) for name in names]
    assert "sequences" in output and len(output) == len(names)
    positional = kind(*names)  # the reference's order holds for the constructor too
    assert positional.to_tuple() == tuple(names)


@pytest.mark.parametrize("kind", REFERENCE)
def test_what_is_none_is_left_out(kind: type[Output]) -> None:
    names = REFERENCE[kind]
    for absent in names:
        output = fill(kind, **{absent: None})
        rest = [name for name in names if name != absent]
        assert getattr(output, absent) is None
        assert list(output) == list(output.to_tuple()) == rest
        assert absent not in output
        with pytest.raises(KeyError):
            output[absent]
    assert kind().to_tuple() == () and dict(kind()) == {}


@pytest.mark.parametrize("kind", REFERENCE)
def test_fields_can_be_set_and_keep_their_order(kind: type[Output]) -> None:
    output = fill(kind, scores=None)
    output.scores = "late"
    assert output["scores"] == "late"
    expected = ["late" if name == "scores" else name for name in REFERENCE[kind]]
    assert list(output.to_tuple()) == expected
    output["logits"] = "changed"
    assert output.logits == "changed"
    output.sequences = None
    assert "sequences" not in output and output.to_tuple()[0] == expected[1]


@pytest.mark.parametrize(
    "change",
    [
        lambda output: output.__delitem__("scores"),
        lambda output: output.pop("scores"),
        lambda output: output.popitem(),
        lambda output: output.clear(),
        lambda output: output.update({"scores": 1}),
        lambda output: output.setdefault("scores", 1),
    ],
)
def test_fields_are_not_taken_away(change: Any) -> None:
    output = fill(GenerateDecoderOnlyOutput)
    with pytest.raises(TypeError, match="keeps its fields"):
        change(output)
    assert list(output.to_tuple()) == REFERENCE[GenerateDecoderOnlyOutput]


def test_a_falsy_field_is_there() -> None:
    output = GenerateDecoderOnlyOutput(sequences=torch.zeros(0), scores=(), prompt_logprobs=[])
    assert list(output) == ["sequences", "scores", "prompt_logprobs"]


def test_ours_come_after_the_references() -> None:
    told = [[TokenLogprob(1, -0.5, ((1, -0.5),))]]
    output = fill(GenerateDecoderOnlyOutput, logprobs=told, prompt_logprobs=[[None]], stats=Stats(new_tokens=3))
    assert list(output)[6:] == ["logprobs", "prompt_logprobs"]
    assert output.stats.new_tokens == 3
    assert "stats" not in output and len(output.to_tuple()) == 8  # what a call cost is no part of the answer


def test_unpacking_and_copying() -> None:
    output = GenerateDecoderOnlyOutput(sequences=torch.tensor([[1]]), scores=(torch.zeros(1),), stats=Stats())
    sequences, scores = output.to_tuple()
    assert sequences is output.sequences and scores is output.scores
    again = copy.copy(output)
    assert type(again) is type(output) and again.sequences is output.sequences and again.stats is output.stats
    again.sequences = None
    assert output.sequences is not None
    assert list(dict(**output)) == ["sequences", "scores"]
    for same in (copy.deepcopy(output), copy_by_pickle(output)):
        assert (
            type(same) is type(output) and torch.equal(same.sequences, output.sequences) and same.stats == output.stats
        )
        assert list(same) == list(output)


def test_a_rate_leaves_the_first_token_out() -> None:
    assert Stats(new_tokens=11, first_token_seconds=1.0, total_seconds=3.0).tokens_per_second == 5.0
    for stats in (Stats(), Stats(new_tokens=1, total_seconds=2.0), Stats(new_tokens=5)):
        assert stats.tokens_per_second == 0.0


def test_a_generation_reads_as_its_text() -> None:
    one = Generation(["a b"], [[1, 2]], [[3]], ["eos"], Stats())
    assert (one.text, str(one)) == ("a b", "a b")
    several = Generation(["a", "b"], [[1], [2]], [[3], [4]], ["eos", "length"], Stats())
    assert (several.text, str(several)) == ("a", "a\nb")
    assert "output" not in repr(several)


def test_a_generation_is_the_sequence_of_its_texts() -> None:
    answer = Generation(["a", "b", "a c"], [[1], [2], []], [[3], [4], [5]], ["eos", "length", "eos"], Stats())
    assert (len(answer), list(answer), list(reversed(answer))) == (3, ["a", "b", "a c"], ["a c", "b", "a"])
    assert (answer[0], answer[-1], answer[1:]) == ("a", "a c", ["b", "a c"])
    assert "b" in answer and "c" not in answer
    assert [*zip(answer, answer.token_ids, strict=True)] == [("a", [1]), ("b", [2]), ("a c", [])]
    with pytest.raises(IndexError):
        answer[3]
    assert Generation([""], [[]], [[1]], ["eos"], Stats())  # an answer without text is an answer
