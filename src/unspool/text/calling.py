"""The options of a tokenizer's call: how rows are cut, filled and returned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from unspool.errors import InputError, SettingError, excerpt
from unspool.text.encoding import Encoding, encode_rows

Side = Literal["left", "right"]
MOST_TOKENS = 1 << 24  # of a row; files write "no limit" as numbers beyond it
_FILLS: dict[Any, str] = {False: "no", None: "no", "do_not_pad": "no", True: "longest", "longest": "longest"}
_FILLS["max_length"] = "length"
_CUTS: dict[Any, bool] = {False: False, "do_not_truncate": False, True: True, "longest_first": True, "only_first": True}
_TENSORS = {None: None, "pt": "pt", "np": "np"}

# Options of transformers' tokenizers that are not built, and what to use instead.
REFUSED = {
    "text_pair": "texts are read one by one; join the two yourself",
    "text_pair_target": "texts are read one by one; join the two yourself",
    "is_split_into_words": "give whole texts: ' '.join(words)",
    "stride": "cut the text into pieces yourself",
    "return_overflowing_tokens": "cut the text into pieces yourself",
    "return_offsets_mapping": "use tokenizer.backend_tokenizer.encode(text).offsets",
    "return_special_tokens_mask": "compare with tokenizer.all_special_ids",
    "return_token_type_ids": "models that write text read one sequence, whose types are all zero",
}
_IDLE = {"stride": (0, None)}  # values that ask for nothing; None and False of the others


@dataclass(frozen=True, slots=True)
class CallOptions:
    """What a call asks for, checked."""

    fill: str = "no"  # or "longest", or "length": to `max_length`
    cuts: bool = False
    max_length: int | None = None
    multiple: int | None = None
    padding_side: Side = "left"
    truncation_side: Side = "right"
    tensors: str | None = None
    has_mask: bool = True
    has_lengths: bool = False


def read_options(
    *,
    model_max_length: int | None,
    padding_side: Any,
    truncation_side: Any,
    padding: Any = False,
    truncation: Any = None,
    max_length: Any = None,
    pad_to_multiple_of: Any = None,
    return_tensors: Any = None,
    return_attention_mask: Any = None,
    return_length: Any = False,
    **others: Any,
) -> CallOptions:
    """Check a call's options, and settle what follows from them. The first three have their values of the tokenizer."""
    _refuse(others)
    fill = _pick("padding", padding, _FILLS, "True or 'longest' to fill to the longest text, 'max_length', or False")
    if truncation is None:  # a length says that rows are cut to it, unless it is what they are filled to
        truncation = max_length is not None and fill != "length"
    cuts = _pick("truncation", truncation, _CUTS, "True to cut to max_length, or False")
    tensors = _pick("return_tensors", return_tensors, _TENSORS, "'pt' for torch, 'np' for numpy, or None for lists")
    if max_length is not None:
        _check_count("max_length", max_length)
    elif cuts or fill == "length":
        max_length = model_max_length
    if fill == "length" and max_length is None:
        raise SettingError(
            "padding='max_length' needs a length, and this tokenizer's files give none; pass max_length=…"
        )
    if pad_to_multiple_of is not None:
        _check_count("pad_to_multiple_of", pad_to_multiple_of)
    for name, side in (("padding_side", padding_side), ("truncation_side", truncation_side)):
        if side not in ("left", "right"):
            raise SettingError(f"{name}={excerpt(side)} is not a side; use 'left' or 'right'")
    return CallOptions(
        fill=fill,
        cuts=cuts,
        max_length=max_length,
        multiple=pad_to_multiple_of,
        padding_side=padding_side,
        truncation_side=truncation_side,
        tensors=tensors,
        has_mask=return_attention_mask is None or bool(return_attention_mask),
        has_lengths=bool(return_length),
    )


def _refuse(given: Mapping[str, Any]) -> None:
    """Raise for options that ask for something that is not built, or that are unknown."""
    for name, value in given.items():
        if name == "verbose" or value in _IDLE.get(name, (None, False)):
            continue
        if name in REFUSED:
            raise SettingError(f"{name}={excerpt(value)} is not offered by this tokenizer: {REFUSED[name]}")
        raise SettingError(f"a tokenizer's call does not know {name!r:.80}")


def cut_row(row: list[int], bare: list[int], options: CallOptions) -> list[int]:
    """A row cut to the length asked for; the special tokens around the text stay. `bare` is the row without them."""
    length = options.max_length
    if length is None or len(row) <= length:
        return row
    start = next((at for at in range(len(row) - len(bare) + 1) if row[at : at + len(bare)] == bare), None)
    before, after = ([], []) if start is None else (row[:start], row[start + len(bare) :])
    text = row if start is None else bare
    room = length - len(before) - len(after)
    if room < 0:
        raise InputError(
            f"max_length={length} has no room for the {len(before) + len(after)} special tokens around a text; use a "
            "larger one, or add_special_tokens=False"
        )
    kept = text[len(text) - room :] if options.truncation_side == "left" else text[:room]
    return [*before, *kept, *after]


def find_width(rows: list[list[int]], options: CallOptions) -> int | None:
    """The length that shorter rows are filled to; None if rows are not filled."""
    if options.fill == "no":
        return None
    longest = max(map(len, rows), default=0)
    width = longest if options.fill == "longest" or options.max_length is None else options.max_length
    multiple = options.multiple or 1
    return -(-width // multiple) * multiple


def fill_call(rows: list[list[int]], options: CallOptions, pad_token_id: int | None, *, is_single: bool) -> Encoding:
    """What a call returns: rows filled, with their mask and lengths, as its options ask for."""
    width = find_width(rows, options)
    if width is not None and pad_token_id is None:
        raise SettingError(
            "padding needs a pad token, and this tokenizer has none; "
            "set one first: tokenizer.pad_token = tokenizer.eos_token"
        )
    encoding = encode_rows(
        rows,
        pad_token_id=pad_token_id,
        padding_side=options.padding_side,
        width=width,
        tensors=options.tensors,
        is_single=is_single,
    )
    if not options.has_mask:
        del encoding["attention_mask"]
    if options.has_lengths:
        lengths = [len(row) if width is None else width for row in rows]
        encoding["length"] = torch.tensor(lengths) if options.tensors == "pt" else lengths
    return encoding


NO_LONGEST = int(1e30)  # a `model_max_length` that means no limit


def read_longest(value: Any) -> int | None:
    """A `model_max_length`; None for one that means no limit."""
    return value if _is_count(value) else None


def _pick(name: str, value: Any, known: dict[Any, Any], use: str) -> Any:
    word = getattr(value, "value", value)  # transformers' own enumerations
    if not isinstance(word, bool | str | None) or word not in known:
        raise SettingError(f"{name}={excerpt(value)} is not known; use {use}")
    return known[word]


def _check_count(name: str, value: Any) -> None:
    if not _is_count(value):
        raise SettingError(f"{name}={excerpt(value)} is not a number of tokens from 1 to {MOST_TOKENS}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MOST_TOKENS
