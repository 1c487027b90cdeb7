"""Files of columns that are damaged, lie about themselves, or hold what Python has no form for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from unspool.batch.ledger import Share
from unspool.batch.lines import BadLineError, Line
from unspool.batch.sources import open_source
from unspool.errors import InputError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def write_arrow(path: Path, table: object) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:  # type: ignore[attr-defined]
        writer.write_table(table)


# A length in an arrow file is believed: mapped into memory, one that is false ended the process (SIGBUS).
FALSE_LENGTHS = """
import sys
from pathlib import Path
from unspool.batch.ledger import Share
from unspool.batch.sources import open_source
from unspool.errors import InputError

path = Path(sys.argv[1])
whole, number = path.read_bytes(), int(sys.argv[2])
for place in range(0, len(whole) - 8, 8):
    path.write_bytes(whole[:place] + number.to_bytes(8, "little") + whole[place + 8 :])
    try:
        source = open_source(path)
        assert 0 <= source.total(Share()) <= source.bound()
        list(source.rows())
    except InputError as error:
        assert str(path) in str(error)
for end in range(0, len(whole), 40):
    path.write_bytes(whole[:end])
    try:
        list(open_source(path).rows())
    except InputError:
        pass
print("all read or refused")
"""


@pytest.mark.parametrize("number", [4096, 1 << 33, (1 << 63) - 8])
def test_false_lengths_end_no_process(tmp_path: Path, number: int) -> None:
    write_arrow(tmp_path / "in.arrow", pa.table({"prompt": [f"text {n}" for n in range(20)], "id": list(range(20))}))
    ended = subprocess.run(
        [sys.executable, "-c", FALSE_LENGTHS, str(tmp_path / "in.arrow"), str(number)], capture_output=True, timeout=300
    )
    assert ended.returncode == 0 and b"all read" in ended.stdout, (ended.returncode, ended.stderr.decode()[-3000:])


def test_damage_of_any_kind_is_an_input_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": ["a", "b"]}), path)
    source = open_source(path)
    for kind in (
        OSError,
        KeyError,
        UnicodeDecodeError,
        NotImplementedError,
        OverflowError,
        RuntimeError,
        pa.ArrowInvalid,
    ):

        def fail(*_: object, kind: type[Exception] = kind, **__: object) -> None:
            raise kind("utf-8", b"", 0, 1, "damaged") if kind is UnicodeDecodeError else kind("damaged")

        monkeypatch.setattr(pq.ParquetFile, "iter_batches", fail)
        with pytest.raises(InputError, match=r"in.parquet can't be read: .*damaged"):
            list(source.rows())


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_row_that_python_has_no_form_for_fails_alone(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"in{suffix}"
    days = pa.array([0, 1 << 62, 5], pa.int64()).cast(pa.timestamp("us"))
    table = pa.table({"prompt": ["a", "b", "c"], "top_k": days})
    if suffix == ".parquet":
        pq.write_table(table, path)
    else:
        write_arrow(path, table)
    found = [row for _, row in open_source(path).rows()]
    assert all(isinstance(row, BadLineError) for row in found)  # a date is no setting
    assert "can't be read" in str(found[1]) and "JSON has no form" in str(found[0])


def test_text_that_is_none_fails_alone(tmp_path: Path) -> None:
    texts = pa.array([b"a", b"\xff\xfe", b"c"]).view(pa.string())
    pq.write_table(pa.table({"prompt": texts}), tmp_path / "in.parquet")
    first, second, third = (row for _, row in open_source(tmp_path / "in.parquet").rows())
    assert isinstance(first, Line) and isinstance(second, BadLineError) and isinstance(third, Line)


def test_large_rows_are_taken_out_one_by_one(tmp_path: Path) -> None:
    text = "x" * (1 << 20)
    write_arrow(tmp_path / "in.arrow", pa.table({"prompt": [text] * 100, "id": list(range(100))}))
    found = [row for _, row in open_source(tmp_path / "in.arrow").rows()]
    assert [row.custom_id for row in found if isinstance(row, Line)] == [str(number) for number in range(100)]


@pytest.mark.parametrize("share", [Share(), Share(1, 3), Share(3, 3), Share(2, 5, 7), Share(1, 1, 1), Share(9, 9)])
def test_shares_are_counted_without_their_rows(tmp_path: Path, share: Share) -> None:
    for num_rows in range(12):
        assert share.count_to(num_rows) == sum(map(share.has, range(1, num_rows + 1)))
    pq.write_table(pa.table({"prompt": ["a"] * 11}), tmp_path / "in.parquet", row_group_size=4)
    source = open_source(tmp_path / "in.parquet")
    assert source.total(share) == source.count(share.has) and source.bound() == 11


def test_a_file_that_says_it_has_too_many_rows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import unspool.batch.sources as sources

    pq.write_table(pa.table({"prompt": ["a"] * 11}), tmp_path / "in.parquet")
    monkeypatch.setattr(sources, "_MOST_ROWS", 10)
    with pytest.raises(InputError, match="says that it has 11 rows; at most 10"):
        open_source(tmp_path / "in.parquet").total(Share())
