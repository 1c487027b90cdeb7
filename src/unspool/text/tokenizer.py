"""The tokenizer: text to ids and back, with the names that users of transformers know."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import tokenizers
import torch

from unspool.errors import InputError, SettingError
from unspool.text.backend import refusing_damage
from unspool.text.calling import NO_LONGEST, CallOptions, Side, cut_row, fill_call, read_longest, read_options
from unspool.text.encoding import Encoding
from unspool.text.folder import TokenizerParts, read_folder, write_folder
from unspool.text.offsets import NO_TIMESTAMPS, PREVIOUS, STEP_SECONDS, find_offsets, require_token
from unspool.text.special_tokens import NamedToken, NamedTokenId, SpecialTokens
from unspool.text.templates import choose_template
from unspool.text.text_encoder import TextEncoder
from unspool.text.token_ids import list_ids

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
        self._encoder = TextEncoder(backend)
        self.chat_template: str | dict[str, str] | None = (
            dict(chat_template) if isinstance(chat_template, Mapping) else chat_template
        )
        self.clean_up_tokenization_spaces = cleans_up_spaces
        # Texts to be continued are filled on the left, whatever a file says: a model continues the last token.
        self.padding_side: Side = "left"
        self.name_or_path = ""
        self.truncation_side: Side = "right"
        self._longest: int | None = None  # what truncation=True cuts to; None: nothing
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

    save_pretrained = save

    # --- text to ids ------------------------------------------------------------------------------------

    def __call__(
        self,
        text: str | Sequence[str] | None = None,
        *,
        text_target: str | Sequence[str] | None = None,
        add_special_tokens: bool = True,
        **options: Any,
    ) -> Encoding:
        """Encode one text or several; `padding` fills to the longest with the pad token, `truncation` cuts.

        Options: `padding` (False, True, "max_length"), `truncation`, `max_length`, `pad_to_multiple_of`,
        `padding_side`, `return_tensors` ("pt", "np"), `return_attention_mask`, `return_length`. `text_target` is
        encoded as the text is: its ids come as `labels` beside a text's, or alone as `input_ids`.
        """
        asked = self._read_options(options)
        if text is None and text_target is None:
            raise InputError("a tokenizer's call needs a text, or several")
        encoding = self._encode_call(text_target if text is None else text, add_special_tokens, asked)
        if text is not None and text_target is not None:
            encoding["labels"] = self._encode_call(text_target, add_special_tokens, asked).input_ids
        return encoding

    def _encode_call(self, text: str | Sequence[str] | None, adds: bool, options: CallOptions) -> Encoding:
        texts = [text] if isinstance(text, str) else list(text or ())
        rows = self._encode_all(texts, adds)
        if options.cuts and options.max_length is not None:
            bare = self._encode_all(texts, False) if adds else rows
            rows = [cut_row(row, one, options) for row, one in zip(rows, bare, strict=True)]
        return fill_call(rows, options, self.pad_token_id, is_single=isinstance(text, str))

    def _read_options(self, given: Mapping[str, Any]) -> CallOptions:
        side = given.get("padding_side")
        own = {"truncation_side": self.truncation_side, "model_max_length": self._longest}
        return read_options(**{**given, **own, "padding_side": self.padding_side if side is None else side})

    @property
    def model_max_length(self) -> int:
        """What truncation=True cuts to; as in transformers, a number beyond all texts if nothing is cut."""
        return NO_LONGEST if self._longest is None else self._longest

    @model_max_length.setter
    def model_max_length(self, value: int | None) -> None:
        self._longest = read_longest(value)

    def pad(self, encoded_inputs: Mapping[str, Any] | Sequence[Mapping[str, Any]], **options: Any) -> Encoding:
        """Fill rows of ids that were encoded before to one length; options as in a call."""
        if not isinstance(encoded_inputs, Mapping):
            encoded_inputs = {"input_ids": [one["input_ids"] for one in encoded_inputs]}
        rows = [list_ids(row) for row in encoded_inputs["input_ids"]]
        asked = self._read_options({"padding": True, **options})
        return fill_call(rows, asked, self.pad_token_id, is_single=False)

    def tokenize(self, text: str, add_special_tokens: bool = False) -> list[str | None]:
        """The tokens of a text, as the vocabulary spells them."""
        return self.convert_ids_to_tokens(self.encode(text, add_special_tokens))

    @overload
    def encode(self, text: str, add_special_tokens: bool = ...) -> list[int]: ...
    @overload
    def encode(self, text: str, add_special_tokens: bool = ..., **options: Any) -> Any: ...
    def encode(self, text: str, add_special_tokens: bool = True, **options: Any) -> Any:
        """The ids of one text; `options` are those of a call."""
        if options:
            return self(text, add_special_tokens=add_special_tokens, **options).input_ids
        return self._encode_all([text], add_special_tokens)[0]

    def _encode_all(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        return self._encoder.encode(texts, add_special_tokens)

    # --- ids to text ------------------------------------------------------------------------------------

    @overload
    def decode(
        self,
        token_ids: int | Sequence[int] | torch.Tensor,
        skip_special_tokens: bool = ...,
        *,
        clean_up_tokenization_spaces: bool | None = ...,
        output_offsets: Literal[False] = ...,
        time_precision: float = ...,
        **unknown: object,
    ) -> str: ...
    @overload
    def decode(
        self,
        token_ids: int | Sequence[int] | torch.Tensor,
        skip_special_tokens: bool = ...,
        *,
        clean_up_tokenization_spaces: bool | None = ...,
        output_offsets: Literal[True],
        time_precision: float = ...,
        **unknown: object,
    ) -> dict[str, Any]: ...
    def decode(
        self,
        token_ids: int | Sequence[int] | torch.Tensor,
        skip_special_tokens: bool = False,
        *,
        clean_up_tokenization_spaces: bool | None = None,
        output_offsets: bool = False,
        time_precision: float = STEP_SECONDS,
        **unknown: object,
    ) -> str | dict[str, Any]:
        """The text of some ids. Ids past the vocabulary, which some models can emit, have none.

        With `output_offsets`, of a Whisper tokenizer: `{"text": …, "offsets": [{"text", "timestamp"}, …]}`, where
        timestamps are in seconds, `time_precision` apart, and stand in no text.
        """
        if unknown:
            raise SettingError(
                f"decode does not know {', '.join(sorted(unknown))}; it knows skip_special_tokens, "
                "clean_up_tokenization_spaces, output_offsets and time_precision"
            )
        ids = list_ids(token_ids)
        if output_offsets:
            first = require_token(self.backend_tokenizer, NO_TIMESTAMPS, "output_offsets") + 1
            cleans = clean_up_tokenization_spaces
            shown = [token for token in ids if token < first]
            text = self.decode(shown, skip_special_tokens, clean_up_tokenization_spaces=cleans)
            return {"text": text, "offsets": find_offsets(ids, first, self.decode, time_precision)}
        with refusing_damage():
            text = self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        cleans = clean_up_tokenization_spaces
        if self.clean_up_tokenization_spaces if cleans is None else cleans:
            for spaced, clean in (*_CLEANED, *_CLEANED_LATER):
                text = text.replace(spaced, clean)
        return text

    def get_prompt_ids(self, text: str, return_tensors: Literal["np", "pt"] | None = "np") -> Any:
        """A text as the `prompt_ids` of a Whisper model: what was said before, or words to expect."""
        if return_tensors not in ("np", "pt", None):
            raise SettingError(f"return_tensors={return_tensors!r:.40} is neither 'np', 'pt' nor None")
        ids = self.encode(f" {text.strip()}", add_special_tokens=False)
        special = set(self.all_special_ids)
        found = next((token for token in ids if token in special), None)
        if found is not None:
            raise InputError(f"a prompt can't hold the special token {self.convert_ids_to_tokens(found)}; leave it out")
        made = [require_token(self.backend_tokenizer, PREVIOUS, "get_prompt_ids"), *ids]
        return made if return_tensors is None else np.array(made) if return_tensors == "np" else torch.tensor(made)

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
            return self.backend_tokenizer.id_to_token(list_ids(ids)[0])
        skipped = set(self.all_special_ids) if skip_special_tokens else set()
        return [self.backend_tokenizer.id_to_token(i) for i in list_ids(ids) if i not in skipped]

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

    def add_special_tokens(self, special_tokens_dict: Mapping[str, str]) -> int:
        """Give names (`pad_token`, …) to tokens of the vocabulary; returns 0, since a vocabulary does not grow."""
        for name, token in special_tokens_dict.items():
            self.special_tokens.set(name, token)
        return 0

    @property
    def all_special_tokens(self) -> list[str]:
        """Every token that `skip_special_tokens` leaves out."""
        return self.special_tokens.list_all()

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of every token that `skip_special_tokens` leaves out."""
        ids = map(self.backend_tokenizer.token_to_id, self.all_special_tokens)
        return [token_id for token_id in ids if token_id is not None]

    @property
    def skipped_ids(self) -> frozenset[int]:
        """The same as a set, looked up once: changes made in `backend_tokenizer` itself are not noticed."""
        return self.special_tokens.list_skipped()

    # --- chat -------------------------------------------------------------------------------------------

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        return_tensors: Any = None,
        return_dict: bool = True,
        chat_template: str | None = None,
        padding: Any = False,
        truncation: Any = None,
        max_length: int | None = None,
        **variables: Any,
    ) -> Any:
        """Render the messages of a chat, or of several, with the model's chat template: ids, or text if not `tokenize`.

        `chat_template` is the name of one of the model's templates, or a template itself; `variables` are the
        template's own. Ids come with their mask, as a call's do; alone, in a list or a tensor of one row per chat, with
        `return_dict=False`. With `continue_final_message` the text ends where the last message's words do.
        """
        from unspool.text.chat import (
            cut_after_last_message,
            render_chat,
        )  # brings jinja2, a tenth of a second that plain text can do without

        if not isinstance(conversation, list | tuple):
            raise InputError(f"a chat is a list of messages, not a {type(conversation).__name__}")
        if continue_final_message and add_generation_prompt:
            raise SettingError(
                "continue_final_message goes on with a message, and add_generation_prompt begins another; use one"
            )
        is_batch = bool(conversation) and all(isinstance(chat, list | tuple) for chat in conversation)
        chats: Sequence[Any] = conversation if is_batch else [conversation]
        template = choose_template(self.chat_template, chat_template, has_tools=tools is not None)
        texts = [
            render_chat(
                template,
                messages,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                documents=documents,
                special_tokens=self.special_tokens_map,
                **variables,
            )
            for messages in chats
        ]
        if continue_final_message:
            texts = [cut_after_last_message(text, messages) for text, messages in zip(texts, chats, strict=True)]
        if not tokenize:
            if return_tensors is not None:
                raise SettingError("return_tensors is for ids; leave it out, or use tokenize=True")
            return texts if is_batch else texts[0]
        encoding = self(
            texts if is_batch else texts[0],
            return_tensors=return_tensors,
            add_special_tokens=False,
            padding=padding,
            truncation=truncation,
            max_length=max_length,
        )
        return encoding if return_dict else encoding.input_ids
