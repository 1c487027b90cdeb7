"""From the arguments of `generate()` to prompt rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from unspool.config import GenerationConfig
from unspool.config.values import MOST_ROWS
from unspool.decoding.prompts import (
    EncoderInput,
    Prompts,
    fill_right,
    mark_padding,
    pack_source,
    put_in_order,
    read_ids,
    read_layout,
)
from unspool.errors import InputError, SettingError, UnsupportedError
from unspool.kernels.seats import ALONE, Seats
from unspool.plan import as_token_ids, find_marking_pad
from unspool.protocols import Encoded, Model, ModelInfo, PreparedRows


@dataclass(slots=True)
class Inputs:
    """What `generate()` takes besides settings: names as in the reference."""

    input_ids: Any = None
    attention_mask: Any = None
    inputs_embeds: Any = None
    seats: Seats | None = None  # the places of the tokens of `inputs_embeds`, if they are not one after the other
    decoder_input_ids: Any = None
    encoder_outputs: Any = None
    assistant_encoder_outputs: Any = None  # the states that a draft model's own encoder has made of the source
    input_features: Any = None
    negative_prompt_ids: Any = None
    negative_prompt_attention_mask: Any = None
    prepared: PreparedRows | None = None  # what the model has made of inputs of its own, instead of all of these


def read_prompts(model: Model, inputs: Inputs, settings: GenerationConfig, *, hides_padding: bool = False) -> Prompts:
    """Check the inputs against the model and free them of padding; `hides_padding` is what processors are given."""
    prompts = _read_own(model, inputs, settings, hides_padding)
    negative = _read_negative(model, inputs, settings, prompts.num_rows)
    if negative is None and prompts.hides_padding == hides_padding:
        return prompts
    return replace(prompts, negative=negative, hides_padding=hides_padding)


def _read_own(model: Model, inputs: Inputs, settings: GenerationConfig, hides_padding: bool) -> Prompts:
    if inputs.prepared is not None:
        return _take_prepared(inputs.prepared)
    if model.info.is_encoder_decoder:
        return _read_source(model, inputs, settings)
    for name in ("decoder_input_ids", "encoder_outputs", "input_features"):
        if getattr(inputs, name) is not None:
            raise InputError(f"{name} belongs to encoder-decoder models; a {model.info.family} model has no encoder")
    info = model.info
    if inputs.inputs_embeds is not None:
        return _read_embeds(model, inputs, settings)
    if inputs.input_ids is None:
        return Prompts(_start_alone(inputs, settings, info).to(model.device), [1])
    ids = read_ids(inputs.input_ids, info.vocab_size)
    lengths, order = read_layout(
        inputs.attention_mask, (ids.shape[0], ids.shape[1]), ids=ids, pad_token_id=find_marking_pad(settings)
    )
    if order is not None:
        ids = ids.to(model.device)
        return Prompts(put_in_order(ids, order), lengths, shown=ids, order=order)
    on_host = ids if ids.device.type == "cpu" else None
    return Prompts(ids, lengths, on_host=on_host, hides_padding=hides_padding, device=model.device)


def _take_prepared(rows: PreparedRows) -> Prompts:
    source = None
    if rows.num_sources:
        width = 1 if rows.source_ids is None else rows.source_ids.shape[1]
        source = EncoderInput(rows.source_ids, [width] * rows.num_sources)
    return Prompts(
        rows.ids, rows.lengths, shown=rows.shown, embeds=rows.embeds, num_hidden=rows.num_hidden, source=source
    )


def _read_negative(model: Model, inputs: Inputs, settings: GenerationConfig, num_rows: int) -> EncoderInput | None:
    """The negative prompts, one for every row; None if guidance has none, or nothing to do."""
    given, mask = inputs.negative_prompt_ids, inputs.negative_prompt_attention_mask
    if given is None:
        if mask is not None:
            raise InputError(
                "negative_prompt_attention_mask was given without negative_prompt_ids to stand over; give both"
            )
        return None
    if settings.guidance_scale is None:
        raise SettingError(
            "negative_prompt_ids lead a text away from them with guidance alone; add guidance_scale (1.5, for instance)"
        )
    vocab_size = model.info.source_vocab_size or model.info.vocab_size
    ids = read_ids(given, vocab_size, "negative_prompt_ids").to(model.device)
    rows = ids.shape[0]
    if rows not in (1, num_rows):
        raise InputError(
            f"negative_prompt_ids has {rows} rows for {num_rows} prompts; give one for each, or one for all of them"
        )
    # As in the reference, every id counts as a token unless the mask says otherwise.
    name = "negative_prompt_attention_mask"
    tokens, lengths = pack_source(ids, mask, name)
    copies = num_rows // rows
    if settings.guidance_scale == 1:
        return None
    return EncoderInput(tokens.expand(num_rows, -1) if copies > 1 else tokens, lengths * copies)


def _start_alone(inputs: Inputs, settings: GenerationConfig, info: ModelInfo) -> torch.Tensor:
    if inputs.attention_mask is not None:
        raise InputError(
            "attention_mask was given without input_ids or inputs_embeds for it to stand over; give one of them"
        )
    if settings.bos_token_id is None:
        raise InputError("no prompt was given, and the model has no bos_token_id to begin with; pass input_ids")
    return read_ids([[settings.bos_token_id]], info.vocab_size, "bos_token_id")


def _read_embeds(model: Model, inputs: Inputs, settings: GenerationConfig) -> Prompts:
    """Embedded prompts. Ids beside them are what processors see and sequences begin with, and pad tokens among them
    are padding.
    """
    info = model.info
    if "inputs_embeds" not in info.can:
        raise UnsupportedError(f"a {info.family} model can't read inputs_embeds; pass input_ids")
    embeds = _check_embeds(inputs.inputs_embeds, _find_width(info), "inputs_embeds").to(model.device)
    rows, width = embeds.shape[:2]
    if inputs.input_ids is None:
        ids = torch.zeros(rows, 0, dtype=torch.int64, device=model.device)
        lengths, order = read_layout(inputs.attention_mask, (rows, width))
    else:
        ids = read_ids(inputs.input_ids, info.vocab_size).to(model.device)
        if ids.shape != (rows, width):
            raise InputError(
                f"input_ids {tuple(ids.shape)} and inputs_embeds {tuple(embeds.shape)} are of different lengths; "
                "given together, they must describe the same tokens"
            )
        pad = find_marking_pad(settings)
        lengths, order = read_layout(inputs.attention_mask, (rows, width), ids=ids, pad_token_id=pad)
    if inputs.seats is not None:
        if "seats" not in info.can:
            raise UnsupportedError(f"a {info.family} model can't read embeddings that have places; leave pictures out")
        embeds = inputs.seats.join(embeds)
    embeds = put_in_order(embeds, order)
    shown = ids if order is not None and inputs.input_ids is not None else None
    return Prompts(
        ids if shown is None else put_in_order(ids, order),
        lengths,
        shown=shown,
        order=order,
        embeds=fill_right(embeds, [width - length for length in lengths], lengths),
        num_hidden=width if inputs.input_ids is None else 0,
        is_whole=inputs.seats is not None and bool((inputs.seats.groups != ALONE).any()),
    )


def _find_width(info: ModelInfo) -> int:
    """How many numbers the embedding of a token has."""
    return info.embedding_size or info.hidden_size


def check_counted(prompts: Prompts, info: ModelInfo, num_held: int, chunk: int | None) -> None:
    """Raise where a text that is begun holds a token without a position, and is not read in one first pass."""
    if info.uncounted_id is None or not (num_held or (chunk or prompts.width) < prompts.width):
        return
    if bool(prompts.ids.eq(info.uncounted_id).any()):
        name = "past_key_values" if num_held else "prefill_chunk_size"
        raise UnsupportedError(
            f"decoder_input_ids hold the pad token {info.uncounted_id}, to which a {info.family} model gives no "
            f"position where it reads the whole text in one pass; leave `{name}` out"
        )


def _check_embeds(embeds: Any, width: int, name: str) -> torch.Tensor:
    if not isinstance(embeds, torch.Tensor) or embeds.dim() != 3 or not embeds.is_floating_point():
        raise InputError(f"{name} must be a floating-point tensor of the shape (rows, length, {width})")
    if embeds.shape[2] != width or 0 in embeds.shape:
        raise InputError(
            f"{name} has the shape {tuple(embeds.shape)} and the model's width is {width}; "
            "use the embeddings of this model"
        )
    if not bool(torch.isfinite(embeds).all()):
        raise InputError(f"{name} holds NaN or infinite values")
    return embeds


def _read_source(model: Model, inputs: Inputs, settings: GenerationConfig) -> Prompts:
    source = _encoder_side(model, inputs, settings)
    rows = len(source.lengths)
    info = model.info
    start = as_token_ids(settings.decoder_start_token_id, "decoder_start_token_id", info)
    if any(token < 0 for token in start):  # a way to say "none", which can't be said for one row of several
        start = ()
    start = start or tuple(token for token in as_token_ids(settings.bos_token_id, "bos_token_id", info) if token >= 0)
    if inputs.decoder_input_ids is not None:
        ids = read_ids(inputs.decoder_input_ids, info.vocab_size, "decoder_input_ids").to(model.device)
        if ids.shape[0] != rows:
            raise InputError(f"decoder_input_ids has {ids.shape[0]} rows and the encoder's input {rows}; give as many")
    elif not start:
        raise SettingError("the model names no decoder_start_token_id and no bos_token_id; pass decoder_start_token_id")
    if start:
        if len(start) not in (1, rows):
            raise SettingError(
                f"decoder_start_token_id has {len(start)} values for {rows} rows; give one, or one per row"
            )
        column = torch.tensor(start if len(start) == rows else start * rows, dtype=torch.int64)
        first = column[:, None].to(model.device)  # (rows, 1)
        if inputs.decoder_input_ids is None:
            ids = first
        elif info.features is None and bool((ids[:, :1] != first).all()):
            # A prompt that does not begin with the start token is put after it; in speech, text may stand before it.
            ids = torch.cat((first, ids), dim=1)
    return Prompts(ids, [ids.shape[1]] * rows, source=source)


def _encoder_side(model: Model, inputs: Inputs, settings: GenerationConfig) -> EncoderInput:
    info = model.info
    if inputs.input_features is not None:
        return _read_features(model, inputs)
    if inputs.encoder_outputs is not None:
        encoded = _read_states(model, inputs, "encoder_outputs")
        return EncoderInput(None, encoded.lengths, encoded=encoded)
    if info.features is not None:
        raise InputError(
            f"a {info.family} model reads sound: give input_features, encoder_outputs, or audio to lm.transcribe()"
        )
    if inputs.inputs_embeds is not None:
        embeds = _check_embeds(inputs.inputs_embeds, _find_width(info), "inputs_embeds").to(model.device)
        embeds, lengths = pack_source(embeds, inputs.attention_mask)
        _check_longest(lengths, info)
        return EncoderInput(None, lengths, embeds=embeds)
    if inputs.input_ids is None:
        ids = _start_alone(inputs, settings, info).to(model.device)
        return EncoderInput(ids, [1])
    ids = read_ids(inputs.input_ids, info.source_vocab_size or info.vocab_size).to(model.device)
    mask = inputs.attention_mask
    if mask is None:
        mask = mark_padding(ids, find_marking_pad(settings))
    tokens, lengths = pack_source(ids, mask)
    _check_longest(lengths, info)
    return EncoderInput(tokens, lengths, ids)


def _read_states(model: Model, inputs: Inputs, name: str) -> Encoded:
    """The states of an encoder, as a tensor or in the objects that encoders return."""
    given = getattr(inputs, name)
    if not isinstance(given, torch.Tensor):
        given = given[0] if isinstance(given, tuple) and given else getattr(given, "last_hidden_state", None)
    states = _check_embeds(given, model.info.hidden_size, name).to(model.device)
    return Encoded(*pack_source(states, inputs.attention_mask))


def read_drafted(assistant: Model, inputs: Inputs, source: EncoderInput) -> EncoderInput:
    """The source with the states that a draft model's encoder has made of it."""
    drafted = _read_states(assistant, inputs, "assistant_encoder_outputs")
    if len(drafted.lengths) != len(source.lengths):
        raise InputError(
            f"assistant_encoder_outputs has {len(drafted.lengths)} rows and the encoder's input {len(source.lengths)}"
        )
    return replace(source, drafted=drafted)


def _check_longest(lengths: list[int], info: ModelInfo) -> None:
    longest, limit = max(lengths), info.longest_source
    if limit is not None and longest > limit:
        raise InputError(
            f"row {lengths.index(longest)} has {longest} tokens to read and the encoder of a {info.family} model takes "
            f"at most {limit}; shorten the source, or split it"
        )


def _read_features(model: Model, inputs: Inputs) -> EncoderInput:
    """What an encoder of sound reads. Every frame counts, so a mask says nothing."""
    shape, given = model.info.features, inputs.input_features
    if shape is None:
        raise InputError(
            f"input_features are for models that read sound, and a {model.info.family} model reads tokens; give "
            "input_ids"
        )
    for name in ("input_ids", "inputs_embeds", "encoder_outputs"):
        if getattr(inputs, name) is not None:
            raise InputError(f"input_features and {name} are two sources; give one of them")
    if not isinstance(given, torch.Tensor) or given.dim() != 3 or not given.is_floating_point():
        raise InputError(
            f"input_features must be a floating-point tensor of the shape (rows, {shape.channels}, {shape.frames})"
        )
    rows, channels, frames = given.shape
    if (channels, frames) != (shape.channels, shape.frames) or not 0 < rows <= MOST_ROWS:
        raise InputError(
            f"input_features has the shape {tuple(given.shape)}, and a window of the model is (rows, "
            f"{shape.channels}, {shape.frames}); generate() and lm.transcribe() read longer sounds window by window"
        )
    if not bool(torch.isfinite(given).all()):
        raise InputError("input_features holds NaN or infinite values")
    return EncoderInput(None, [shape.positions] * rows, embeds=given.to(model.device))
