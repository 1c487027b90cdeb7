"""Lines of a batch: both forms, and what each bad one is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from unspool.batch.lines import CHAT, COMPLETIONS, BadLineError, Line, parse_line
from unspool.batch.sources import open_source
from unspool.errors import InputError

BODY = {"messages": [{"role": "user", "content": "hi"}]}


def test_both_forms() -> None:
    line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": BODY}
    assert parse_line(4, json.dumps(line).encode()) == Line(4, CHAT, BODY, "a")
    plain = parse_line(1, b'{"prompt": "x", "id": 7, "top_p": 0.5}')
    assert plain == Line(1, COMPLETIONS, {"prompt": "x", "top_p": 0.5}, "7", is_plain=True)
    assert parse_line(1, json.dumps(BODY).encode()).url == CHAT


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{", "not valid JSON"),
        ('{"prompt": NaN}', "not a number"),
        ("[1]", "JSON object"),
        ("{}", "`prompt` or `messages`"),
        ('{"prompt": "a", "messages": []}', "`prompt` or `messages`"),
        ('{"prompt": "a", "id": []}', "an id is"),
        ('{"url": "/v1/embeddings", "body": {}, "custom_id": "a"}', "/v1/embeddings"),
        ('{"url": "/v1/completions", "body": 3, "custom_id": "a"}', "`body`"),
        ('{"url": "/v1/completions", "body": {}}', "needs a `custom_id`"),
        ('{"url": "/v1/completions", "body": {}, "custom_id": "a", "methods": "GET"}', "methods"),
        ('{"url": "/v1/completions", "body": {}, "custom_id": "a", "method": "GET"}', "POST"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_bad_lines_say_why(row: str, words: str) -> None:
    with pytest.raises(BadLineError, match=words):
        parse_line(1, row.encode())


def test_files_are_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n\n{"prompt"\n' + b"x" * (17 << 20) + b'\n{"prompt": "b"}')
    source = open_source(path)
    found: list[tuple[int, Any]] = list(source.rows())
    assert [number for number, _ in found] == [1, 3, 4, 5] and source.count() == 5
    assert [isinstance(row, BadLineError) for _, row in found] == [False, True, True, False]
    assert "bytes" in str(found[2][1])
    with pytest.raises(InputError, match="is not a file"):
        open_source(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="columns are named"):
        open_source(path, {"prompt": "q"})


def test_columns(tmp_path: Path) -> None:
    table = pa.table({"q": ["a", "b", None], "n": [1, 2, 3], "max_new_tokens": [4, None, 5]})
    pq.write_table(table, tmp_path / "in.parquet")
    with pa.OSFile(str(tmp_path / "in.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    for name in ("in.parquet", "in.arrow"):
        source = open_source(tmp_path / name, {"prompt": "q", "id": "n"})
        first, second, third = (row for _, row in source.rows())
        assert isinstance(first, Line) and (first.body, first.custom_id) == ({"prompt": "a", "max_new_tokens": 4}, "1")
        assert isinstance(second, Line) and second.body == {"prompt": "b"}
        assert isinstance(third, BadLineError) and source.count() == 3
        with pytest.raises(InputError, match="--prompt-column"):
            open_source(tmp_path / name)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(InputError, match="can't be read"):
        open_source(tmp_path / "bad.parquet", {"prompt": "q"})
