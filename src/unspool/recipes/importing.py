"""Importing a recipe's modules from the bytes that were read and hashed: never from what lies on the disk by then."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from unspool.forks import make_lock
from unspool.recipes.snapshot import Snapshot

_LOCK = make_lock(sys.modules[__name__], "_LOCK", threading.RLock)


def import_recipe(snapshot: Snapshot, script: Path) -> ModuleType:
    """The module of a recipe's script; the files beside it are its submodules (`from .helper import …`).

    The same files are imported once. Raises what the code raises, and leaves nothing of it then.
    """
    name = f"unspool_recipe_{snapshot.digest[:32]}"
    with _LOCK:
        if name in sys.modules:
            return sys.modules[name]
        if _FINDER not in sys.meta_path:
            sys.meta_path.insert(0, _FINDER)
        _FINDER.held[name] = snapshot, script
        try:
            return importlib.import_module(name)
        except BaseException:
            for one in [one for one in sys.modules if one == name or one.startswith(f"{name}.")]:
                del sys.modules[one]
            raise


class _Finder(MetaPathFinder):
    """Finds the modules of recipes among the files that were read."""

    def __init__(self) -> None:
        self.held: dict[str, tuple[Snapshot, Path]] = {}

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002 - modules are found by their names alone
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """Where a recipe's module comes from; None if it is no recipe's."""
        root, *parts = fullname.split(".")
        if root not in self.held:
            return None
        snapshot, script = self.held[root]
        beside = script.parent.relative_to(snapshot.folder)
        if not parts:
            return self._make_spec(fullname, snapshot, script.relative_to(snapshot.folder), script.parent)
        place = beside.joinpath(*parts)
        for file, folder in (
            (place / "__init__.py", snapshot.folder / place),
            (place.with_name(f"{place.name}.py"), None),
        ):
            if file.as_posix() in snapshot.files:
                return self._make_spec(fullname, snapshot, file, folder)
        if any(name.startswith(f"{place.as_posix()}/") for name in snapshot.files):
            spec = ModuleSpec(fullname, None, is_package=True)  # a folder of modules without an __init__.py
            spec.submodule_search_locations = [str(snapshot.folder / place)]
            return spec
        # Nobody else may look for it: what was not read and hashed is no part of the recipe.
        raise ModuleNotFoundError(f"No module named {fullname!r}: the recipe has no such file", name=fullname)

    def _make_spec(self, name: str, snapshot: Snapshot, file: Path, folder: Path | None) -> ModuleSpec | None:
        path = str(snapshot.folder / file)
        source = snapshot.files[file.as_posix()].source or ""
        return importlib.util.spec_from_file_location(
            name,
            path,
            loader=_Loader(name, path, source),
            submodule_search_locations=None if folder is None else [str(folder)],
        )


class _Loader(SourceFileLoader):
    """Compiles source that is in memory; compiled files are neither read nor written."""

    def __init__(self, name: str, path: str, source: str) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType:  # noqa: ARG002 - a loader is for one module
        """The code of the source that was read."""
        code: CodeType = self.source_to_code(self._source, self.path)
        return code

    def get_source(self, fullname: str) -> str:  # noqa: ARG002
        """The source that was read."""
        return self._source


_FINDER = _Finder()
