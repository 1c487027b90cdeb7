"""The front door: load a model, generate, stream."""

from unspool.api.calls import generate, stream
from unspool.api.language_model import LanguageModel, Piece, load

__all__ = ["LanguageModel", "Piece", "generate", "load", "stream"]
