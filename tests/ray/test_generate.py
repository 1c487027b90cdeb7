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
