"""What a call starts from: prompt rows, checked at the door and freed of padding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from unspool.config.values import MOST_ROWS
from unspool.errors import InputError, excerpt
from unspool.kernels.sending import send
from unspool.protocols import Encoded
from unspool.wording import word

MAX_POSITIONS = 2**24


@dataclass(frozen=True)
class EncoderInput:
    """What an encoder reads: right-filled rows of tokens, embeddings or features, or states it has made already."""

    tokens: torch.Tensor | None  # (rows, source)
    lengths: list[int]
    given: torch.Tensor | None = None  # the tokens as they were given, with what is masked: (rows, columns)
    embeds: torch.Tensor | None = None  # (rows, source, hidden), or features (rows, channels, frames)
    encoded: Encoded | None = None
    drafted: Encoded | None = None  # the states that a draft model's encoder has made of it


@dataclass(frozen=True)
class Prompts:
    """Prompt rows: left-padded ids, and how many of them are real."""

    ids: torch.Tensor  # (rows, width), left-padded; width 0 if only embeddings were given
    lengths: list[int]  # positions that each row takes in the decoder
    shown: torch.Tensor | None = None  # what returned sequences begin with, if not `ids`: padding where it was given
    order: torch.Tensor | None = None  # (rows, width): the given columns in the order of `ids`; None if they are in it
    embeds: torch.Tensor | None = None  # (rows, longest, hidden), right-filled
    num_hidden: int = 0  # columns of embeddings that were given without ids, padding among them
    is_whole: bool = False  # it is read in one pass: some of its tokens see later ones
    source: EncoderInput | None = None
    negative: EncoderInput | None = None  # what guidance leads away from: the decoder's other prompts, or the encoder's
    on_host: torch.Tensor | None = None  # the ids as they came, if they were sent to a device
    listed: list[list[int]] | None = None  # the same without padding, if they came as lists
    hides_padding: bool = False  # whether processors are given what is padding; the reference counts it as tokens
    num_written: int = 0  # tokens at each row's end that were written before: processors count them as new
    device: torch.device | None = None  # where the ids are to be; None: where they are

    @property
    def _shape(self) -> torch.Size:
        ids: torch.Tensor = vars(self)["_ids"]
        return ids.shape

    @property
    def num_rows(self) -> int:
        return self._shape[0]

    @property
    def width(self) -> int:
        """Columns of the ids, padding included: what the reference counts lengths by."""
        return self._shape[1]

    def list_tokens(self) -> list[list[int]]:
        """The tokens without padding, of what the encoder reads if there is one; empty if it reads no tokens."""
        if self.source is not None:
            tokens, lengths = self.source.tokens, self.source.lengths
            return [] if tokens is None else [tokens[row, :n].tolist() for row, n in enumerate(lengths)]
        return [row.tolist() for row in self.list_arrays()] if self.listed is None else self.listed

    def list_arrays(self) -> list[np.ndarray]:
        """The decoder's own tokens without padding, as arrays."""
        ids = (self.ids.cpu() if self.on_host is None else self.on_host).numpy()
        return [ids[row, max(0, self.width - n) :] for row, n in enumerate(self.lengths)]


class _SentWhenRead:
    """The field `ids`: sent to the prompts' `device` when it is first read, which an engine never does for most of its
    requests."""

    def __get__(self, prompts: Prompts, _: type[Prompts]) -> torch.Tensor:
        held = vars(prompts)
        ids: torch.Tensor = held["_ids"]
        if prompts.device is not None and ids.device != prompts.device:
            ids = held["_ids"] = ids.to(prompts.device)
        return ids

    def __set__(self, prompts: Prompts, ids: torch.Tensor) -> None:
        vars(prompts)["_ids"] = ids


Prompts.ids = _SentWhenRead()  # type: ignore[assignment]  # after the class, for which it would be a default


def continue_prompts(prompts: Prompts, written: Sequence[int], vocab_size: int, max_new_tokens: int) -> Prompts:
    """One prompt with tokens after it that count as written, of at most so many new ones in all."""
    if prompts.num_rows != 1 or prompts.embeds is not None or prompts.shown is not None:
        raise InputError("`prefix_ids` continue one prompt of token ids; give one, without embeddings or padding")
    if len(written) >= max_new_tokens:
        raise InputError(
            word(
                "`prefix_ids` has {num_written} tokens, and {max_new_tokens:is {most}} counts them too; raise it",
                num_written=len(written),
                most=max_new_tokens,
            )
        )
    ids = read_ids([list(written)], vocab_size, "prefix_ids").to(prompts.ids.device)
    negative = prompts.negative
    if negative is not None and prompts.source is None:
        assert negative.tokens is not None
        tokens = torch.cat((negative.tokens, ids.to(negative.tokens.device)), dim=1)
        negative = replace(negative, tokens=tokens, lengths=[negative.lengths[0] + len(written)])
    return replace(
        prompts,
        ids=torch.cat((prompts.ids, ids), dim=1),
        lengths=[prompts.lengths[0] + len(written)],
        on_host=None,
        listed=None,
        negative=negative,
        num_written=len(written),
    )


def mark_columns(prompts: Prompts) -> torch.Tensor:
    """Which of the columns that were given are real: (rows, width), of embeddings if there are no ids."""
    device, width = prompts.ids.device, prompts.width or prompts.num_hidden or max(prompts.lengths)
    lengths = torch.tensor(prompts.lengths, device=device)[:, None]
    flags = torch.arange(width, device=device) >= width - lengths
    if prompts.order is None:
        return flags
    return torch.zeros_like(flags).scatter_(1, prompts.order.to(device), flags)


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
    low, high = _find_bounds(ids)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        where = f" in row {int(ids.eq(wrong).any(dim=-1).long().argmax())}" if rows > 1 else ""
        raise InputError(
            f"{name} holds the id {wrong}{where}, outside the model's vocabulary of {vocab_size} "
            "tokens; use the tokenizer that belongs to the model"
        )
    return ids.to(torch.int64)


def _find_bounds(values: torch.Tensor) -> tuple[int, int]:
    """The lowest and the highest number; numpy takes a fifth of torch's time for a short row."""
    if values.device.type == "cpu":
        held = values.numpy()
        return int(held.min()), int(held.max())
    return int(values.min()), int(values.max())


def read_layout(
    mask: torch.Tensor | Sequence[Sequence[int]] | None,
    shape: tuple[int, int],
    *,
    ids: torch.Tensor | None = None,
    pad_token_id: int | None = None,
    name: str = "attention_mask",
) -> tuple[list[int], torch.Tensor | None]:
    """How many tokens of each row are real, by the mask or, without one, by the pad tokens; and the columns (rows,
    width) in the order of a left-padded row, None if they are in that order.

    A masked token is as if it were not there: it moves to the left, wherever it was.
    """
    rows, width = shape
    if mask is None:
        if ids is None or pad_token_id is None:
            return [width] * rows, None
        flags = ids.ne(pad_token_id)
        empty = torch.nonzero(~flags.any(dim=-1)).flatten().tolist()
        if empty:
            raise InputError(
                f"row {empty[0]} holds nothing but pad tokens ({pad_token_id}), so there is nothing to continue; "
                "pass an attention_mask if these are meant as tokens"
            )
    else:
        is_read = isinstance(mask, torch.Tensor) and mask.dtype == torch.int64 and tuple(mask.shape) == shape
        if is_read and _find_bounds(torch.as_tensor(mask)) == (1, 1):
            return [width] * rows, None  # nothing is padding
        flags = _read_mask(mask, shape, name)
    lengths = flags.sum(dim=-1)
    _check_nonempty(lengths, name)
    expected = torch.arange(width, device=flags.device) >= (width - lengths)[:, None]
    order = None if bool((flags == expected).all()) else flags.long().argsort(dim=-1, stable=True)
    return lengths.tolist(), order


def put_in_order(values: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """The columns of (rows, width, …) in the order that `read_layout` gave."""
    if order is None:
        return values
    return values[torch.arange(values.shape[0], device=values.device)[:, None], order.to(values.device)]


def mark_padding(ids: torch.Tensor, pad_token_id: int | None) -> torch.Tensor | None:
    """A mask over the pad tokens before and after each row's other tokens; None without such a token."""
    if pad_token_id is None:
        return None
    real = ids.ne(pad_token_id).long()
    return (real.cumsum(-1) * real.flip(-1).cumsum(-1).flip(-1)).gt(0)  # (rows, width)


def pack_source(
    values: torch.Tensor, mask: torch.Tensor | Sequence[Sequence[int]] | None, name: str = "attention_mask"
) -> tuple[torch.Tensor, list[int]]:
    """An encoder's input (rows, width, …) right-filled, without what is masked, and each row's length."""
    rows, width = values.shape[:2]
    if mask is None:
        return values, [width] * rows
    flags = _read_mask(mask, (rows, width), name).to(values.device)
    lengths = flags.sum(dim=-1)
    _check_nonempty(lengths, name)
    order = (~flags).long().argsort(dim=-1, stable=True)[:, : int(lengths.max())]
    return put_in_order(values, order), [int(n) for n in lengths]


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


def _explain_input(values: Any) -> str:
    """What was given in place of rows of token ids, and what to give; empty if it may be such rows."""
    if isinstance(values, str):
        return f"the text {excerpt(values)}: lm.generate() takes text, or encode it with lm.tokenizer"
    is_listed = isinstance(values, list | tuple) and len(values) > 0
    if is_listed and all(isinstance(one, str) for one in values):
        return "a list of texts: lm.generate() takes texts, or encode them with lm.tokenizer"
    if is_listed and all(isinstance(one, Integral) for one in values):
        return f"one list of {len(values)} numbers: a prompt is a row, so put it into a list, as in [[1, 2, 3]]"
    return "" if isinstance(values, Iterable) and not isinstance(values, bytes) else f"a {type(values).__name__}"


def _as_tensor(values: torch.Tensor | Sequence[Sequence[int]], name: str) -> torch.Tensor:
    if isinstance(values, torch.Tensor):
        return values
    if name == "input_ids" and (hint := _explain_input(values)):
        raise InputError(f"{name} must be a tensor or a list of rows of whole numbers, not {hint}")
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
