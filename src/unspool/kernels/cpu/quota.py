"""The share of a machine that a container may use: a quota of processor time, in whole cores."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_GROUPS: Final = Path("/sys/fs/cgroup")
_OWN: Final = Path("/proc/self/cgroup")


def count_allowed(groups: Path = _GROUPS, own: Path = _OWN) -> int | None:
    """The cores that the quotas of this process's control groups come to, rounded up; None without a quota.

    More threads than these would be stopped together for the rest of each period, in the middle of what they share.
    """
    found = [
        *(_read_pair(folder / "cpu.max") for folder in _list_folders(groups, own, "0::")),
        *(
            _read_pair(folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us")
            for folder in _list_folders(groups / "cpu", own, ":cpu:", ":cpu,", ",cpu:")
        ),
    ]
    counts = [count for count in found if count is not None]
    return min(counts) if counts else None


def _list_folders(root: Path, own: Path, *marks: str) -> list[Path]:
    """The folder of this process's group, and of those around it."""
    try:
        lines = own.read_text().splitlines()
    except (OSError, ValueError):
        return [root]
    names = [line.split(":", 2)[2] for line in lines if line.count(":") >= 2 and any(mark in line for mark in marks)]
    parts = [part for part in (names[0] if names else "").split("/") if part not in ("", "..")]
    return [root.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]


def _read_pair(*files: Path) -> int | None:
    """A quota and its period, in one file or two, as cores; None if there is no quota, or nothing that can be read."""
    try:
        quota, period = " ".join(file.read_text() for file in files).split()
        return max(1, -(-int(quota) // int(period))) if int(quota) > 0 and int(period) > 0 else None
    except (OSError, ValueError):  # "max", or no such file
        return None
