"""Texts to ids by a backend of the tokenizers library, within limits of text, time and memory."""

from __future__ import annotations

from functools import cached_property

import tokenizers

from unspool.errors import InputError, UnspoolError
from unspool.text.backend import refusing_damage
from unspool.text.work import Workload, encode_within_limits, measure_workload

MAX_TEXT_CHARACTERS = 64 << 20


class TextEncoder:
    """A backend that cuts texts, and the work that it may have with them."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend

    @cached_property
    def _workload(self) -> Workload:
        with refusing_damage():
            return measure_workload(self._backend)

    def encode(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        """The ids of each text."""
        for text in texts:
            if not isinstance(text, str):
                raise InputError(
                    f"a text must be a string, not {type(text).__name__}; to turn ids into text use decode"
                )
        if sum(map(len, texts)) > MAX_TEXT_CHARACTERS:
            raise InputError(
                f"{sum(map(len, texts))} characters were given to encode at once; "
                f"give at most {MAX_TEXT_CHARACTERS}, in several calls if need be"
            )
        try:
            with refusing_damage():
                return encode_within_limits(self._backend, self._workload, texts, add_special_tokens)
        except (TypeError, UnicodeError) as error:  # a lone surrogate, which no UTF-8 text holds
            raise InputError(f"a text can't be encoded because it is not valid Unicode: {error}") from error
        except UnspoolError:
            raise
        except Exception as error:  # the library's plain one: a vocabulary without an unknown token, mostly
            raise InputError(f"a text can't be encoded by this tokenizer: {error}") from error
