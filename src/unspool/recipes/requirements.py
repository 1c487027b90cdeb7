"""A recipe's requirements.txt: which of its packages are missing or of another version."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

from unspool.errors import LoadError, SettingError, excerpt
from unspool.small_files import read_text

_MOST_BYTES = 1 << 16
_MOST_LINES = 500
_LONGEST_LINE = 1000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_BOUND = re.compile(r"(===|==|>=|<=|!=|~=|>|<)\s*([0-9A-Za-z.*+!_-]{1,60})")
_WITH_STAR = ("==", "!=")  # signs that 1.* can follow
_NUMBERS = re.compile(r"v?(?:\d+!)?(\d+(?:\.\d+)*)(.*)")


def check_requirements(path: Path, name: str) -> None:
    """Raise if a package of the file is missing or has another version; the error lists every one of them."""
    if not path.is_file():
        return
    lines = [line.split("#")[0].strip() for line in read_text(path, _MOST_BYTES).splitlines()]
    lines = [line for line in lines if line]
    if len(lines) > _MOST_LINES:
        raise LoadError(f"{path} has {len(lines)} lines; at most {_MOST_LINES} are read")
    missing = []
    for line in lines:
        package, bounds = _read(line, path)
        try:
            installed: str | None = metadata.version(package)
        except metadata.PackageNotFoundError:
            installed = None
        if installed is None or not all(_holds(installed, sign, version) for sign, version in bounds):
            missing.append(f"{line} (installed: {installed})")
    if missing:
        listed = "\n".join(missing)
        raise SettingError(f"Missing requirements for {name}:\n{listed}")


def _read(line: str, path: Path) -> tuple[str, list[tuple[str, str]]]:
    if line.startswith("-") or "://" in line or ";" in line:
        raise LoadError(
            f"{path} has the line {excerpt(line)}: only names with versions are read, such as numpy>=1.26; "
            "options, addresses and markers are not"
        )
    named = _NAME.match(line) if len(line) <= _LONGEST_LINE else None
    rest = "" if named is None else line[named.end() :].strip()
    if rest.startswith("["):  # extras
        rest = rest.partition("]")[2].strip()
    bounds = [_BOUND.fullmatch(part.strip()) for part in rest.split(",") if part.strip()]
    found = [(bound[1], bound[2]) for bound in bounds if bound is not None]
    if (
        named is None
        or len(found) < len(bounds)
        or any("*" in version and sign not in _WITH_STAR for sign, version in found)
    ):
        raise LoadError(f"{path} has the line {excerpt(line)}, which is not a package with versions")
    return named[0], found


def _holds(installed: str, sign: str, wanted: str) -> bool:
    """Whether a version is within a bound. Local parts (+cu126) don't count; a pre-release is before its release."""
    if sign == "===":
        return installed == wanted
    if wanted.endswith(".*"):
        prefix = _key(wanted[:-2])[0]
        is_within = _key(installed)[0][: len(prefix)] == prefix
        return is_within if sign == "==" else not is_within
    have, want = _key(installed), _key(wanted)
    if sign == "~=":
        prefix = _strip(wanted)[:-1]
        return have >= want and _strip(installed)[: len(prefix)] == prefix
    return {
        "==": have == want,
        "!=": have != want,
        ">=": have >= want,
        "<=": have <= want,
        ">": have > want,
        "<": have < want,
    }[sign]


def _strip(version: str) -> tuple[int, ...]:
    match = _NUMBERS.fullmatch(version.split("+")[0])
    return tuple(int(part) for part in match[1].split(".")) if match is not None else ()


def _key(version: str) -> tuple[tuple[int, ...], int, str]:
    """What versions are compared by: the numbers without trailing zeros, then whether it is a release."""
    match = _NUMBERS.fullmatch(version.split("+")[0])
    if match is None:
        return (), 0, version
    numbers = _strip(version)
    while numbers and numbers[-1] == 0:
        numbers = numbers[:-1]
    rest = match[2].lstrip(".-_")
    return numbers, 1 if not rest or rest.startswith("post") else 0, rest
