"""Tokens as clients see them: their text, their bytes, and log-probabilities in the forms that clients read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Final

from unspool.outputs import TokenLogprob
from unspool.text import Tokenizer, token_texts

LOWEST: Final = -9999.0  # what stands for minus infinity, which JSON has no number for


class ClientTokens(token_texts.TokenTexts):
    """The texts of a vocabulary's tokens, and log-probabilities with them."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        super().__init__(tokenizer)
        self._tokenizer: Tokenizer | None = tokenizer

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of tokens."""
        return "" if self._tokenizer is None else self._tokenizer.decode(list(ids), skip_special_tokens)

    @cached_property
    def _specials(self) -> frozenset[int]:
        return frozenset(() if self._tokenizer is None else self._tokenizer.all_special_ids)

    def count_characters(self, token: int, *, skip_special_tokens: bool = True) -> int:
        """Characters of a text that begin with a token: its later bytes may be another token's."""
        if skip_special_tokens and token in self._specials:
            return 0
        return sum(byte & 0xC0 != 0x80 for byte in self.find(token)[1])

    # --- log-probabilities ---------------------------------------------------------------------------------------
    def write_chat(self, logprobs: Sequence[TokenLogprob], num_top: int) -> dict[str, Any]:
        """The form of chats."""
        return {"content": [self._write_token(one, num_top) for one in logprobs], "refusal": None}

    def _write_token(self, one: TokenLogprob, num_top: int) -> dict[str, Any]:
        top = [self._write_entry(token, logprob) for token, logprob in one.top[:num_top]]
        return {**self._write_entry(one.token_id, one.logprob), "top_logprobs": top}

    def _write_entry(self, token: int, logprob: float) -> dict[str, Any]:
        text, spelled = self.find(token)
        return {"token": text, "logprob": max(logprob, LOWEST), "bytes": list(spelled)}

    def write_completion(
        self,
        given: Sequence[TokenLogprob | None],
        ids: Sequence[int],
        num_top: int,
        offset: int,
        *,
        skip_special_tokens: bool = True,
    ) -> dict[str, Any]:
        """The form of completions; the first token of a prompt has no probability. `offset`: where the text begins."""
        tokens, logprobs, tops, offsets = [], [], [], []
        for token, one in zip(ids, given, strict=True):
            text = self.find(token)[0]
            tokens.append(text)
            logprobs.append(None if one is None else max(one.logprob, LOWEST))
            tops.append(None if one is None else self._write_top(one, num_top))
            offsets.append(offset)
            offset += self.count_characters(token, skip_special_tokens=skip_special_tokens)
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}

    def _write_top(self, one: TokenLogprob, num_top: int) -> dict[str, float]:
        found = {self.find(token)[0]: max(logprob, LOWEST) for token, logprob in one.top[:num_top]}
        found.setdefault(self.find(one.token_id)[0], max(one.logprob, LOWEST))
        return found

    def write_prompt(self, logprobs: Sequence[TokenLogprob | None]) -> list[dict[str, Any] | None]:
        """vLLM's form of a prompt's log-probabilities."""
        return [None if one is None else self._write_ranked(one) for one in logprobs]

    def _write_ranked(self, one: TokenLogprob) -> dict[str, Any]:
        pairs = dict(one.top) | {one.token_id: one.logprob}
        return {
            str(token): {"logprob": max(logprob, LOWEST), "decoded_token": self.find(token)[0]}
            for token, logprob in pairs.items()
        }
