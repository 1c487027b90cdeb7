"""What a tokenizer returns: ids and mask, as a dict with attributes."""

from __future__ import annotations

from typing import Any

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
    rows: list[list[int]], *, pad_token_id: int | None, padding_side: str, is_tensor: bool, is_single: bool
) -> Encoding:
    """Token rows as an encoding: filled to one length if `pad_token_id` is given, and made into tensors on demand."""
    masks = [[1] * len(row) for row in rows]
    if pad_token_id is not None:
        longest = max(map(len, rows), default=0)
        rows, masks = (
            [_fill(row, longest, filler, padding_side) for row in parts]
            for parts, filler in ((rows, pad_token_id), (masks, 0))
        )
    if not is_tensor:
        return Encoding(input_ids=rows[0] if is_single else rows, attention_mask=masks[0] if is_single else masks)
    lengths = {len(row) for row in rows}
    if len(lengths) != 1:
        reason = "there are none" if not lengths else f"their lengths differ ({min(lengths)} to {max(lengths)})"
        raise InputError(
            f"{len(rows)} texts can't become one tensor because {reason}; "
            "use padding=True, or leave return_tensors out for plain lists"
        )
    return Encoding(
        input_ids=torch.tensor(rows, dtype=torch.long),  # (rows, longest)
        attention_mask=torch.tensor(masks, dtype=torch.long),  # (rows, longest)
    )


def _fill(row: list[int], length: int, filler: int, side: str) -> list[int]:
    fill = [filler] * (length - len(row))
    return fill + row if side == "left" else row + fill
