"""The special tokens of a tokenizer: those with a name, and the others that are left out of plain text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, overload

import tokenizers

from unspool.errors import SettingError, excerpt

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class SpecialTokens:
    """Which tokens have a name, kept in step with what the tokenizer leaves out as special."""

    def __init__(self, backend: tokenizers.Tokenizer, named: Mapping[str, str]) -> None:
        self._backend = backend
        self._named: dict[str, str] = {}
        self._skipped: frozenset[int] | None = None
        for name, token in named.items():
            self.set(name, token)

    @property
    def named(self) -> dict[str, str]:
        """The tokens that have a name, by name."""
        return dict(self._named)

    def list_all(self) -> list[str]:
        """Every token that is left out as special: the named ones, then the others in the order of their ids."""
        added = sorted(self._backend.get_added_tokens_decoder().items())
        return list(dict.fromkeys([*self._named.values(), *(token.content for _, token in added if token.special)]))

    def list_skipped(self) -> frozenset[int]:
        """The ids of all of them, looked up once: a text's decoder asks for every row."""
        if self._skipped is None:
            ids = map(self._backend.token_to_id, self.list_all())
            self._skipped = frozenset(token_id for token_id in ids if token_id is not None)
        return self._skipped

    def get(self, name: str) -> str | None:
        """The token of that name."""
        return self._named.get(name)

    def get_id(self, name: str) -> int | None:
        """The id of the token of that name."""
        token = self._named.get(name)
        return None if token is None else self._backend.token_to_id(token)

    def set(self, name: str, token: str | None) -> None:
        """Give the name to a token of the vocabulary, or to none."""
        if name not in NAMED_TOKENS:
            raise SettingError(f"{name!r} is no special token's name; these are: {', '.join(NAMED_TOKENS)}")
        self._skipped = None
        if token is None:
            self._named.pop(name, None)
            return
        if self._backend.token_to_id(token) is None:
            raise SettingError(
                f"{name}={excerpt(token)} is not in the vocabulary, so the model has no embedding for it; use another"
            )
        added = self._backend.get_added_tokens_decoder().values()
        if not any(known.special and known.content == token for known in added):
            self._backend.add_special_tokens([token])
        self._named[name] = token


class NamedToken:
    """An attribute of a tokenizer that is the special token of its name, such as `pad_token`."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> NamedToken: ...
    @overload
    def __get__(self, instance: Any, owner: type) -> str | None: ...
    def __get__(self, instance: Any, owner: type) -> NamedToken | str | None:
        tokens: SpecialTokens | None = None if instance is None else instance.special_tokens
        return self if tokens is None else tokens.get(self._name)

    def __set__(self, instance: Any, token: str | None) -> None:
        instance.special_tokens.set(self._name, token)


class NamedTokenId:
    """An attribute of a tokenizer that is the id of a special token, such as `pad_token_id`."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> NamedTokenId: ...
    @overload
    def __get__(self, instance: Any, owner: type) -> int | None: ...
    def __get__(self, instance: Any, owner: type) -> NamedTokenId | int | None:
        tokens: SpecialTokens | None = None if instance is None else instance.special_tokens
        return self if tokens is None else tokens.get_id(self._name.removesuffix("_id"))

    def __set__(self, instance: Any, value: int | None) -> None:
        token = None if value is None else instance.backend_tokenizer.id_to_token(value)
        if value is not None and token is None:
            raise SettingError(f"{self._name}={excerpt(value)} is not an id of this vocabulary")
        instance.special_tokens.set(self._name.removesuffix("_id"), token)
