"""Pictures as transformers reads them: its processors make tensors of them, its vision parts make embeddings of these."""

from unspool.models.adapters.pictures.embedding import PICTURE_INPUTS, EmbeddedPrompts, embed_call
from unspool.models.adapters.pictures.processor import PictureProcessor, read_whole_config
from unspool.models.adapters.pictures.reader import PicturePrompt, PictureReader

__all__ = [
    "PICTURE_INPUTS",
    "EmbeddedPrompts",
    "PictureProcessor",
    "PicturePrompt",
    "PictureReader",
    "embed_call",
    "read_whole_config",
]
