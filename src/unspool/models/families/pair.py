"""The base of all families with an encoder, and the config readers that they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from unspool.errors import UnsupportedError
from unspool.models.assembly import Packing, Progress
from unspool.models.encoder_decoder.layers import PairNames, assemble_pair
from unspool.models.encoder_decoder.model import EncoderDecoder
from unspool.models.encoder_decoder.spec import EncoderDecoderSpec
from unspool.models.families.base import refuse_quantised
from unspool.models.families.entry import FamilyEntry
from unspool.models.paths.captured_ahead import await_triton
from unspool.models.settings import Settings
from unspool.models.weights import WeightSource


@dataclass(frozen=True, kw_only=True)
class PairFamily(FamilyEntry):
    """A family of checkpoints that becomes an encoder-decoder."""

    read_config: Callable[[Settings, WeightSource], EncoderDecoderSpec]
    find_names: Callable[[EncoderDecoderSpec, WeightSource], PairNames]

    def build(
        self,
        config: Mapping[str, Any],
        tensors: WeightSource,
        *,
        is_gguf: bool,
        device: torch.device,
        dtype: torch.dtype,
        progress: Progress | None = None,
        packing: Packing | None = None,
    ) -> EncoderDecoder:
        """The model of a config and its weights."""
        if is_gguf:
            raise UnsupportedError(f"{self.name} is read from config.json and safetensors, not from a GGUF file")
        settings = Settings(config)
        refuse_quantised(settings)
        if packing is None:
            self.prepare(config, tensors, device, dtype)
        spec = self.read_config(settings, tensors)
        names = self.find_names(spec, tensors)
        weights = assemble_pair(spec, names, tensors, device, dtype, progress, packing)
        await_triton()  # a caller may import parts of it next
        return EncoderDecoder(spec, weights, config, device, dtype)


def read_pair_ids(config: Settings, **defaults: int | None) -> dict[str, Any]:
    """The special tokens of a config; a file that leaves one out means the family's default."""
    ids: dict[str, Any] = {
        "bos_token_id": config.token("bos_token_id"),
        "eos_token_id": config.tokens("eos_token_id"),
        "pad_token_id": config.token("pad_token_id"),
        "decoder_start_token_id": config.token("decoder_start_token_id"),
    }
    return {name: defaults.get(name) if name not in config.values else value for name, value in ids.items()}
