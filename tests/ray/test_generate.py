"""What an actor does with its rows, without a cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from tests.ray.fakes import ENGINE
from tests.server.running import Slow, make_fake_lm
from unspool.errors import InputError, MissingExtraError, ResourceError, SettingError
from unspool.ray import Generate, generate
from unspool.ray.cluster import Actors, limit_memory

ROWS: list[dict[str, Any]] = [
    {"prompt": "abc", "kept": 1, "settings": {"max_new_tokens": 3}},
    {"prompt": "abc", "kept": 2, "settings": {"max_new_tokens": 3, "n": 2}},
    {"prompt": "abc", "kept": 3, "settings": {"temprature": 1}},
    {"prompt": None, "kept": 4, "settings": None},
    {"prompt": "de", "kept": 5, "settings": None},
]


@pytest.fixture(scope="module")
def actor() -> Iterator[Generate]:
    made = Generate(make_fake_lm, engine=ENGINE, max_new_tokens=7, eos_token_id=None)
    yield made
    made.engine.close()


def call(actor: Generate, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for table in actor(pa.Table.from_pylist(rows)) for row in table.to_pylist()]


def test_rows_keep_their_columns_and_get_answers(actor: Generate) -> None:
    found = call(actor, ROWS)
    assert [row["kept"] for row in found] == [1, 2, 3, 4, 5]
    assert [row["num_generated_tokens"] for row in found] == [3, 6, None, None, 7]
    assert found[0]["generated_text"] and found[0]["finish_reason"] == "length"
    assert len(found[1]["generated_texts"]) == 2 and found[1]["generated_texts"][0] == found[1]["generated_text"]
    assert "temperature" in found[2]["generation_error"] and "prompt" in found[3]["generation_error"]
    assert all(row["generation_error"] is None for row in (found[0], found[1], found[4]))


def test_what_a_row_gets_depends_on_itself_alone(actor: Generate) -> None:
    rows = [{"prompt": "abc", "line": n % 3, "settings": '{"temperature": 1.5}'} for n in range(9)]
    texts = [row["generated_text"] for row in call(actor, rows)]
    assert texts[:3] == texts[3:6] == texts[6:] and len(set(texts)) == 3
    assert [row["generated_text"] for row in call(actor, rows[::-1])] == texts[::-1]
    unnumbered = [{"prompt": word, "settings": '{"temperature": 1.5}'} for word in ("abc", "abd", "abc")]
    first, second, third = (row["generated_text"] for row in call(actor, unnumbered))
    assert first == third != second


def test_messages_and_bodies(actor: Generate) -> None:
    chat = [{"role": "user", "content": "ab", "name": None}]
    rows = [
        {"messages": chat, "custom_id": None, "url": None, "body": None},
        {"messages": None, "custom_id": "x", "url": "/v1/completions", "body": {"prompt": "ab", "max_tokens": 2}},
    ]
    first, second = call(actor, rows)
    assert (first["generation_error"], first["num_generated_tokens"]) == (None, 7)
    assert (second["generation_error"], second["num_generated_tokens"]) == (None, 2)


def test_other_batches_and_columns() -> None:
    actor = Generate(make_fake_lm, prompt_column="question", engine=ENGINE, max_new_tokens=2)
    (table,) = list(actor({"question": ["ab"], "prompt_tokens": [3]}))
    assert table.column_names[:3] == ["question", "prompt_tokens", "generated_text"]
    with pytest.raises(InputError, match="already have a column 'generated_text'"):
        list(actor(table))
    (row,) = (row for table in actor({"question": ["ab"], "settings": ["[1]"]}) for row in table.to_pylist())
    assert "an object or its JSON text" in row["generation_error"]


@pytest.mark.parametrize("columns", [("question", "prompt"), ("prompt", "question")])
def test_a_column_that_is_named_is_the_one_that_is_read(actor: Generate, columns: tuple[str, str]) -> None:
    other = Generate(make_fake_lm, prompt_column="question", engine=ENGINE, max_new_tokens=7, eos_token_id=None)
    texts = {"question": "ab", "prompt": "something else"}
    (found,) = call(other, [{name: texts[name] for name in columns}])
    (expected,) = call(actor, [{"prompt": "ab"}])
    assert found["generated_text"] == expected["generated_text"] and found["prompt"] == "something else"
    other.engine.close()


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"settings": "[" * 100_000}, "`settings` of a row is not valid JSON: it is nested too deeply"),
        ({"settings": "{x"}, "`settings` of a row is not valid JSON"),
        ({"settings": r'{"\ud800": 1}'}, "surrogates not allowed"),
        ({"settings": '{"temperature": NaN}'}, "NaN is not a number"),
        ({"prompt": b"ab"}, "a column holds what JSON has no form for"),
        ({"prompt": None, "custom_id": "a", "url": "/v1/completions", "body": "ab"}, "`body` is the object"),
    ],
)
def test_a_row_that_can_t_be_read_fails_alone(actor: Generate, row: dict[str, Any], words: str) -> None:
    (found,) = call(actor, [{"prompt": "ab", **row}])
    assert words in found["generation_error"]
    assert call(actor, [{"prompt": "ab"}])[0]["generation_error"] is None


class Rows:
    """What `generate` asks of a dataset before it is read."""

    def __init__(self, *columns: str) -> None:
        self.names = columns

    def schema(self, fetch_if_missing: bool) -> Any:
        assert not fetch_if_missing
        return self if self.names else None

    def map_batches(self, *_: Any, **__: Any) -> str:
        return "made"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ds": [{"prompt": "ab"}]}, "takes a dataset"),
        ({"ds": Rows("question")}, "the columns question and none for prompts"),
        ({"ds": Rows("prompt"), "prompt_column": "question"}, "no column 'question', which `prompt_column` names"),
        ({"ds": Rows("prompt", "generated_text")}, "already have a column 'generated_text'"),
        ({"prompt_column": "x", "messages_column": "x"}, "are to be three columns"),
        ({"temprature": 1}, "did you mean 'temperature'"),
        ({"temperature": "x"}, "must be a number"),
        ({"stream": True}, "`stream` is not a setting for all rows"),
        ({"prompt": "x"}, "`prompt` is not a setting for all rows"),
        ({"actors": (1, 2, 3)}, "the least and the most"),
        ({"actors": "2"}, "a whole number"),
        ({"actors": True}, "a whole number"),
        ({"batch_size": 0}, "from 1 on"),
        ({"batch_size": "x"}, "from 1 on"),
    ],
)
def test_what_can_t_be_is_refused_before_there_are_actors(
    options: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unspool.ray.dataset.import_ray", lambda _: None)
    monkeypatch.setattr("unspool.ray.dataset.map_batches", lambda *_: "made")
    with pytest.raises((InputError, SettingError), match=words):
        generate(**{"ds": Rows("prompt"), "model": make_fake_lm, **options})
    for ds in (Rows(), Rows("prompt"), Rows("body", "custom_id", "url"), Rows("question", "prompt")):
        assert generate(ds, make_fake_lm, temperature=0.5, n=2, top_logprobs=2, actors=[1, 2]) == "made"


def test_a_seed_is_a_number() -> None:
    with pytest.raises(SettingError, match="`seed` is a whole number"):
        Generate(make_fake_lm, engine=ENGINE, seed="x")


def test_rows_leave_before_their_batch_is_done() -> None:
    lm = make_fake_lm(Slow(vocab=160, max_context=2048))
    actor = Generate(lm, engine=ENGINE, eos_token_id=None)
    rows = [{"prompt": "ab", "n": n, "settings": json.dumps({"max_new_tokens": 2 + 40 * (n == 3)})} for n in range(6)]
    tables = list(actor(pa.Table.from_pylist(rows)))
    assert len(tables) > 1 and [n for table in tables for n in table["n"].to_pylist()] == list(range(6))
    assert 3 not in tables[0]["n"].to_pylist()  # the slow one holds up those behind it, not those before it


def test_a_batch_that_is_left_ends_its_requests() -> None:
    actor = Generate(make_fake_lm(Slow(vocab=160, max_context=2048)), engine=ENGINE, eos_token_id=None)
    rows = [{"prompt": "ab", "settings": {"max_new_tokens": 1 if n == 0 else 1000}} for n in range(4)]
    left = actor(pa.Table.from_pylist(rows))
    next(left)
    left.close()
    actor.engine.submit("ab", max_new_tokens=1).result(timeout=20)
    assert actor.engine.stats.requests_cancelled == 3


def test_bad_models() -> None:
    with pytest.raises(SettingError, match="a function that returns one"):
        Generate(7)
    with pytest.raises(SettingError, match="by its name or path"):
        Generate(make_fake_lm, load={"device": "cpu"})


@pytest.mark.parametrize("given", [{"least": 0}, {"least": 3, "most": 2}, {"cpus": 0}, {"gpus": 1.5}, {"gpus": -1.0}])
def test_actors_are_checked(given: dict[str, Any]) -> None:
    with pytest.raises(SettingError):
        Actors(**given)


def test_a_share_of_a_gpu_bounds_keys() -> None:
    total, held = 80 << 30, 2 << 30
    shares = [limit_memory(0.25, total, held) for _ in range(4)]
    assert 4 * (shares[0] + held) <= 0.9 * total + 4 < 4 * (shares[0] + held) + 8
    with pytest.raises(ResourceError, match="larger share"):
        limit_memory(0.02, total, held)


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'unspool\[ray\]'"):
        generate(object(), "smollm2-135m")
