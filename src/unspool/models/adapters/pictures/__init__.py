"""Pictures as transformers reads them: its processors make tensors of them, its vision parts make embeddings of these."""

from unspool.models.adapters.pictures.embedding import PICTURE_INPUTS, EmbeddedPrompts, embed_call, embed_prompts

__all__ = ["PICTURE_INPUTS", "EmbeddedPrompts", "embed_call", "embed_prompts"]
