"""The bytes that caches take, their copies, and their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cache.plain_cache import (
    HEADS,
    MOST_ROWS,
    NUM_SINKS,
    RESIDUAL,
    ROOM,
    WIDTH,
    WINDOW,
    NoTurns,
    Plain,
    find_windows,
)

from unspool.cache import (
    Cache,
    OffloadedCache,
    PagedCache,
)
from unspool.errors import LoadError, ResourceError

# --- memory, copies, files -----------------------------------------------------------------------------------


def test_bytes_are_those_of_the_memory(cache: Cache) -> None:
    plain = Plain(cache, [[], []])
    plain.read(20)
    each = 2 * HEADS * WIDTH * 4
    places = {
        "SlidingWindowCache": MOST_ROWS * 2 * WINDOW,
        "HybridCache": MOST_ROWS * (WINDOW + ROOM),
        "SinkCache": 2 * 2 * (WINDOW + NUM_SINKS),
        "StaticCache": MOST_ROWS * 2 * ROOM,
        "OffloadedStaticCache": MOST_ROWS * 2 * ROOM,
    }
    # Packed: a code, a scale and a zero point for every number. Beside them slots for what is recent, a step and a
    # trial; a packed window has room for what it sees and for a trial.
    packed, recent = 2 * HEADS * WIDTH * (1 + 4 + 4), (RESIDUAL + 1) * each
    window, whole = WINDOW - RESIDUAL + 1 + 64 + 1, ROOM - RESIDUAL
    bytes_packed = {
        "QuantizedCache": 2 * 2 * (256 * packed + recent + 16 * each),
        "QuantizedStaticCache": MOST_ROWS * 2 * (whole * packed + recent + 64 * each),
        "QuantizedHybridCache": MOST_ROWS
        * sum((whole if seen is None else window) * packed + recent + 64 * each for seen in find_windows(cache)),
    }
    own = getattr(cache, "self_attention_cache", cache)
    name = type(own).__name__
    if isinstance(own, PagedCache):
        assert cache.nbytes == 2 * sum(count_block_bytes(own, 20, seen) for seen in find_windows(cache))
        for _ in range(30):
            plain.read(1)
        assert cache.nbytes == 2 * sum(count_block_bytes(own, 50, seen) for seen in find_windows(cache))
        return
    assert cache.nbytes == (bytes_packed[name] if name in bytes_packed else places.get(name, 2 * 2 * 64) * each)
    before = cache.nbytes
    for _ in range(30):
        plain.read(1)
    assert cache.nbytes == before


def count_block_bytes(cache: PagedCache, length: int, window: int | None) -> int:
    """Whole blocks, as many as a row needs in one layer: those in view, and packed ones with scales and zero points."""
    size, each = cache.pool.block_size, 2 * HEADS * WIDTH
    gone = max(0, length - window) // size * size if window is not None else 0
    packed = max(0, length - RESIDUAL) // size * size if cache.cache_config is not None else 0
    return (-(-length // size) * size - gone - packed) * each * 4 + packed * each * (1 + 4 + 4)


def test_a_clone_goes_its_own_way(cache: Cache) -> None:
    plain = Plain(cache, [[], []])
    plain.read(11, [11, 4])
    other = Plain(cache.clone(), [list(row) for row in plain.rows], plain.written)
    plain.read(2)
    other.read(3, [1, 3])
    other.select([1, 1])
    other.read(1)
    plain.read(9)
    other.read(9)


@pytest.mark.parametrize("lengths", [[11, 4], [30, 1], [5, 5]])
def test_saved_and_loaded(cache: Cache, lengths: list[int], tmp_path: Path) -> None:
    plain = Plain(cache, [[], []])
    plain.read(max(lengths), lengths)
    cache.save(tmp_path / "cache.safetensors")
    loaded = Cache.load(tmp_path / "cache.safetensors")
    assert type(loaded) is type(cache) and loaded.lengths == lengths
    assert (loaded.room, loaded.get_max_cache_shape()) == (cache.room, cache.get_max_cache_shape())
    loaded.attach(NoTurns())
    other = Plain(loaded, [list(row) for row in plain.rows], plain.written)
    other.read(1)
    other.select([1, 0])
    other.read(8, [2, 8])
    other.read(1)


def test_files_that_are_no_caches(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "file"
    with pytest.raises(LoadError, match="there is no file"):
        Cache.load(path)
    path.write_bytes(b"\x00" * 40)
    with pytest.raises(LoadError, match="safetensors"):
        Cache.load(path)
    save_file({"x": torch.zeros(2)}, path)
    with pytest.raises(LoadError, match="no saved cache"):
        Cache.load(path)
    good = {"format": "unspool cache 1", "lengths": "[3]", "facts": "{}", "notes": "{}"}
    tensors = {"layer.0": torch.zeros(1, 3, 2, HEADS, WIDTH)}
    save_file(tensors, path, {**good, "kind": "DynamicCache"})
    assert Cache.load(path).lengths == [3]
    for change in (
        {"lengths": "[4]"},
        {"lengths": "[-3]"},
        {"lengths": "3"},
        {"lengths": "["},
        {"kind": "StaticCache"},
        {"kind": "StaticCache", "facts": '{"rows": 1e30, "capacity": 3, "heads": 2, "width": 3}'},
        {"kind": "OffloadedStaticCache", "facts": '{"rows": 1, "capacity": 3, "heads": 2, "width": -3}'},
        {"kind": "StaticCache", "facts": '{"rows": 1, "capacity": 3, "heads": -2, "width": -3}'},
        {"kind": "HybridCache", "facts": "[]"},
        {"kind": "SinkCache", "facts": '{"window_length": -1, "num_sink_tokens": 0}'},
        {"kind": "EncoderDecoderCache", "facts": '{"kinds": ["EncoderDecoderCache", "DynamicCache"]}'},
        {"kind": "PickleCache"},
    ):
        save_file(tensors, path, {**good, "kind": "DynamicCache", **change})
        with pytest.raises(LoadError, match=r"damaged|can't read"):
            Cache.load(path)


def test_offloaded_keys_leave_no_file_and_need_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    cache = OffloadedCache(folder=tmp_path)
    Plain(cache, [[], []]).read(300)
    assert list(tmp_path.iterdir()) == []

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("unspool.cache.offload.memory._reserve", refuse)
    with pytest.raises(ResourceError, match=r"MiB more in .* name another folder"):
        Plain(OffloadedCache(folder=tmp_path), [[]]).read(3)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ResourceError, match="can't be offloaded to"):
        Plain(OffloadedCache(folder=tmp_path / "nowhere"), [[]]).read(3)
