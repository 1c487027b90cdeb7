"""Opening the tokenizer of a model's folder, whichever kind it has."""

from __future__ import annotations

from pathlib import Path

from unspool.text.marian import MarianTokenizer, has_marian
from unspool.text.tokenizer import Tokenizer


def open_tokenizer(folder: Path | str) -> Tokenizer:
    """The tokenizer of a folder: of one vocabulary, or Marian's of two."""
    kind = MarianTokenizer if has_marian(Path(folder)) else Tokenizer
    return kind.from_folder(folder)
