"""Token ids as plain numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unspool.errors import InputError
from unspool.numeric import LARGEST_TOKEN_ID


def list_ids(token_ids: int | Sequence[int] | torch.Tensor) -> list[int]:
    """The ids as plain numbers, refused if they can't be ids."""
    ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
    ids = [ids] if isinstance(ids, int) else list(ids)
    for token_id in ids:
        if not isinstance(token_id, int):
            raise InputError(
                f"an id must be a whole number, not {type(token_id).__name__}; for several rows use batch_decode"
            )
        if not 0 <= token_id <= LARGEST_TOKEN_ID:
            raise InputError(f"{token_id} is not a token id; ids go from 0 to {LARGEST_TOKEN_ID}")
    return ids
