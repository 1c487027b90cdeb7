"""The tokenizer: text to ids and back, with the names that users of transformers know."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, overload

import tokenizers
import torch

from unspool.errors import InputError, SettingError, UnspoolError
from unspool.text.backend import refusing_damage
from unspool.text.encoding import Encoding, encode_rows
from unspool.text.folder import TokenizerParts, read_folder, write_folder
from unspool.text.special_tokens import NamedToken, NamedTokenId, SpecialTokens
from unspool.text.work import Workload, encode_within_limits, measure_workload

MAX_TEXT_CHARACTERS = 64 << 20
MAX_TOKEN_ID = 2**31 - 1

# What cleaning up replaces: the spaces that WordPiece leaves before punctuation and in English contractions.
_CLEANED = ((" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"))
_CLEANED_LATER = ((" 's", "'s"), (" 've", "'ve"), (" 're", "'re"))


class Tokenizer:
    """A vocabulary and its rules: encodes texts, decodes ids, knows the special tokens and the chat template."""

    bos_token = NamedToken()
    eos_token = NamedToken()
    pad_token = NamedToken()
    unk_token = NamedToken()
    bos_token_id = NamedTokenId()
    eos_token_id = NamedTokenId()
    pad_token_id = NamedTokenId()
    unk_token_id = NamedTokenId()

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | Mapping[str, str] | None = None,
        cleans_up_spaces: bool = False,
    ) -> None:
        self.backend_tokenizer = backend
        self._encoder = backend  # what cuts texts
        self.chat_template: str | dict[str, str] | None = (
            dict(chat_template) if isinstance(chat_template, Mapping) else chat_template
        )
        self.clean_up_tokenization_spaces = cleans_up_spaces
        # Texts to be continued are filled on the left, whatever a file says: a model continues the last token.
        self.padding_side: Literal["left", "right"] = "left"
        self.special_tokens = SpecialTokens(backend, special_tokens or {})

    @classmethod
    def from_folder(cls, folder: Path | str) -> Tokenizer:
        """Read a tokenizer from a model's folder."""
        parts = read_folder(Path(folder))
        return cls(
            parts.backend,
            special_tokens=parts.special_tokens,
            chat_template=parts.chat_template,
            cleans_up_spaces=parts.cleans_up_spaces,
        )

    def save(self, folder: Path | str) -> None:
        """Write the tokenizer to a folder, from which `from_folder` gives the same back."""
        parts = TokenizerParts(
            self.backend_tokenizer, self.special_tokens_map, self.chat_template, self.clean_up_tokenization_spaces
        )
        write_folder(parts, Path(folder))

    # --- text to ids ------------------------------------------------------------------------------------

    def __call__(
        self,
        text: str | Sequence[str],
        *,
        return_tensors: Literal["pt"] | None = None,
        padding: bool = False,
        padding_side: Literal["left", "right"] | None = None,
        add_special_tokens: bool = True,
    ) -> Encoding:
        """Encode one text or several; `padding` fills to the longest with the pad token."""
        if return_tensors not in (None, "pt"):
            raise SettingError(f"return_tensors={return_tensors!r} is not made; use 'pt', or None for lists")
        if padding not in (True, False):
            raise SettingError(f"padding={padding!r} is not known; use True to fill to the longest text, or False")
        side = self.padding_side if padding_side is None else padding_side
        if side not in ("left", "right"):
            raise SettingError(f"padding_side={side!r} is not a side; use 'left' or 'right'")
        texts = [text] if isinstance(text, str) else list(text)
        rows = self._encode_all(texts, add_special_tokens)
        pad_token_id = self.pad_token_id if padding else None
        if padding and pad_token_id is None:
            raise SettingError(
                "padding=True needs a pad token, and this tokenizer has none; "
                "set one first: tokenizer.pad_token = tokenizer.eos_token"
            )
        return encode_rows(
            rows,
            pad_token_id=pad_token_id,
            padding_side=side,
            is_tensor=return_tensors == "pt",
            is_single=isinstance(text, str),
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of one text."""
        return self._encode_all([text], add_special_tokens)[0]

    @cached_property
    def _workload(self) -> Workload:
        with refusing_damage():
            return measure_workload(self._encoder)

    def _encode_all(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
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
                return encode_within_limits(self._encoder, self._workload, texts, add_special_tokens)
        except (TypeError, UnicodeError) as error:  # a lone surrogate, which no UTF-8 text holds
            raise InputError(f"a text can't be encoded because it is not valid Unicode: {error}") from error
        except UnspoolError:
            raise
        except Exception as error:  # the library's plain one: a vocabulary without an unknown token, mostly
            raise InputError(f"a text can't be encoded by this tokenizer: {error}") from error

    # --- ids to text ------------------------------------------------------------------------------------

    def decode(
        self,
        token_ids: int | Sequence[int] | torch.Tensor,
        skip_special_tokens: bool = False,
        *,
        clean_up_tokenization_spaces: bool | None = None,
        **unknown: object,
    ) -> str:
        """The text of some ids. Ids past the vocabulary, which some models can emit, have none."""
        if unknown:
            raise SettingError(
                f"decode does not know {', '.join(sorted(unknown))}; it knows skip_special_tokens and "
                "clean_up_tokenization_spaces"
            )
        ids = _list_ids(token_ids)
        with refusing_damage():
            text = self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        cleans = clean_up_tokenization_spaces
        if self.clean_up_tokenization_spaces if cleans is None else cleans:
            for spaced, clean in (*_CLEANED, *_CLEANED_LATER):
                text = text.replace(spaced, clean)
        return text

    def batch_decode(
        self,
        sequences: Iterable[Sequence[int] | torch.Tensor] | torch.Tensor,
        skip_special_tokens: bool = False,
        **kwargs: Any,
    ) -> list[str]:
        """The text of each row of ids."""
        return [self.decode(row, skip_special_tokens, **kwargs) for row in sequences]

    # --- tokens -----------------------------------------------------------------------------------------

    @overload
    def convert_ids_to_tokens(self, ids: int, skip_special_tokens: bool = ...) -> str | None: ...
    @overload
    def convert_ids_to_tokens(
        self, ids: Sequence[int] | torch.Tensor, skip_special_tokens: bool = ...
    ) -> list[str | None]: ...
    def convert_ids_to_tokens(
        self, ids: int | Sequence[int] | torch.Tensor, skip_special_tokens: bool = False
    ) -> str | list[str | None] | None:
        """The token, as the vocabulary spells it, of an id or of each of several."""
        if isinstance(ids, int):
            return self.backend_tokenizer.id_to_token(_list_ids(ids)[0])
        skipped = set(self.all_special_ids) if skip_special_tokens else set()
        return [self.backend_tokenizer.id_to_token(i) for i in _list_ids(ids) if i not in skipped]

    @overload
    def convert_tokens_to_ids(self, tokens: str) -> int | None: ...
    @overload
    def convert_tokens_to_ids(self, tokens: list[str] | tuple[str, ...]) -> list[int | None]: ...
    def convert_tokens_to_ids(self, tokens: str | list[str] | tuple[str, ...]) -> int | list[int | None] | None:
        """The id of a token, or of each of several; the unknown token's where the vocabulary has none."""
        if isinstance(tokens, str):
            token_id = self.backend_tokenizer.token_to_id(tokens)
            return self.unk_token_id if token_id is None else token_id
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        """The text that tokens, as the vocabulary spells them, stand for."""
        decoder = self.backend_tokenizer.decoder
        return " ".join(tokens) if decoder is None else str(decoder.decode(list(tokens)))

    def get_vocab(self) -> dict[str, int]:
        """Every token and its id, added ones too."""
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    @property
    def vocab_size(self) -> int:
        """The number of tokens of the vocabulary itself, without those added to it."""
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=False)

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    # --- special tokens ---------------------------------------------------------------------------------

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """The special tokens that have a name, by name."""
        return self.special_tokens.named

    @property
    def all_special_tokens(self) -> list[str]:
        """Every token that `skip_special_tokens` leaves out."""
        return self.special_tokens.list_all()

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of every token that `skip_special_tokens` leaves out."""
        ids = map(self.backend_tokenizer.token_to_id, self.all_special_tokens)
        return [token_id for token_id in ids if token_id is not None]

    # --- chat -------------------------------------------------------------------------------------------

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        return_tensors: Literal["pt"] | None = None,
        return_dict: bool = False,
        chat_template: str | None = None,
        **variables: Any,
    ) -> Any:
        """Render messages with the model's chat template: its ids, or its text if not `tokenize`.

        `chat_template` is the name of one of the model's templates, or a template itself; `variables` are the
        template's own. Ids come as a list, as a tensor of one row, or with their mask if `return_dict`.
        """
        from unspool.text.chat import render_chat  # brings jinja2, a tenth of a second that plain text can do without

        text = render_chat(
            self._choose_template(chat_template, has_tools=tools is not None),
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            documents=documents,
            special_tokens=self.special_tokens_map,
            **variables,
        )
        if not tokenize:
            if return_tensors is not None or return_dict:
                raise SettingError("return_tensors and return_dict are for ids; leave them out, or use tokenize=True")
            return text
        encoding = self(text, return_tensors=return_tensors, add_special_tokens=False)
        return encoding if return_dict else encoding.input_ids

    def _choose_template(self, wanted: str | None, *, has_tools: bool) -> str:
        named = self.chat_template if isinstance(self.chat_template, dict) else {}
        if wanted is not None:
            return named.get(wanted, wanted)
        if isinstance(self.chat_template, str):
            return self.chat_template
        template = named.get("tool_use") if has_tools else None
        if template is None:
            template = named.get("default")
        if template is None:
            has = f"only named ones ({', '.join(named)})" if named else "none"
            raise SettingError(
                f"a chat needs a chat template, and this tokenizer has {has}; "
                "pass chat_template=…, or encode plain text, which is what a base model continues"
            )
        return template


def _list_ids(token_ids: int | Sequence[int] | torch.Tensor) -> list[int]:
    """The ids as plain numbers, refused if they can't be ids."""
    ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
    ids = [ids] if isinstance(ids, int) else list(ids)
    for token_id in ids:
        if not isinstance(token_id, int):
            raise InputError(
                f"an id must be a whole number, not {type(token_id).__name__}; for several rows use batch_decode"
            )
        if not 0 <= token_id <= MAX_TOKEN_ID:
            raise InputError(f"{token_id} is not a token id; ids go from 0 to {MAX_TOKEN_ID}")
    return ids
