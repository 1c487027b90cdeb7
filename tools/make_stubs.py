"""Write the stubs of packages whose names are imported lazily, for type checkers: `python tools/make_stubs.py`."""

from __future__ import annotations

from pathlib import Path

import unspool
from unspool import logits, plan, plugins, stopping
from unspool.pretrained import architectures

SOURCE = Path(unspool.__file__).parent
PACKAGES: dict[str, dict[str, str]] = {
    "__init__.pyi": {**unspool.find_homes(), **architectures.HOMES, "__version__": "unspool._version"},
    "logits/__init__.pyi": logits.HOMES,
    "plan/__init__.pyi": plan.HOMES,
    "plugins.pyi": plugins.HOMES,
    "stopping/__init__.pyi": stopping.HOMES,
}


def make_stub(homes: dict[str, str]) -> str:
    """A stub that imports every name from its home."""
    lines = [
        f"from {home} import {name} as {name}" for name, home in sorted(homes.items(), key=lambda pair: pair[::-1])
    ]
    names = [f'    "{name}",' for name in sorted(homes)]
    return "\n".join(["# Made by tools/make_stubs.py.", *lines, "", "__all__ = [", *names, "]", ""])


def main() -> None:
    """Write every stub."""
    for path, homes in PACKAGES.items():
        (SOURCE / path).write_text(make_stub(homes), encoding="utf-8")


if __name__ == "__main__":
    main()
