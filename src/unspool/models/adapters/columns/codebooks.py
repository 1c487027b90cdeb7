"""Models that write sounds in several codebooks (MusicGen): a row per codebook, delayed by one column each.

The text is encoded once. With guidance, every pass reads a second batch that has seen no text, and the logits of both
are mixed. What comes out is put back in step and decoded to sound by the model's own codec.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from unspool.config import GenerationConfig, GenerationMode
from unspool.errors import SettingError, UnsupportedError
from unspool.models.adapters.adapted import name_failures
from unspool.models.adapters.columns.model import CallInputs, ColumnModel
from unspool.models.adapters.columns.preparation import call_known, make_config
from unspool.models.adapters.columns.state import ColumnCache, Columns
from unspool.models.adapters.description import Description, describe_loosely
from unspool.protocols import Encoded, Forward, PreparedRows, Want

_ENCODINGS: Final = (
    "_prepare_text_encoder_kwargs_for_generation",
    "_prepare_encoder_hidden_states_kwargs_for_generation",
)
_ENCODED: Final = ("encoder_outputs", "encoder_hidden_states")
_READS_TOKENS: Final = ("repetition_penalty", "encoder_repetition_penalty", "watermarking_config")
_FILLED: Final = -2  # marks a column that a codebook's delay leaves without a token


def has_codebooks(model: Any) -> bool:
    """Whether a model has a decoder of delayed codebooks and the codec for them."""
    decoder = getattr(model, "decoder", None)
    return hasattr(decoder, "build_delay_pattern_mask") and hasattr(model, "audio_encoder")


class CodebookModel(ColumnModel):
    """A model with the inputs of one call, whose rows are the codebooks of every sound."""

    def __init__(
        self, model: Any, description: Description, call: CallInputs, pattern: torch.Tensor, scale: float | None
    ) -> None:
        super().__init__(model, description, call)
        self.pattern = pattern  # (rows, columns): what each column must hold, -1 where it is to be written
        self.scale = scale

    @property
    def is_pair(self) -> bool:
        """Always: the text has an encoder."""
        return True

    def new_cache(
        self,
        kind: str = "dynamic",
        rows: int = 1,  # the call's inputs are known
        capacity: int | None = None,  # the model makes its cache itself
        encoded: Encoded | None = None,  # likewise
        config: Mapping[str, Any] | None = None,
    ) -> ColumnCache:
        """The cache that the model makes in its first pass."""
        if kind != "dynamic":
            raise UnsupportedError(
                f"`cache_implementation`={kind!r} can't be had of {type(self.inner).__name__}, which makes its cache "
                "itself; leave it out"
            )
        self._encode()
        inputs = self.call.inputs | {"use_cache": self.call.config.use_cache}
        return _TogetherCache(self.inner, self.call.prompt, inputs, keeps_past=False, name="past_key_values")

    def _encode(self) -> None:
        call = self.call
        if call.source is None:
            return
        value, name = call.source
        config = _with_guidance(call.config, self.scale)
        encode = next(getattr(self.inner, each) for each in _ENCODINGS if hasattr(self.inner, each))
        with name_failures(self.inner):
            call.inputs, call.source = encode(value, call.inputs, name, config), None

    def _read(self, made: Any, columns: Columns, last: torch.Tensor, num_new: int, want: Want) -> Forward:
        if self.scale is not None:
            guided, free = made.logits.chunk(2)
            made.logits = free + (guided - free) * self.scale
        return super()._read(made, columns, last, num_new, want)

    @torch.no_grad()
    def finish(self, sequences: torch.Tensor) -> torch.Tensor:
        """The sounds (sounds, channels, samples) of finished rows."""
        decoder, codec = self.inner.decoder, self.inner.audio_encoder
        codes = self.align(sequences)
        scales = self.call.inputs.get("audio_scales")
        scales = [None] * codes.shape[0] if scales is None else scales
        parts = [codes] if decoder.config.audio_channels == 1 else [codes[:, ::2], codes[:, 1::2]]
        with name_failures(self.inner):
            made = [codec.decode(part[None], audio_scales=scales).audio_values for part in parts]
        return torch.cat(made, dim=1)

    def align(self, sequences: torch.Tensor) -> torch.Tensor:
        """Codes (sounds, codebooks, steps), in step: each row without its delay, as long as the shortest."""
        pattern = self.pattern[:, : sequences.shape[1]].to(sequences.device)
        whole = torch.where(pattern == -1, sequences, pattern)
        is_code = pattern != _FILLED
        is_code[:, 0] = False  # the token that a text begins with
        num_steps = int(is_code.sum(dim=1).min())
        order = (~is_code).long().argsort(dim=1, stable=True)[:, :num_steps]
        return whole.gather(1, order).reshape(-1, self.inner.decoder.num_codebooks, num_steps)


class _TogetherCache(ColumnCache):
    """A cache whose rows belong together, and can't leave one by one."""

    def _select(self, index: torch.Tensor) -> None:
        if index.tolist() != list(range(len(self.lengths))):
            raise UnsupportedError(
                "the codebooks of a sound end together, and a stopping criterion ended some rows of "
                f"{type(self.model).__name__} alone; let it end all of them at once"
            )


@torch.no_grad()
def prepare_codebooks(model: Any, inputs: Any, given: Mapping[str, Any], settings: GenerationConfig) -> CodebookModel:
    """A model of codebooks with one call's inputs; nothing is computed but the codes of a sound that is given."""
    _refuse(model, settings)
    kwargs = {name: value for name, value in given.items() if value is not None and name != "logits_to_keep"}
    description = describe_loosely(model)
    config = make_config(settings)
    scale = settings.guidance_scale if settings.guidance_scale is not None and settings.guidance_scale > 1 else None
    settings.guidance_scale = None  # the passes apply it
    with name_failures(model):
        value, name, kwargs = model._prepare_model_inputs(inputs, config.bos_token_id, kwargs)
        sounds = value.shape[0]
        call_known(
            model._prepare_special_tokens,
            config,
            kwargs_has_attention_mask=True,
            device=value.device,
            batch_size=sounds,
        )
        is_encoded = any(each in kwargs for each in _ENCODED)
        if is_encoded and isinstance(kwargs.get("encoder_outputs"), tuple):
            from transformers.modeling_outputs import BaseModelOutput

            kwargs["encoder_outputs"] = BaseModelOutput(last_hidden_state=kwargs["encoder_outputs"][0])
        elif not is_encoded and "attention_mask" not in kwargs:
            kwargs["attention_mask"] = model._prepare_attention_mask_for_generation(value, config, kwargs)
        if "decoder_input_ids" not in kwargs and "input_values" in kwargs:
            kwargs = model._prepare_audio_encoder_kwargs_for_generation(kwargs["input_values"], kwargs)
        start = config._decoder_start_token_tensor
        ids, kwargs = call_known(
            model._prepare_decoder_input_ids_for_generation,
            batch_size=sounds,
            model_input_name=name,
            model_kwargs=kwargs,
            decoder_start_token_id=start,
            bos_token_id=config._bos_token_tensor,
            device=value.device,
        )
        length = _find_length(settings, ids.shape[1])
        delay = model.decoder.build_delay_pattern_mask
        _, pattern = delay(ids, pad_token_id=_FILLED, max_length=length)
        ids, mask = delay(ids, pad_token_id=start, max_length=length)
    settings.max_new_tokens, settings.max_length = length - ids.shape[1], None
    kwargs |= {"decoder_delay_pattern_mask": mask, "guidance_scale": scale}
    prompt = Columns(ids, torch.ones_like(ids, dtype=torch.bool), None)
    rows = PreparedRows(ids, prompt.lengths, shown=ids)
    why = f"{type(model).__name__} writes several codebooks"
    call = CallInputs(prompt, kwargs, rows, config, (value, name), None if is_encoded else (value, name), why=why)
    return CodebookModel(model, description, call, pattern, scale)


def _with_guidance(config: Any, scale: float | None) -> Any:
    config.guidance_scale, config.output_attentions, config.output_hidden_states = scale, None, None
    return config


def _find_length(settings: GenerationConfig, width: int) -> int:
    """Columns in all. What was not set counts new ones."""
    if settings.max_new_tokens is not None:
        return width + int(settings.max_new_tokens)
    if "max_length" not in settings.explicit:
        return width + int(settings.max_length)
    if settings.max_length <= width:
        raise SettingError(
            f"the prompt has {width} columns and `max_length` is {settings.max_length}, prompt included; set "
            "`max_new_tokens` to say how many to add"
        )
    return int(settings.max_length)


def _refuse(model: Any, settings: GenerationConfig) -> None:
    kind = type(model).__name__
    if settings.get_generation_mode() not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise UnsupportedError(
            f"{kind} chooses a token for every codebook at once, by greedy search or sampling; leave beams, drafts, "
            "contrastive search and DoLa out"
        )
    if (settings.num_return_sequences or 1) > 1:
        raise UnsupportedError(
            f"`num_return_sequences`={settings.num_return_sequences} can't be had of {kind}, whose rows are codebooks; "
            "give the text several times"
        )
    for name in _READS_TOKENS:
        if getattr(settings, name) not in (None, 1.0):
            raise SettingError(
                f"`{name}` looks up the tokens before, and the one that {kind} begins with is none of its vocabulary; "
                "leave it out"
            )
    if settings.compile_config is not None or settings.compile:
        raise UnsupportedError(f"the steps of {kind} can't be compiled, as its cache grows; leave that out")
    if settings.eos_token_id is not None:
        raise SettingError(f"`eos_token_id` ends rows one by one, and those of {kind} are codebooks; leave it out")
