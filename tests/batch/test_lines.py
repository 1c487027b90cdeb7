"""Lines of a batch: both forms, and the answer to each bad one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from unspool.batch.lines import CHAT, COMPLETIONS, BadLineError, Line, parse_line
from unspool.batch.sources import Source, open_source
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
        ("[" * 100_000, "nested too deeply"),
        (r'{"prompt": "a", "id": "\ud800"}', "surrogates not allowed"),
        (r'{"prompt": "a", "\ud800": 1}', "surrogates not allowed"),
    ],
)
def test_bad_lines_say_why(row: str, words: str) -> None:
    with pytest.raises(BadLineError, match=words):
        parse_line(1, row.encode())


@pytest.mark.parametrize(
    "row", ['{"url": "/v1/nothing", "body": {}, "custom_id": "a"}', '{"id": "a"}', '{"custom_id": "a", "body": 3}']
)
def test_bad_lines_keep_their_id(row: str) -> None:
    with pytest.raises(BadLineError) as error:
        parse_line(1, row.encode())
    assert error.value.custom_id == "a"


def test_files_are_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n\n{"prompt"\n' + b"x" * (17 << 20) + b'\n{"prompt": "b"}')
    source = open_source(path)
    found: list[tuple[int, Any]] = list(source.rows())
    assert [number for number, _ in found] == [1, 3, 4, 5] and source.count(lambda number: number > 1) == 3
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
        assert isinstance(third, BadLineError) and source.count(lambda _: True) == 3
        with pytest.raises(InputError, match="--prompt-column"):
            open_source(tmp_path / name)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(InputError, match="can't be read"):
        open_source(tmp_path / "bad.parquet", {"prompt": "q"})


def test_a_column_that_is_named_is_the_one_that_is_read(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"q": ["a"], "prompt": ["other"], "id": ["other"], "key": ["k"]}), path)
    (row,) = (row for _, row in open_source(path, {"prompt": "q", "id": "key"}).rows())
    assert isinstance(row, Line) and (row.body, row.custom_id) == ({"prompt": "a"}, "k")
    with pytest.raises(InputError, match="no column 'qq', which --prompt-column names"):
        open_source(path, {"prompt": "qq"})
    with pytest.raises(InputError, match="are to be 2 columns"):
        open_source(path, {"prompt": "q", "id": "q"})


def read_in_parts(source: Source, num_rows: int) -> list[tuple[int, Any]]:
    """Rows as workers read them: each from its part's beginning to the next one's."""
    parts, found = source.list_parts(num_rows), []
    for part, end in zip(parts, [*(one.first for one in parts[1:]), 1 << 40], strict=True):
        found += [(number, raw) for number, raw in source.raw_rows(part) if number < end]
    return found


@pytest.mark.parametrize("num_rows", [1, 3, 7, 100])
def test_parts_are_the_whole(tmp_path: Path, num_rows: int) -> None:
    lines = [b"" if number % 4 == 0 else b'{"prompt": "%d"}' % number for number in range(20)]
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(lines))
    table = pa.table({"q": [str(number) for number in range(20)]})
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=4)
    with pa.ipc.new_file(tmp_path / "in.arrow", table.schema) as file:
        file.write_table(table, max_chunksize=6)
    for name in ("in.jsonl", "in.parquet", "in.arrow"):
        source = open_source(tmp_path / name, None if name == "in.jsonl" else {"prompt": "q"})
        whole = list(source.raw_rows())
        assert len(whole) == (15 if name == "in.jsonl" else 20)
        assert read_in_parts(source, num_rows) == whole
        assert len(source.list_parts(num_rows)) > 1 or num_rows == 100
