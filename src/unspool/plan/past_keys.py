"""The past_key_values that a caller gives: whether they are this model's, these prompts', and large enough."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unspool.cache import BEAMS_LEFT, Cache, DynamicCache, EncoderDecoderCache, MambaCache
from unspool.errors import SettingError, UnsupportedError
from unspool.plan.call import Plan
from unspool.plan.prompt_shape import PromptShape
from unspool.protocols import Model


def read_cache(cache: Any, lengths: list[int], source_lengths: list[int] | None, model: Model) -> Cache | None:
    """The past_key_values that a caller gave, or the error that says why they can't serve this call."""
    if cache is None:
        return None
    info = model.info
    kind = EncoderDecoderCache if info.is_encoder_decoder else DynamicCache
    keeps_states = "state" in info.layer_kinds
    if keeps_states and not isinstance(cache, MambaCache):
        raise SettingError(
            f"past_key_values is a {type(cache).__name__}, and a {info.family} model keeps states: give the "
            "MambaCache that an earlier call returned, or one of model.new_cache()"
        )
    if isinstance(cache, MambaCache) and not keeps_states:
        raise SettingError(
            f"past_key_values is a MambaCache, which holds states, and a {info.family} model decodes with keys; "
            f"give a {kind.__name__}"
        )
    if isinstance(cache, tuple | list):
        try:
            cache = kind.from_legacy_cache(tuple(cache))
        except (TypeError, ValueError, IndexError, AttributeError) as error:
            raise SettingError(
                f"past_key_values as a tuple must hold each layer's keys and values, as {kind.__name__}"
                f".to_legacy_cache() gives them: {error}"
            ) from error
    if not isinstance(cache, Cache):
        raise SettingError(f"past_key_values must be a cache of unspool's, not a {type(cache).__name__}")
    if isinstance(cache, EncoderDecoderCache) != info.is_encoder_decoder:
        raise SettingError(
            f"past_key_values is a {type(cache).__name__}, and a {info.family} model decodes with a {kind.__name__}; "
            "use model.new_cache()"
        )
    if isinstance(cache, EncoderDecoderCache) and not cache.source_lengths:
        raise SettingError(
            "past_key_values hold nothing of the encoder's states; leave them out (the cache comes back with "
            "return_dict_in_generate=True), or make them with model.new_cache(encoded=model.encode(…))"
        )
    shape = getattr(model, "key_shape", None)
    misfit = cache.find_misfit(shape) if shape is not None else None
    if misfit is not None:
        raise SettingError(
            f"past_key_values are of another model than this {info.family}: {misfit}; use the cache that this model "
            "filled, or a fresh one (model.new_cache())"
        )
    if cache.is_endless and not keeps_states and "shifted_keys" not in info.can:
        raise UnsupportedError(
            f"a {type(cache).__name__} moves keys to other positions, and a {info.family} model's are learned one by "
            "one; use a model with rotary positions or ALiBi, or a DynamicCache"
        )
    if cache.lengths and cache.beams_left == tuple(cache.lengths):
        raise SettingError(BEAMS_LEFT)
    if cache.lengths and len(cache.lengths) != len(lengths):
        raise SettingError(
            f"past_key_values hold {len(cache.lengths)} rows and the prompt has {len(lengths)}; give the rows that "
            "they were filled with, or select some with cache.select_rows(…)"
        )
    if source_lengths is not None:
        _check_sources(cache, source_lengths)
    for row, (held, length) in enumerate(zip(cache.lengths, lengths, strict=False)):
        if held >= length:
            raise SettingError(
                f"past_key_values hold {held} positions of row {row} and its prompt has {length} tokens; pass the "
                "whole sequence as input_ids, with at least one token after what the cache holds"
            )
    return cache


def check_texts(cache: Cache, texts: Sequence[Sequence[int]]) -> None:
    """Raise if a cache holds tokens that prompts have lost to their mask: keys would stand before other tokens."""
    if cache.texts_held is None or list(map(len, cache.texts_held)) != list(cache.lengths):
        return  # it is not known what it holds, or it was changed since
    for row, (held, text) in enumerate(zip(cache.texts_held, texts, strict=True)):
        place = next((place for place, token in enumerate(held) if token != text[place]), None)
        if place is not None:
            raise SettingError(
                f"past_key_values hold the token {held[place]} at position {place} of row {row}, and the prompt has "
                f"{text[place]} there, without the tokens that its attention_mask hides (pad tokens, if there is "
                "none); pass an attention_mask that shows what they hold, or leave past_key_values out"
            )


def _check_sources(cache: Cache, lengths: list[int]) -> None:
    assert isinstance(cache, EncoderDecoderCache)
    held = [length for length in cache.source_lengths for _ in range(cache.num_branches)]
    if len(held) != len(lengths):
        raise SettingError(
            f"past_key_values hold encoded texts for {len(held)} rows and the encoder's input has {len(lengths)}; "
            "give the texts that they were filled with"
        )
    for row, (had, has) in enumerate(zip(held, lengths, strict=True)):
        if had != has:
            raise SettingError(
                f"past_key_values hold an encoded text of {had} positions for row {row} and the encoder's input has "
                f"{has}; pass the input that they were made from, with its attention_mask"
            )


def check_room(cache: Cache, plan: Plan, shape: PromptShape) -> None:
    """Raise if a cache that was given has too little room for a call."""
    room = cache.room
    needed = shape.longest_read + plan.max_new_tokens - 1 + plan.num_candidates  # else the last token is never read
    if plan.guidance_scale is not None and shape.has_embeds:
        needed = max(needed, shape.longest_read + 1)  # the other prompt is read in a pass behind the embeddings
    num_rows, held_rows = 2 * shape.num_rows, getattr(cache, "max_batch_size", None)
    if plan.guidance_scale is not None and held_rows is not None and held_rows < num_rows:
        raise SettingError(
            f"past_key_values have room for {held_rows} rows, and guidance reads {num_rows}: every prompt's and its "
            "other one's; make a larger cache, or leave it out"
        )
    if room is not None and room < needed:
        raise SettingError(
            f"past_key_values have room for {room} positions, and a prompt of {shape.longest} tokens with "
            f"{plan.max_new_tokens} new ones needs {needed}, {needed - room} more; make a larger cache, or lower "
            "max_new_tokens"
        )
