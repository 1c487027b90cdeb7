"""The public entry points: load a model, generate, stream."""

from unspool.api.answer import Answer
from unspool.api.attachment import attach, detach
from unspool.api.calls import generate, stream
from unspool.api.language_model import LanguageModel, load
from unspool.api.speaker import Piece

__all__ = ["Answer", "LanguageModel", "Piece", "attach", "detach", "generate", "load", "stream"]
