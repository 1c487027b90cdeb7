"""What a draft model with an encoder reads: the model's sources, in the states of its own encoder or of the model's."""

from __future__ import annotations

from typing import cast

from unspool.decoding.prompts import EncoderInput
from unspool.protocols import Encoded, Encoding, Model, SourceAnswer, SourceAsk


def shares_encoder(assistant: Model, model: Model) -> bool:
    """Whether a draft model's decoder reads the states that the model's encoder makes."""
    if assistant is model or "borrowed_states" in assistant.info.can:
        return True
    return hasattr(assistant, "encodes_like") and cast(Encoding, assistant).encodes_like(model)


def can_read(assistant: Model, model: Model, source: EncoderInput) -> bool:
    """Whether there is something that a draft model can read: states that were made for it, or what encoders read.

    Embeddings of tokens are the model's own.
    """
    has_features = source.embeds is not None and model.info.features is not None
    if source.drafted is not None or source.tokens is not None or has_features:
        return True
    return getattr(assistant, "prepared", None) is not None or shares_encoder(assistant, model)


def encode_draft(
    assistant: Model, model: Model, source: EncoderInput, encoded: Encoded | None, answer: SourceAnswer
) -> Encoded:
    """The states that a draft model's decoder reads; `encoded` are the model's own, if it has made them.

    It has not where a cache was given, and the caller may have given them beside it.
    """
    if source.drafted is not None:
        return source.drafted
    reader = assistant
    if shares_encoder(assistant, model):
        known = source.encoded if encoded is None else encoded
        if known is not None:
            return known
        reader = model
    return answer(SourceAsk(reader, source.tokens, source.lengths, embeds=source.embeds))
