"""The base of all decoder families, and the config readers that they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

import torch

from unspool.errors import LoadError, UnsupportedError
from unspool.models.assembly import Packing, Progress
from unspool.models.decoder.layers import DecoderWeights, WeightNames, assemble_decoder
from unspool.models.decoder.model import Decoder
from unspool.models.decoder.places import place_decoder
from unspool.models.decoder.spec import DecoderSpec
from unspool.models.families.entry import FamilyEntry
from unspool.models.families.gguf import find_gguf_names
from unspool.models.paths.captured_ahead import META, await_triton, prepare_decoder
from unspool.models.placement import DeviceRequest
from unspool.models.settings import Settings
from unspool.models.sharing import SharedSource, without_numbers
from unspool.models.weights import WeightSource
from unspool.protocols import LayerKind


@dataclass(frozen=True, kw_only=True)
class DecoderFamily(FamilyEntry):
    """A family of checkpoints that becomes a decoder."""

    read_config: Callable[[Settings], DecoderSpec]
    find_names: Callable[[Settings, WeightSource], WeightNames]
    read_gguf: Callable[[Settings, WeightSource], DecoderSpec] | None = None
    find_gguf_names: Callable[[Settings, WeightSource], WeightNames] = find_gguf_names

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
        devices: DeviceRequest | None = None,
    ) -> Decoder:
        """The decoder of a config (or a GGUF header) and its weights."""
        spec, names = self._describe(config, tensors, is_gguf=is_gguf)
        placement = None if devices is None else place_decoder(devices, spec, names, tensors, dtype, packing)
        if placement is not None:
            device = placement.embedding
            placement = placement if len(placement.devices) > 1 else None
        if packing is None and placement is None:
            self._prepare(spec, names, tensors, device, dtype)
        weights = assemble_decoder(spec, names, tensors, device, dtype, progress, packing, placement)
        await_triton()  # a caller may import parts of it next
        return Decoder(spec, weights, {} if is_gguf else config, device, dtype, placement)

    def prepare(
        self, config: Mapping[str, Any], tensors: WeightSource, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Start compiling the kernels of the decoder that `build` would make of the same."""
        self._prepare(*self._describe(config, tensors, is_gguf=False), tensors, device, dtype)

    def _describe(
        self, config: Mapping[str, Any], tensors: WeightSource, *, is_gguf: bool
    ) -> tuple[DecoderSpec, WeightNames]:
        if is_gguf:
            header = Settings(config, "the GGUF header", f"{config['general.architecture']}.")
            if self.read_gguf is None:
                raise UnsupportedError(f"{self.name} is read from config.json and safetensors, not from a GGUF file")
            return self.read_gguf(header, tensors), self.find_gguf_names(header, tensors)
        settings = Settings(config)
        return self.read_config(settings), self.find_names(settings, tensors)

    def _prepare(
        self, spec: DecoderSpec, names: WeightNames, tensors: WeightSource, device: torch.device, dtype: torch.dtype
    ) -> None:
        if device.type != "cuda":
            return
        source = without_numbers(tensors, dtype)

        def assemble() -> DecoderWeights:
            return assemble_decoder(spec, names, source, META, dtype)

        prepare_decoder(spec, device, dtype, assemble, is_shared=isinstance(tensors, SharedSource))


def fixed(names: WeightNames) -> Callable[[Settings, WeightSource], WeightNames]:
    """For a family whose checkpoints all use the same names."""
    return lambda _config, _source: names


def read_ids(config: Settings) -> dict[str, Any]:
    """The special tokens of a config."""
    return {
        "bos_token_id": config.token("bos_token_id"),
        "eos_token_id": config.tokens("eos_token_id"),
        "pad_token_id": config.token("pad_token_id"),
    }


class Sizes(TypedDict):
    """The sizes of a decoder, under their names in a `DecoderSpec`."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


def read_sizes(
    config: Settings,
    *,
    hidden: tuple[str, ...] = ("hidden_size",),
    layers: tuple[str, ...] = ("num_hidden_layers",),
    heads: tuple[str, ...] = ("num_attention_heads",),
    kv_heads: tuple[str, ...] = (),
) -> Sizes:
    """The sizes of a config by its family's names for them; without `kv_heads` every head has keys of its own."""
    hidden_size, num_heads = config.integer(*hidden), config.integer(*heads)
    num_kv_heads = config.integer(*kv_heads, default=num_heads) if kv_heads else num_heads
    check_groups(config, num_heads, num_kv_heads)
    return Sizes(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        num_layers=config.integer(*layers),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=read_head_dim(config, hidden_size, num_heads),
    )


def read_head_dim(config: Settings, hidden_size: int, num_heads: int) -> int:
    """The width of a head: given, or the hidden size divided among the heads."""
    if config.has("head_dim"):
        return config.integer("head_dim")
    if hidden_size % num_heads:
        raise LoadError(f"{config.where} divides a hidden size of {hidden_size} among {num_heads} heads")
    return hidden_size // num_heads


def check_groups(config: Settings, num_heads: int, num_kv_heads: int) -> None:
    """Raise unless every key head serves the same number of query heads."""
    if num_heads % num_kv_heads:
        raise LoadError(f"{config.where} has {num_heads} heads that can't share {num_kv_heads} key heads evenly")


def read_layer_kinds(config: Settings, num_layers: int, default: list[LayerKind]) -> tuple[LayerKind, ...]:
    """The kind of each layer: `layer_types` if the config lists them."""
    listed = config.find("layer_types")
    if listed is None:
        return tuple(default)
    known: dict[str, LayerKind] = {"full_attention": "full", "sliding_attention": "sliding"}
    if not isinstance(listed, list | tuple) or len(listed) != num_layers:
        raise LoadError(f"{config.where}'s layer_types do not name a kind for each of {num_layers} layers")
    strange = [kind for kind in listed if not isinstance(kind, str) or kind not in known]
    if strange:
        raise UnsupportedError(
            f"{config.where} has a layer of kind {strange[0]!r:.80}; {' and '.join(known)} are built"
        )
    return tuple(known[kind] for kind in listed)


def refuse_quantised(config: Settings) -> None:
    """Raise for weights that were quantised in a way this version does not read."""
    if config.has("quantization_config"):
        method = config.part("quantization_config")
        name = method.find("quant_method") if method is not None else None
        raise UnsupportedError(
            f"{config.where} has a quantization_config ({name!r:.40}): weights quantised that way are not read. "
            "Use the unquantised checkpoint, or a GGUF file of the model"
        )


def refuse_unbuilt(config: Settings) -> None:
    """Raise for settings of any decoder that change the computation and are not supported."""
    refuse_quantised(config)
    config.refuse("is_encoder_decoder", True, because="this family is read as a decoder only")
    config.refuse("add_cross_attention", True, because="cross-attention is not built for this family")
    config.refuse("use_bidirectional_attention", True, "all", because="text is decoded with causal attention here")
