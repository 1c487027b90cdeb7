"""Pictures as transformers reads them: processors make tensors of them, and vision parts embeddings of these."""

from unspool.models.adapters.pictures.embedding import PICTURE_INPUTS, PIXELS, EmbeddedPrompts, embed_call
from unspool.models.adapters.pictures.processor import PictureProcessor, read_whole_config
from unspool.models.adapters.pictures.reader import PicturePrompt, PictureReader

__all__ = [
    "PICTURE_INPUTS",
    "PIXELS",
    "EmbeddedPrompts",
    "PictureProcessor",
    "PicturePrompt",
    "PictureReader",
    "embed_call",
    "read_whole_config",
]
