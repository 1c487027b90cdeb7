"""Finding the library: what is said if it can't be used."""

from __future__ import annotations

import pytest

from unspool.kernels.cpu import find_library, library


def test_a_library_of_another_version_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    if find_library() is None:
        pytest.skip("the library was not built")
    monkeypatch.delenv(library.SWITCH, raising=False)
    monkeypatch.setattr(library, "ABI", library.ABI + 1)
    library._open.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="of another version; build it again") as said:
            assert library.find_library() is None
            assert library.find_library() is None
        assert len(said) == 1
    finally:
        library._open.cache_clear()
