"""Small files: what is read of them, what is refused, and that nothing half-written is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from unspool.errors import InputError, LoadError
from unspool.small_files import parse_json_object, read_bytes, read_json_object, read_text, write_text


def test_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"12345")
    assert read_bytes(file, 5) == b"12345"
    with pytest.raises(LoadError, match=r"a is larger than 4 bytes"):
        read_bytes(file, 4)
    with pytest.raises(LoadError, match=r"does not exist"):
        read_bytes(tmp_path / "b", 4)
    with pytest.raises(LoadError, match=r"can't be read: it is a folder"):
        read_bytes(tmp_path, 4)


def test_text_is_utf_8(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes("größer".encode())
    assert read_text(file, 100) == "größer"
    file.write_bytes("größer".encode("latin-1"))
    with pytest.raises(LoadError, match="not UTF-8"):
        read_text(file, 100)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": ', "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"a": ' + "9" * 5_000 + "}", "not valid JSON"),
        ("[1]", "holds a JSON list; an object was expected"),
        ("null", "an object was expected"),
    ],
)
@pytest.mark.parametrize("is_strict", [True, False])
def test_what_is_no_object_is_refused(text: str, message: str, is_strict: bool) -> None:
    with pytest.raises(LoadError, match=f"^here.*{message}") as caught:
        parse_json_object(text.encode(), "here", is_strict=is_strict)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(("text", "read"), [('{"a": 1, "a": 2}', {"a": 2}), ('{"a": Infinity}', {"a": float("inf")})])
def test_the_strict_refuse_what_others_let_pass(text: str, read: dict[str, float], tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(text)
    assert read_json_object(file, is_strict=False) == read
    with pytest.raises(LoadError, match=r"occurs twice|Infinity is not a number"):
        read_json_object(file)


def test_a_mark_of_byte_order_is_no_content() -> None:
    assert parse_json_object('\ufeff{"a": 1}'.encode(), "here") == {"a": 1}


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "a"
    write_text(file, "before")
    with pytest.raises(InputError, match="half a character"):
        write_text(file, "after \ud800")  # half a character: it fails while writing
    assert file.read_text() == "before"
    write_text(file, "after")
    assert file.read_text() == "after" and [path.name for path in tmp_path.iterdir()] == ["a"]


def test_json_that_nests_too_deeply_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"a": ' + "[" * 99 + "]" * 99 + "}")
    assert list(read_json_object(path)) == ["a"]
    for text in ('{"a": ' + "[" * 100 + "]" * 100 + "}", '{"a":' * 900 + "1" + "}" * 900):
        path.write_text(text)
        with pytest.raises(LoadError, match="nests too deeply"):
            read_json_object(path)
