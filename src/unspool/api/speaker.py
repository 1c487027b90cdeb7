"""What answers and prefixes need from a language model, and the pieces of text that it streams."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Protocol

from unspool.config import GenerationConfig
from unspool.decoding.loop import LiveBeam
from unspool.outputs import Generation, TokenLogprob
from unspool.text import Tokenizer
from unspool.thoughts.parts import Kind


class Piece(str):
    """A piece of streamed text, with the row and the tokens that it came from."""

    row: int
    token_ids: list[int]
    finish_reason: str | None
    logprobs: list[TokenLogprob]
    kind: Kind  # "text", or "thought" where thoughts are set apart
    beams: list[list[LiveBeam]] | None  # every prompt's current beams, with stream(beams="all")

    def __new__(
        cls,
        text: str,
        row: int = 0,
        token_ids: Sequence[int] = (),
        finish_reason: str | None = None,
        logprobs: Sequence[TokenLogprob] = (),
        beams: list[list[LiveBeam]] | None = None,
        kind: Kind = "text",
    ) -> Piece:
        piece = super().__new__(cls, text)
        piece.row, piece.finish_reason, piece.beams = row, finish_reason, beams
        piece.token_ids, piece.logprobs, piece.kind = list(token_ids), list(logprobs), kind
        return piece


class Speaker(Protocol):
    """A language model to those who call it."""

    name: str
    model: Any
    tokenizer: Tokenizer | None

    @property
    def generation_config(self) -> GenerationConfig: ...

    def encode(self, prompt: Any, *, chat: bool = False, tools: Any = None) -> list[list[int]]: ...

    def generate(self, prompt: Any = None, **settings: Any) -> Generation: ...

    def stream(self, prompt: Any = None, **settings: Any) -> Iterator[Piece]: ...

    def astream(self, prompt: Any = None, **settings: Any) -> AsyncIterator[Piece]: ...
