"""Reading sentencepiece's model files, which are protobuf messages, and building tokenizers of them."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Final

import tokenizers
from tokenizers import decoders

from unspool.errors import LoadError, UnsupportedError
from unspool.protobuf import read_fields
from unspool.small_files import read_bytes
from unspool.text.backend import SPACE, build_sentencepiece, build_unigram, find_merges, refusing_damage
from unspool.text.bounds import check_added_tokens, check_charsmap, check_pieces

MAX_BYTES: Final = 32 << 20
MAX_PIECES: Final = 1_000_000


class PieceKind(IntEnum):
    """What a piece is for."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class SentencePiece:
    """A part of a word, the logarithm of its probability, and what it is for."""

    text: str
    score: float
    kind: PieceKind = PieceKind.NORMAL


@dataclass(slots=True)
class SentencePieces:
    """What a model file says: its pieces in the order of their ids, and how a text is prepared for them."""

    pieces: list[SentencePiece] = field(default_factory=list)
    algorithm: int = 1  # 1: unigram, 2: BPE, 3: words, 4: characters
    charsmap: bytes = b""
    adds_space_prefix: bool = True
    removes_extra_spaces: bool = True

    @property
    def unk_id(self) -> int | None:
        """The id of the piece for what no other piece has."""
        return next((index for index, piece in enumerate(self.pieces) if piece.kind == PieceKind.UNKNOWN), None)


def read_sentencepieces(path: Path) -> SentencePieces:
    """Read a sentencepiece model file."""
    data = read_bytes(path, MAX_BYTES)
    found = SentencePieces()
    try:
        for number, value in read_fields(data):
            if number == 1 and isinstance(value, bytes):
                found.pieces.append(_read_piece(value))
                if len(found.pieces) > MAX_PIECES:
                    raise ValueError(f"it has more than {MAX_PIECES} pieces")
            elif number == 2 and isinstance(value, bytes):
                trained = dict(read_fields(value))
                found.algorithm = _as_number(trained.get(3, 1))
            elif number == 3 and isinstance(value, bytes):
                normalizer = dict(read_fields(value))
                charsmap = normalizer.get(2, b"")
                found.charsmap = charsmap if isinstance(charsmap, bytes) else b""
                found.adds_space_prefix = bool(normalizer.get(3, 1))
                found.removes_extra_spaces = bool(normalizer.get(4, 1))
    except (ValueError, IndexError, struct.error) as error:
        raise LoadError(f"{path} is not a sentencepiece model: {error}") from error
    if not found.pieces:
        raise LoadError(f"{path} is not a sentencepiece model: it has no pieces")
    check_pieces((piece.text for piece in found.pieces), str(path))
    if found.charsmap:
        check_charsmap(found.charsmap, str(path))
    return found


def build_pieces(
    model: SentencePieces, where: str, *, pieces: Sequence[SentencePiece] | None = None, unk_id: int | None = None
) -> tokenizers.Tokenizer:
    """A tokenizer of a model file; of `pieces`, if a family has others than the file."""
    if model.algorithm not in (1, 2):
        raise UnsupportedError(
            f"{where} is a sentencepiece model of another kind than unigram and BPE, which is not read; use a folder "
            "with tokenizer.json"
        )
    pieces, unk_id = (model.pieces, model.unk_id) if pieces is None else (pieces, unk_id)
    if unk_id is None:
        raise LoadError(f"{where} has no piece for unknown text")
    is_bpe = model.algorithm == 2
    backend = _build_bpe(model, where, pieces, unk_id) if is_bpe else _build_unigram(model, pieces, unk_id)
    # A user-defined piece scores 0, the best there is. As an added token it would begin a new word after it.
    marked = [
        tokenizers.AddedToken(piece.text, normalized=False, special=True)
        for piece in pieces
        if piece.kind in (PieceKind.CONTROL, PieceKind.UNKNOWN)
    ]
    check_added_tokens([token.content for token in marked], where)
    with refusing_damage():
        backend.add_tokens(marked)
    return backend


def _build_bpe(model: SentencePieces, where: str, pieces: Sequence[SentencePiece], unk_id: int) -> tokenizers.Tokenizer:
    ids = {piece.text: index for index, piece in enumerate(pieces)}
    if len(ids) != len(pieces):
        raise LoadError(f"{where} has a piece twice, so an id has no piece of its own")
    joined = [piece.text for piece in pieces if piece.kind in (PieceKind.NORMAL, PieceKind.USER_DEFINED)]
    return build_sentencepiece(
        ids,
        find_merges(joined, ids, [piece.score for piece in pieces]),
        unk_token=pieces[unk_id].text,
        adds_space_prefix=model.adds_space_prefix,
        charsmap=model.charsmap or None,
        removes_extra_spaces=model.removes_extra_spaces,
    )


def _build_unigram(model: SentencePieces, pieces: Sequence[SentencePiece], unk_id: int) -> tokenizers.Tokenizer:
    backend = build_unigram(
        [(piece.text, piece.score) for piece in pieces],
        unk_id=unk_id,
        charsmap=model.charsmap or None,
        adds_space_prefix=model.adds_space_prefix,
        removes_extra_spaces=model.removes_extra_spaces,
    )
    if any(piece.kind == PieceKind.BYTE for piece in pieces):
        strip = [decoders.Strip(" ", 1, 0)] if model.adds_space_prefix else []
        steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        backend.decoder = decoders.Sequence(steps)
    return backend


def _read_piece(data: bytes) -> SentencePiece:
    values = dict(read_fields(data))
    text, score = values.get(1, b""), values.get(2, 0.0)
    if not isinstance(text, bytes) or not isinstance(score, float) or not math.isfinite(score):
        raise ValueError("a piece has no text or no finite score")
    kind = _as_number(values.get(3, 1))
    if kind not in PieceKind.__members__.values():
        raise ValueError(f"a piece is of the kind {kind}")
    return SentencePiece(text.decode(), score, PieceKind(kind))


def _as_number(value: int | float | bytes) -> int:
    if not isinstance(value, int):
        raise ValueError("a whole number is missing")
    return value
