"""What a call starts from: prompt rows, checked at the door and freed of padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from unspool.config.values import MOST_ROWS
from unspool.errors import InputError
from unspool.kernels.sending import send
from unspool.protocols import Encoded

MAX_POSITIONS = 2**24


@dataclass(frozen=True)
class EncoderInput:
    """What an encoder reads: right-filled rows of tokens, embeddings or features, or states it has made already."""

    tokens: torch.Tensor | None  # (rows, source)
    lengths: list[int]
    embeds: torch.Tensor | None = None  # (rows, source, hidden), or features (rows, channels, frames)
    encoded: Encoded | None = None


@dataclass(frozen=True)
class Prompts:
    """Prompt rows: ids as they were given (left-padded), and how many of them are real."""

    ids: torch.Tensor  # (rows, width); width 0 where only embeddings were given
    lengths: list[int]  # positions a row takes in the decoder
    embeds: torch.Tensor | None = None  # (rows, longest, hidden), right-filled
    source: EncoderInput | None = None
    negative: EncoderInput | None = None  # what guidance leads away from: the decoder's other prompts, or the encoder's
    hides_padding: bool = False  # whether processors are told what is padding; the reference counts it as tokens

    @property
    def num_rows(self) -> int:
        return self.ids.shape[0]

    @property
    def width(self) -> int:
        """Columns of the ids, padding included: what the reference counts lengths by."""
        return self.ids.shape[1]


def read_ids(ids: torch.Tensor | Sequence[Sequence[int]], vocab_size: int, name: str = "input_ids") -> torch.Tensor:
    """Token ids as a checked (rows, width) tensor."""
    ids = _as_tensor(ids, name)
    if ids.dim() != 2:
        raise InputError(f"{name} must have the shape (rows, length), not {tuple(ids.shape)}")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        if ids.numel() == 0:
            ids = ids.to(torch.int64)
        else:
            raise InputError(f"{name} must hold whole numbers, not {ids.dtype}")
    rows, width = ids.shape
    if rows == 0 or rows > MOST_ROWS:
        raise InputError(f"{name} has {rows} rows; 1 to {MOST_ROWS} can be decoded in one call")
    if width == 0:
        raise InputError(f"{name} is empty: there is nothing to continue. Give at least one token")
    if width > MAX_POSITIONS:
        raise InputError(f"{name} has {width} tokens a row; more than {MAX_POSITIONS} can't be read")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise InputError(
            f"{name} holds the id {low if low < 0 else high}, outside the model's vocabulary of {vocab_size} "
            "tokens; use the tokenizer that belongs to the model"
        )
    return ids.to(torch.int64)


def read_lengths(
    mask: torch.Tensor | Sequence[Sequence[int]] | None,
    shape: tuple[int, int],
    *,
    ids: torch.Tensor | None = None,
    pad_token_id: int | None = None,
    name: str = "attention_mask",
) -> list[int]:
    """How many tokens of each left-padded row are real, by the mask or, without one, by leading pad tokens."""
    rows, width = shape
    if mask is None:
        if ids is None or pad_token_id is None:
            return [width] * rows
        real = ids.ne(pad_token_id)
        leading = real.long().cumsum(dim=-1).eq(0).sum(dim=-1)  # pads before the first real token
        if bool((ids[:, -1].eq(pad_token_id) & leading.lt(width)).any()):
            raise InputError(
                "input_ids end in pad tokens: a right-padded prompt can't be continued. "
                "Pad on the left (padding_side='left'), or pass an attention_mask if these are meant as tokens"
            )
        if bool(leading.eq(width).any()):
            row = int(leading.eq(width).nonzero()[0])
            raise InputError(
                f"row {row} holds nothing but pad tokens ({pad_token_id}), so there is nothing to continue; "
                "pass an attention_mask if these are meant as tokens"
            )
        return [width - int(pads) for pads in leading]
    flags = _read_mask(mask, shape, name)
    lengths = flags.sum(dim=-1)
    expected = torch.arange(width, device=flags.device) >= (width - lengths)[:, None]
    for row in torch.nonzero((flags != expected).any(dim=-1)).flatten().tolist():
        _explain_mask(flags[row], row, name)
    _check_nonempty(lengths, name)
    return [int(n) for n in lengths]


def mark_padding(ids: torch.Tensor, pad_token_id: int | None) -> torch.Tensor | None:
    """A mask over the pad tokens before and after each row's other tokens; None without a token that tells."""
    if pad_token_id is None:
        return None
    real = ids.ne(pad_token_id).long()
    return (real.cumsum(-1) * real.flip(-1).cumsum(-1).flip(-1)).gt(0)  # (rows, width)


def read_source_lengths(
    mask: torch.Tensor | Sequence[Sequence[int]] | None, shape: tuple[int, int], name: str = "attention_mask"
) -> tuple[list[int], list[int]]:
    """Where each row of an encoder's input begins and how long it is: padding may stand on either side."""
    rows, width = shape
    if mask is None:
        return [0] * rows, [width] * rows
    flags = _read_mask(mask, shape, name)
    lengths = flags.sum(dim=-1)
    _check_nonempty(lengths, name)
    firsts = flags.long().argmax(dim=-1)
    column = torch.arange(width, device=flags.device)
    expected = (column >= firsts[:, None]) & (column < (firsts + lengths)[:, None])
    if bool((flags != expected).any()):
        row = int(torch.nonzero((flags != expected).any(dim=-1))[0])
        raise InputError(f"the {name} of row {row} has a hole; the ones must stand side by side")
    return [int(n) for n in firsts], [int(n) for n in lengths]


def fill_right(values: torch.Tensor, firsts: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    """Move each row's real part to the left edge: (rows, width, …) → (rows, longest, …)."""
    longest = max(lengths)
    if all(first == 0 for first in firsts):
        return values[:, :longest]
    column = torch.arange(longest, device=values.device) + send(firsts, values.device)[:, None]
    column = column.clamp_(max=values.shape[1] - 1)  # what a short row reads past its end is never looked at
    return values[torch.arange(values.shape[0], device=values.device)[:, None], column]


def fit_columns(left: Sequence[int], most: int) -> int:
    """The most columns in which rows that have so many tokens left have at most `most` of them; at least one."""
    taken = 0  # tokens of rows that end before the column looked at
    for place, count in enumerate(sorted(left)):
        num_longer = len(left) - place
        if taken + count * num_longer > most:
            return max(1, (most - taken) // num_longer)
        taken += count
    return max(left)


def join_encoded(first: Encoded, second: Encoded) -> Encoded:
    """Encoded rows and after them others, filled up to one length."""
    longest = max(first.states.shape[1], second.states.shape[1])
    states = [F.pad(part.states, (0, 0, 0, longest - part.states.shape[1])) for part in (first, second)]
    return Encoded(torch.cat(states), [*first.lengths, *second.lengths])


def _as_tensor(values: torch.Tensor | Sequence[Sequence[int]], name: str) -> torch.Tensor:
    if isinstance(values, torch.Tensor):
        return values
    try:
        rows = [list(row) for row in values]
        widths = {len(row) for row in rows}
        if len(widths) <= 1:
            return torch.tensor(rows)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InputError(
            f"{name} must be a tensor or a list of rows of whole numbers, not a {type(values).__name__}: {error}"
        ) from error
    raise InputError(
        f"{name} has rows of different lengths {sorted(widths)}; pad them on the left and pass an "
        "attention_mask, or give a list of lists to lm.generate(), which needs no padding"
    )


def _read_mask(mask: torch.Tensor | Sequence[Sequence[int]], shape: tuple[int, int], name: str) -> torch.Tensor:
    flags = _as_tensor(mask, name)
    if tuple(flags.shape) != shape:
        raise InputError(f"{name} has the shape {tuple(flags.shape)} and the input {shape}; give one number a token")
    if not bool(((flags == 0) | (flags == 1)).all()):
        raise InputError(f"{name} must hold zeros and ones alone")
    return flags.bool()


def _check_nonempty(lengths: torch.Tensor, name: str) -> None:
    empty = torch.nonzero(lengths == 0).flatten().tolist()
    if empty:
        raise InputError(f"row {empty[0]} is empty: its {name} has no ones, so there is nothing to continue")


def _explain_mask(flags: torch.Tensor, row: int, name: str) -> None:
    if not bool(flags.any()):
        return  # told by _check_nonempty
    first = int(flags.long().argmax())
    if bool(flags[first : first + int(flags.sum())].all()):
        raise InputError(
            f"the {name} of row {row} is right-padded: its zeros stand at the end. "
            "A decoder-only model continues the last token: pad on the left (padding_side='left')"
        )
    raise InputError(
        f"the {name} of row {row} has a hole: zeros between ones. "
        "unspool reads a prompt as one run of tokens; leave out what is not to be read"
    )
