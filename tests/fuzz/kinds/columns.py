"""Parquet and arrow files with damage anywhere: opened, counted, cut into parts and read as rows of a batch."""

from __future__ import annotations

import datetime
import decimal
import io
from functools import cache
from pathlib import Path
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq

from tests.fuzz.findings import Difference
from tests.fuzz.mutate import INTEGERS, mutate_bytes
from unspool.batch.ledger import Share
from unspool.batch.lines import BadLineError, Line
from unspool.batch.sources import open_source

NAME = "columns"
SHARE = 2.0
SHORT = 60
_MOST_READ = 3_000  # rows: files say that they have any number of them


def _make_table(num_rows: int) -> pa.Table:
    day = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
    columns: dict[str, pa.Array] = {
        "prompt": pa.array([f"prompt {number} é" * (1 + number % 3) for number in range(num_rows)]),
        "id": pa.array(range(num_rows), pa.int64()),
        "max_new_tokens": pa.array([None if number % 3 else number for number in range(num_rows)], pa.int32()),
        "temperature": pa.array([number / 7 for number in range(num_rows)], pa.float32()),
        "stop": pa.array([["a", None, "b" * (number % 5)] for number in range(num_rows)]),
        "logit_bias": pa.array([{"a": number, "b": {"c": [1.5]}} for number in range(num_rows)]),
        "kind": pa.array([f"k{number % 2}" for number in range(num_rows)]).dictionary_encode(),
        "day": pa.array([day] * num_rows, pa.timestamp("us", "Europe/Rome")),
        "raw": pa.array([b"\xff\x00" * number for number in range(num_rows)], pa.large_binary()),
        "price": pa.array([decimal.Decimal("1.25")] * num_rows, pa.decimal128(10, 2)),
        "is_new": pa.array([number % 2 == 0 for number in range(num_rows)]),
    }
    return pa.table(columns)


@cache
def _make_files() -> tuple[tuple[str, bytes], ...]:
    """The ending and the bytes of whole files: small and large, compressed and not, of one group of rows or more."""
    made: list[tuple[str, bytes]] = []
    for num_rows in (1, 9, 300):
        table = _make_table(num_rows)
        few = table.select(["prompt", "id"])
        for held in (table, few):
            for compression in ("none", "snappy", "zstd"):
                buffer = io.BytesIO()
                pq.write_table(held, buffer, compression=compression, row_group_size=max(1, num_rows // 3))
                made.append((".parquet", buffer.getvalue()))
            for codec in (None, "lz4", "zstd"):
                buffer = io.BytesIO()
                options = pa.ipc.IpcWriteOptions(compression=codec)
                with pa.ipc.new_file(buffer, held.schema, options=options) as writer:
                    for batch in held.to_batches(max_chunksize=max(1, num_rows // 2)):
                        writer.write_batch(batch)
                made.append((".arrow", buffer.getvalue()))
    return tuple(made)


def warm() -> None:
    """Make the files, and have pyarrow start its threads."""
    _make_files()


def make(rng: Random) -> tuple[str, bytes, dict[str, str], tuple[int, int, int | None]]:
    """A file's ending and bytes, the columns that are named, and a share of its rows."""
    suffix, data = rng.choice(_make_files())
    has_all = b"logit_bias" in data
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        roll = rng.random()
        if roll < 0.8:  # most of a file is its columns; its end says where everything is
            held = bytearray(data)
            back = int(rng.expovariate(1 / 200)) if roll < 0.3 else rng.randrange(len(held))
            at = max(0, len(held) - 1 - back)
            width = rng.choice((1, 1, 2, 4, 8))
            number = rng.choice((rng.randrange(256), rng.choice(INTEGERS))) % (1 << 8 * width)
            held[at : at + width] = number.to_bytes(width, "little")
            data = bytes(held)
        else:
            data = mutate_bytes(rng, data)
    names = rng.choice(({}, {}, {"prompt": "raw"}, {"prompt": "kind", "id": "prompt"})) if has_all else {}
    count = rng.choice((1, 1, 3))
    return suffix, data, names, (rng.randint(1, count), count, rng.choice((None, None, 5)))


def run(given: tuple[str, bytes, dict[str, str], tuple[int, int, int | None]], folder: Path) -> None:
    """Read it as a batch does."""
    suffix, data, names, (index, count, limit) = given
    path = folder / f"in{suffix}"
    path.write_bytes(data)
    source, share = open_source(path, names), Share(index, count, limit)
    total, bound = source.total(share), source.bound()
    if not 0 <= total <= bound:
        raise Difference(f"{total} rows of a share of {bound}")
    source.list_parts(64)
    for place, (number, row) in enumerate(source.rows(limit)):
        if not isinstance(row, Line | BadLineError) or number < 1:
            raise Difference(f"row {number} is {row!r:.80}")
        if place >= _MOST_READ:
            break
