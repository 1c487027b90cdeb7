"""What a tokenizer returns: ids and mask, as a dict with attributes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from unspool.errors import InputError


class Encoding(dict[str, Any]):
    """Token ids and their mask: `encoding["input_ids"]` and `encoding.input_ids` are the same."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"this encoding has {', '.join(self)}, and no {name!r}") from None

    def to(self, device: torch.device | str, **kwargs: Any) -> Encoding:
        """Move the tensors to a device, in place, and return the encoding."""
        for name, value in self.items():
            if isinstance(value, torch.Tensor):
                self[name] = value.to(device, **kwargs)
        return self


def encode_rows(
    rows: list[list[int]],
    *,
    pad_token_id: int | None,
    padding_side: str,
    width: int | None = None,
    tensors: str | None = None,
    is_single: bool = False,
) -> Encoding:
    """Token rows as an encoding: filled to `width` if it is given, and made into torch or numpy arrays on demand."""
    masks = [[1] * len(row) for row in rows]
    return fill_rows(
        {"input_ids": (rows, pad_token_id or 0), "attention_mask": (masks, 0)},
        padding_side=padding_side,
        width=width,
        tensors=tensors,
        is_single=is_single,
    )


def fill_rows(
    parts: Mapping[str, tuple[list[list[int]], int]],
    *,
    padding_side: str,
    width: int | None,
    tensors: str | None,
    is_single: bool,
) -> Encoding:
    """Rows of ids and of what goes with them, each with its filler, as an encoding."""
    found = {
        name: rows if width is None else [_fill(row, width, filler, padding_side) for row in rows]
        for name, (rows, filler) in parts.items()
    }
    if tensors is None:
        return Encoding({name: rows[0] if is_single else rows for name, rows in found.items()})
    rows = found["input_ids"]
    lengths = {len(row) for row in rows}
    if len(lengths) != 1:
        reason = "there are none" if not lengths else f"their lengths differ ({min(lengths)} to {max(lengths)})"
        raise InputError(
            f"{len(rows)} texts can't become one tensor because {reason}; "
            "use padding=True, or leave return_tensors out for plain lists"
        )
    make = partial(torch.tensor, dtype=torch.long) if tensors == "pt" else partial(np.array, dtype=np.int64)
    return Encoding({name: make(rows) for name, rows in found.items()})  # (rows, longest) each


def _fill(row: list[int], length: int, filler: int, side: str) -> list[int]:
    fill = [filler] * (length - len(row))
    return fill + row if side == "left" else row + fill
