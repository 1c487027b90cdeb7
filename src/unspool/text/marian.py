"""Marian's tokenizer: one sentencepiece model cuts sources, another has written the targets, a third file has ids."""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import decoders, models

from unspool.errors import InputError, LoadError
from unspool.small_files import make_folder, read_bytes, read_json_object
from unspool.text.backend import SPACE, refusing_damage
from unspool.text.bounds import check_vocabulary
from unspool.text.sentencepiece_file import MAX_BYTES, MAX_PIECES, build_pieces, read_sentencepieces
from unspool.text.text_encoder import TextEncoder
from unspool.text.tokenizer import Tokenizer

FILES: Final = ("source.spm", "vocab.json")  # by which a folder is known
_COPIED: Final = (*FILES, "target.spm", "target_vocab.json", "tokenizer_config.json", "special_tokens_map.json")
_NAMED: Final = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
_CODE: Final = re.compile(">>([^<>]{1,40})<<")


class MarianTokenizer(Tokenizer):
    """A tokenizer whose pieces of a source are numbered by a vocabulary apart; ids are decoded by the target's.

    A source for a model of several target languages begins with the code of one: `>>deu<< Good morning`.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, source: tokenizers.Tokenizer, ids: dict[str, int], files: dict[str, bytes]
    ) -> None:
        """`backend` has the target's vocabulary, `source` cuts texts into pieces, `ids` numbers them."""
        super().__init__(backend, special_tokens=_NAMED)
        self._encoder = TextEncoder(source)
        self._ids = ids
        self._files = files
        unknown = ids[_NAMED["unk_token"]]
        pieces = (source.id_to_token(index) for index in range(source.get_vocab_size(with_added_tokens=True)))
        self._places = [unknown if piece is None else ids.get(piece, unknown) for piece in pieces]

    @classmethod
    def from_folder(cls, folder: Path | str) -> MarianTokenizer:
        """Read `source.spm`, `vocab.json` and, if sides have vocabularies of their own, `target_vocab.json`."""
        place = Path(folder)
        model = read_sentencepieces(place / "source.spm")
        source = build_pieces(model, str(place / "source.spm"))
        with refusing_damage():
            source.add_special_tokens([token for token in _NAMED.values() if source.token_to_id(token) is None])
        ids = _read_ids(place / "vocab.json")
        has_own = (place / "target_vocab.json").is_file()
        target = _read_ids(place / "target_vocab.json") if has_own else ids
        backend = tokenizers.Tokenizer(models.WordLevel(dict(target), unk_token=_NAMED["unk_token"]))
        backend.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme="always")
        files = {name: read_bytes(place / name, MAX_BYTES) for name in _COPIED if (place / name).is_file()}
        return cls(backend, source, ids, files)

    def save(self, folder: Path | str) -> None:
        """Write the files that it was read from."""
        place = Path(folder)
        make_folder(place)
        for name, data in self._files.items():
            (place / name).write_bytes(data)

    @cached_property
    def languages(self) -> dict[str, str]:
        """The target languages that a source may begin with, and their tokens."""
        return {code[1]: token for token in self._ids if (code := _CODE.fullmatch(token))}

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """The id of a token of the sources' vocabulary, or of each of several."""
        if isinstance(tokens, str):
            return self._ids.get(tokens, self._ids[_NAMED["unk_token"]])
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def _encode_all(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        starts = [self._find_code(text) for text in texts]
        bare = [text if start is None else text[len(start) :] for text, start in zip(texts, starts, strict=True)]
        rows = super()._encode_all(bare, False)
        end = [self._ids[_NAMED["eos_token"]]] if add_special_tokens else []
        return [
            [*([] if start is None else [self._ids[start]]), *(self._places[index] for index in row), *end]
            for row, start in zip(rows, starts, strict=True)
        ]

    def _find_code(self, text: str) -> str | None:
        """The token of the language that a text begins with; None if it names none."""
        found = _CODE.match(text) if isinstance(text, str) and self.languages else None
        if found is None:
            return None
        if found[1] not in self.languages:
            raise InputError(
                f"the text begins with {found[0]}, and the model does not write that language; it writes "
                f"{', '.join(sorted(self.languages)[:200])}"
            )
        return found[0]


def has_marian(folder: Path) -> bool:
    """Whether a folder has Marian's files and no tokenizer.json."""
    return not (folder / "tokenizer.json").is_file() and all((folder / name).is_file() for name in FILES)


def _read_ids(path: Path) -> dict[str, int]:
    ids = read_json_object(path, MAX_BYTES, is_strict=False)
    if len(ids) > MAX_PIECES:
        raise LoadError(f"{path} has {len(ids)} tokens; at most {MAX_PIECES} are read")
    check_vocabulary(ids, path, 2 * MAX_PIECES - 1)
    missing = [token for token in _NAMED.values() if token not in ids]
    if missing:
        raise LoadError(f"{path} has no {missing[0]}, which Marian's sources end with or are filled with")
    return ids
