"""A container's quota of processor time, as cores."""

from __future__ import annotations

from pathlib import Path

import pytest

from unspool.kernels.cpu import library
from unspool.kernels.cpu.quota import count_allowed


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("files", "own", "expected"),
    [
        ({"cpu.max": "200000 100000\n"}, "0::/\n", 2),
        ({"cpu.max": "50000 100000\n"}, "0::/\n", 1),
        ({"cpu.max": "250000 100000\n"}, "0::/\n", 3),
        ({"cpu.max": "max 100000\n"}, "0::/\n", None),
        ({"a/cpu.max": "300000 100000\n", "a/b/cpu.max": "max 100000\n"}, "0::/a/b\n", 3),
        ({"a/cpu.max": "300000 100000\n", "a/b/cpu.max": "100000 100000\n"}, "0::/a/b\n", 1),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, "4:cpu,cpuacct:/\n", 4),
        ({"cpu/x/cpu.cfs_quota_us": "100000\n", "cpu/x/cpu.cfs_period_us": "50000\n"}, "1:cpu:/x\n", 2),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, "1:cpu:/\n", None),
        ({"cpu.max": "nonsense\n"}, "0::/\n", None),
        ({"cpu.max": "1 0\n"}, "0::/\n", None),
        ({}, "", None),
    ],
)
def test_quotas(tmp_path: Path, files: dict[str, str], own: str, expected: int | None) -> None:
    for name, text in files.items():
        write(tmp_path / "groups" / name, text)
    write(tmp_path / "own", own)
    assert count_allowed(tmp_path / "groups", tmp_path / "own") == expected


def test_what_can_not_be_read_is_no_quota(tmp_path: Path) -> None:
    assert count_allowed(tmp_path / "groups", tmp_path / "own") is None


def test_threads_are_no_more_than_a_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNSPOOL_NUM_THREADS", raising=False)
    monkeypatch.setattr(library, "count_allowed", lambda: 1)
    assert library.count_threads() == 1
    monkeypatch.setenv("UNSPOOL_NUM_THREADS", "3")
    assert library.count_threads() == 3  # what is asked for
