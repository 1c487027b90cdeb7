"""A streamer that prints whole words as soon as they are formed."""

from __future__ import annotations

from typing import Any

import torch

from unspool.errors import InputError
from unspool.streaming.base import BaseStreamer, DecodingTokenizer

# The blocks of CJK ideographs. They are written without spaces, so a character is printed at once; Hangul and
# kana are written in words (or mixed with ideographs) and follow the rule for words.
_IDEOGRAPH_BLOCKS = (
    (0x3400, 0x4DBF),  # extension A
    (0x4E00, 0x9FFF),  # unified ideographs
    (0xF900, 0xFAFF),  # compatibility ideographs
    (0x20000, 0x2A6DF),  # extension B
    (0x2A700, 0x2B73F),  # extension C
    (0x2B740, 0x2B81F),  # extension D
    (0x2B820, 0x2CEAF),  # extension E
    (0x2F800, 0x2FA1F),  # compatibility supplement
)


def is_ideograph(character: str) -> bool:
    """Whether a character is a CJK ideograph."""
    code = ord(character)
    return any(first <= code <= last for first, last in _IDEOGRAPH_BLOCKS)


class TextStreamer(BaseStreamer):
    """Prints the text of one row to standard output, up to the last whole word, as its tokens arrive."""

    def __init__(self, tokenizer: DecodingTokenizer, skip_prompt: bool = False, **decode_kwargs: Any) -> None:
        self.tokenizer = tokenizer
        self.skip_prompt = skip_prompt
        self.decode_kwargs = decode_kwargs
        self.token_cache: list[int] = []  # the tokens of the line that is being formed
        self.print_len = 0  # characters of that line that were already passed on
        self.next_tokens_are_prompt = True

    def put(self, value: torch.Tensor) -> None:
        """Receive tokens, and pass on the text that became final: a line, ideographs, or up to the last space."""
        if value.ndim > 1 and value.shape[0] > 1:
            raise InputError(
                f"{type(self).__name__} shows one row and was given {value.shape[0]}; "
                "generate with a batch size of 1, or read the rows with lm.stream()"
            )
        if self.skip_prompt and self.next_tokens_are_prompt:
            self.next_tokens_are_prompt = False
            return
        self.token_cache.extend(value.flatten().tolist())
        text = self._decode_cache()
        if text.endswith("\n"):
            final = text[self.print_len :]
            self._reset_line()
        else:
            # A word may still change with the next token; an ideograph may not.
            num_final = len(text) if text and is_ideograph(text[-1]) else text.rfind(" ") + 1
            final = text[self.print_len : num_final]
            self.print_len += len(final)
        self.on_finalized_text(final)

    def end(self) -> None:
        """Pass on the rest, and reset for another generation."""
        rest = self._decode_cache()[self.print_len :] if self.token_cache else ""
        self.reset()
        self.on_finalized_text(rest, stream_end=True)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print newly final text; a newline follows the last of it. Override this to send it elsewhere."""
        print(text, flush=True, end="\n" if stream_end else "")

    def reset(self) -> None:
        """Forget the tokens seen, so that the next ones begin another generation."""
        self._reset_line()
        self.next_tokens_are_prompt = True

    def _reset_line(self) -> None:
        self.token_cache = []
        self.print_len = 0

    def _decode_cache(self) -> str:
        return str(self.tokenizer.decode(self.token_cache, **self.decode_kwargs))
