"""What a kind of cache can do, and the error if it can't."""

from __future__ import annotations

from abc import ABC
from typing import Final

from unspool.errors import UnsupportedError

ROLL_BACK: Final = "roll_back"  # a row's length can be lowered
TRIAL: Final = "try_tokens"  # a row's length can be lowered to where it was when a trial began
UNDO: Final = "undo_step"  # the last pass can be taken back, if it read one token per row and nothing has moved since
SELECT_ROWS: Final = "select_rows"  # rows can leave, be repeated and be reordered
JOIN: Final = "join_rows"  # rows of another cache of the kind can be taken in, and rows handed out
DIVIDE: Final = "divide_rows"  # a pass can run over some of the rows at a time
RAGGED: Final = "ragged"  # rows can have different lengths
FORK: Final = "fork_rows"  # several tokens can be tried after a row, over one copy of its keys
FLAT: Final = "take_flat_tokens"  # a pass may bring its real tokens alone, one row's behind the other's
BRANCH: Final = "branch_rows"  # rows that continue one prompt can share its keys (`branch`)
BRANCH_SOURCE: Final = "branch_source"  # rows that continue one prompt can share the keys of what an encoder read
LEGACY: Final = "to_legacy"  # keys can be returned as the reference's tuples of tensors
FIXED_SHAPE: Final = "fixed_shape"  # buffers never move, so a step over them can be captured


class Capable(ABC):
    """A cache's rows, and what can be done with them."""

    can: frozenset[str] = frozenset({ROLL_BACK, SELECT_ROWS, RAGGED})
    lengths: list[int]  # positions held, one per row; empty until the first pass

    def require(self, capability: str) -> None:
        """Raise the error that names what this kind of cache can't do."""
        if capability not in self.can:
            raise UnsupportedError(f"{type(self).__name__} can't {capability.replace('_', ' ')}")
