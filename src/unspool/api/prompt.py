"""Prompts that are not text: what a tokenizer returned, and what can't be combined with token ids."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from numbers import Integral
from typing import Any, Final

import numpy as np
import torch

from unspool.errors import InputError, SettingError

OMITTED: Final = object()
"""A prompt that was left out, as None is not: a variable may be None by mistake."""

PROMPT_NAMES = ("input_ids", "attention_mask", "inputs_embeds", "encoder_outputs", "input_features")


def is_conversation(prompt: Any, *, chat: bool) -> bool:
    """Whether a prompt is written by the chat template: messages, several lists of them, or texts as messages."""
    if chat or not isinstance(prompt, (list, tuple)) or not prompt:
        return chat
    first = prompt[0]
    return isinstance(first, Mapping) or (
        isinstance(first, (list, tuple)) and bool(first) and isinstance(first[0], Mapping)
    )


def refuse_chat(chat: bool, tools: Any) -> None:
    """Raise for chat arguments with a prompt of token ids, to which no template applies."""
    if chat or tools is not None:
        raise SettingError("`chat` and `tools` go into a chat template, and token ids are past it; give messages")


def read_encoding(encoding: Mapping[str, Any]) -> tuple[list[list[int]], dict[str, Any]]:
    """Rows of ids, or arguments, from what a tokenizer returned."""
    unknown = set(encoding) - {*PROMPT_NAMES, "decoder_input_ids", "token_type_ids"}
    if unknown or not {"input_ids", "inputs_embeds", "encoder_outputs", "input_features"} & set(encoding):
        raise InputError(
            f"a prompt given as a mapping must be what a tokenizer returns (input_ids, attention_mask), and this has "
            f"{', '.join(map(str, encoding)) or 'nothing'}; a chat is a list of messages"
        )
    arguments = {name: value for name, value in encoding.items() if name != "token_type_ids" and value is not None}
    ids, mask = arguments.get("input_ids"), arguments.get("attention_mask")
    if not isinstance(ids, list) or isinstance(mask, torch.Tensor):
        return [], arguments
    if ids and isinstance(ids[0], Integral):  # one text's encoding has no rows
        ids = arguments["input_ids"] = [ids]
        if mask is not None:
            mask = arguments["attention_mask"] = [mask]
    if not all(isinstance(row, list) for row in ids):
        return [], arguments  # refused with the tensors
    if mask is not None and mask != [[1] * len(row) for row in ids]:
        return [], arguments
    rest = {name: value for name, value in arguments.items() if name not in ("input_ids", "attention_mask")}
    return [list(row) for row in ids], rest


def as_ids(rows: list[list[int]]) -> torch.Tensor:
    """Filled rows as a tensor (rows, width)."""
    try:
        if len(rows) == 1:  # the fastest way from a list to memory that Python has
            ids = np.empty((1, len(rows[0])), dtype=np.int64)
            struct.pack_into(f"{len(rows[0])}q", ids.data, 0, *rows[0])
            return torch.from_numpy(ids)
        return torch.tensor(rows, dtype=torch.int64)
    except (struct.error, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InputError(f"a prompt holds what can't be a token id: {error}") from error
