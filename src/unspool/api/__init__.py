"""The public entry points: load a model, generate, stream."""

from unspool.api.answer import Answer, Piece
from unspool.api.calls import generate, stream
from unspool.api.language_model import LanguageModel, load

__all__ = ["Answer", "LanguageModel", "Piece", "generate", "load", "stream"]
