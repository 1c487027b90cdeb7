"""The tree of a trace."""

from __future__ import annotations

import math

import pytest

from tests.explain.traces import SEARCHES, make_trace, read_words, search
from tests.fakes import make_tokenizer
from unspool.errors import InputError
from unspool.explain import build_tree


def test_a_tree_made_by_hand() -> None:
    tree = build_tree(make_trace(), read_words, prompt_text="It was")
    told = [
        [(node.text, node.is_kept, node.is_finished, node.is_dropped, node.ranks) for node in step]
        for step in tree.steps
    ]
    assert told == [
        [(" a", True, False, False, [1, 2]), (" d", True, False, False, []), ("e", False, False, True, [])],
        [
            (" b", True, False, False, [2]),
            (" c", True, False, False, [1]),
            ("f", False, False, True, []),
            ("<end>", False, False, True, []),
        ],
        [("<end>", False, True, False, [1]), ("e", False, True, False, [2]), ("f", False, False, True, [])],
    ]
    assert [node.text for node in tree.roots] == [" a", " d", "e"]  # the beam that never was is not there
    first, second = tree.returned
    assert (first.text, first.score, first.reason) == (" a c<end>", -0.5, "eos")
    assert (second.text, second.score, second.reason) == (" a be", -0.75, "length")
    assert [node.text for node in first.node.path()] == [" a", " c", "<end>"]
    assert [node.logprob for node in first.node.path()] == [-0.5, -0.75, -0.25]
    assert first.node.sum_logprobs == -1.5 and first.node.score == -0.5 and tree.prompt == "It was"
    assert tree.steps[1][2].parent is tree.steps[0][1] and tree.steps[0][1].children == [tree.steps[1][2]]


@pytest.mark.parametrize("name", SEARCHES)
def test_the_tree_of_a_search(name: str) -> None:
    output = search(name)
    for prompt in range(3):
        tree = build_tree(output.beam_trace, lambda ids: "".join(f"[{one}]" for one in ids), prompt=prompt)
        assert [one.rank for one in tree.returned] == [1, 2, 3, 4]
        for one in tree.returned:
            row = output.sequences[prompt * 4 + one.rank - 1, 3:].tolist()
            path = one.node.path()
            assert [node.token for node in path] == row[: len(path)] and all(one.rank in node.ranks for node in path)
            assert one.text == "".join(node.text for node in path) or one.node.sum_logprobs == -math.inf
            assert math.isclose(sum(node.logprob for node in path), one.node.sum_logprobs, abs_tol=1e-4)
        nodes = list(tree.nodes())
        assert sum(len(node.children) for node in nodes) + len(tree.roots) == len(nodes)
        assert all(not node.children for node in nodes if node.is_dropped)


def test_a_token_s_text_is_what_it_adds() -> None:
    tokenizer = make_tokenizer()
    ids = tokenizer.encode("the cat 日", add_special_tokens=False)
    trace = make_trace()
    path = trace.follow(trace.returned[0])
    assert len(path) == 3
    for one, token in zip(path, ids[-3:], strict=True):
        object.__setattr__(one, "token", token)  # the three bytes of one character
    tree = build_tree(trace, lambda ids: tokenizer.decode(list(ids)), prompt_ids=ids[:-3])
    assert tree.returned[0].text == "日"
    assert [node.text for node in tree.returned[0].node.path()] == ["\ufffd"] * 3


def test_a_prompt_that_is_not_there() -> None:
    with pytest.raises(InputError, match="no prompt 3; it has 1"):
        build_tree(make_trace(), read_words, prompt=3)
