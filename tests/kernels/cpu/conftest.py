from __future__ import annotations

from collections.abc import Iterator

import pytest

from unspool.kernels.cpu import Library, find_library, why_missing


@pytest.fixture
def library() -> Iterator[Library]:
    """The CPU library, left as it was found; tests of it are skipped where it could not be built."""
    found = find_library()
    if found is None:
        pytest.skip(f"no CPU library: {why_missing()}")
    instructions, threads = found.instructions, found.threads
    yield found
    found.use_instructions(instructions)
    found.threads = threads
