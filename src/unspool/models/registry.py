"""Finding a checkpoint's family, and building its model."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, Final

import torch

from unspool.errors import LoadError, PluginError, UnsupportedError
from unspool.kernels.torch_threads import one_thread
from unspool.models.assembly import Packing, Progress
from unspool.models.families.baichuan import BAICHUAN
from unspool.models.families.bart import BART, BLENDERBOT, M2M100, MARIAN, MBART, PEGASUS
from unspool.models.families.base import DecoderFamily
from unspool.models.families.bloom import BLOOM
from unspool.models.families.cohere import COHERE, COHERE2
from unspool.models.families.entry import FamilyEntry
from unspool.models.families.falcon import FALCON
from unspool.models.families.gemma import GEMMA, GEMMA2, GEMMA3, VAULTGEMMA
from unspool.models.families.glm import GLM, GLM4
from unspool.models.families.gpt2 import GPT2, GPT_BIGCODE
from unspool.models.families.gpt_neo import GPT_NEO
from unspool.models.families.gpt_neox import GPT_NEOX
from unspool.models.families.gptj import CODEGEN, GPTJ
from unspool.models.families.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from unspool.models.families.llama_kin import LLAMA_KIN
from unspool.models.families.mamba import MAMBA
from unspool.models.families.mamba2 import MAMBA2
from unspool.models.families.mixtures import MIXTURES
from unspool.models.families.mpt import MPT
from unspool.models.families.olmo import OLMO, OLMO2, OLMO3
from unspool.models.families.opt import BIOGPT, OPT
from unspool.models.families.pair import PairFamily
from unspool.models.families.persimmon import PERSIMMON
from unspool.models.families.phi import PHI, PHI3
from unspool.models.families.pictures import PICTURES, PictureFamily
from unspool.models.families.t5 import MT5, T5, UMT5
from unspool.models.families.whisper import WHISPER
from unspool.models.native import NativeModel
from unspool.models.placement import DeviceRequest
from unspool.models.weights import WeightSource
from unspool.registry import Table

_BUILT_IN: Final[tuple[FamilyEntry, ...]] = (
    *(LLAMA, MISTRAL, QWEN2, QWEN3, BAICHUAN),
    *LLAMA_KIN,
    *MIXTURES,
    *(GEMMA, GEMMA2, GEMMA3, VAULTGEMMA),
    *(OLMO, OLMO2, OLMO3, COHERE, COHERE2, GLM, GLM4, PHI, PHI3, PERSIMMON),
    *(GPT2, GPT_BIGCODE, GPT_NEO, GPT_NEOX, GPTJ, CODEGEN, OPT, BIOGPT, BLOOM, MPT, FALCON),
    *(T5, MT5, UMT5, BART, MBART, PEGASUS, MARIAN, M2M100, BLENDERBOT, WHISPER),
    MAMBA,
    MAMBA2,
    *PICTURES,
)


def _check_entry(entry: FamilyEntry) -> None:
    if not entry.architectures and not entry.gguf:
        raise PluginError(f"the family {entry.name!r} names no architecture of a config.json or a GGUF file")
    for family in FAMILIES.values():
        shared = {*entry.architectures} & {*family.architectures} or {*entry.gguf} & {*family.gguf}
        if shared:
            raise PluginError(f"{min(shared)} is read by the family {family.name!r} already")


FAMILIES: Final = Table[FamilyEntry]("model family", _BUILT_IN, lambda entry: entry.name, _check_entry)
"""Every family with a native model, by name."""


def find_family(config: Mapping[str, Any]) -> FamilyEntry | None:
    """The family of a `config.json`, by its `architectures` or else its `model_type`; None without a native one."""
    names = _read_architectures(config)
    for family in FAMILIES.values():
        if any(name in family.architectures for name in names):
            return family
    if names:
        return None
    return next((family for family in FAMILIES.values() if config.get("model_type") in family.model_types), None)


def name_architecture(config: Mapping[str, Any]) -> str:
    """The name of the architecture in a `config.json`."""
    return ", ".join(_read_architectures(config)) or f"{config.get('model_type')!r:.100}"


def _read_architectures(config: Mapping[str, Any]) -> list[str]:
    listed = config.get("architectures") or []
    return [name for name in listed if isinstance(name, str)] if isinstance(listed, list | tuple) else []


def describe(config: Mapping[str, Any]) -> FamilyEntry:
    """The family of a `config.json`; raises an error that lists the supported ones if there is none."""
    family = find_family(config)
    if family is not None:
        return family
    supported = sorted(name for family in FAMILIES.values() for name in family.architectures)
    raise UnsupportedError(
        f"config.json names the architecture {name_architecture(config)}, which has no native model. "
        f"There is one for: {', '.join(supported)}. Others run through transformers: leave native=True out"
    )


def describe_gguf(metadata: Mapping[str, Any]) -> FamilyEntry:
    """The family of a GGUF file, by its `general.architecture`."""
    name = metadata.get("general.architecture")
    for family in FAMILIES.values():
        if name in family.gguf:
            return family
    supported = sorted(known for family in FAMILIES.values() for known in family.gguf)
    raise UnsupportedError(
        f"the GGUF file has general.architecture {name!r:.100}, which has no native model. "
        f"There is one for: {', '.join(supported)}"
    )


def build_model(
    config: Mapping[str, Any],
    tensors: WeightSource,
    *,
    is_gguf: bool = False,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
    packing: Packing | None = None,
    devices: DeviceRequest | None = None,
) -> NativeModel:
    """The model of a `config.json` (or a GGUF header) and its weights.

    With `packing` its matrices are quantised for products on a CPU; the rest is float32. With `devices` its layers are
    laid over several.
    """
    place = torch.device(device)
    family = describe_gguf(config) if is_gguf else describe(config)
    kept = dtype or _default_dtype(config, place)
    # Hundreds of small operators: each would wait for OpenMP's threads, which get no core on a machine that is busy.
    with one_thread(0) if place.type == "cpu" else nullcontext():
        if devices is not None:
            if not isinstance(family, DecoderFamily):
                raise UnsupportedError(
                    f"{family.name} models lie on one device: only decoders are laid over several; name one device"
                )
            return family.build(
                config,
                tensors,
                is_gguf=is_gguf,
                device=place,
                dtype=kept,
                progress=progress,
                packing=packing,
                devices=devices,
            )
        if packing is None:
            return family.build(config, tensors, is_gguf=is_gguf, device=place, dtype=kept, progress=progress)
        if not isinstance(family, DecoderFamily | PairFamily | PictureFamily):
            raise UnsupportedError(f"{family.name} models can't be quantised; load them with quantize=None")
        return family.build(
            config, tensors, is_gguf=is_gguf, device=place, dtype=kept, progress=progress, packing=packing
        )


def can_pack(config: Mapping[str, Any], *, is_gguf: bool) -> bool:
    """Whether the matrices of a checkpoint's family can be quantised."""
    family = describe_gguf(config) if is_gguf else describe(config)
    return isinstance(family, DecoderFamily | PairFamily | PictureFamily)


def reads_pictures(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is of a family that reads pictures, and whose language part is native."""
    return isinstance(find_family(config), PictureFamily)


def _default_dtype(config: Mapping[str, Any], device: torch.device) -> torch.dtype:
    """float32 on a CPU, where it is fastest; elsewhere the dtype that the weights were saved in."""
    if device.type == "cpu":
        return torch.float32
    saved = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    known = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    if saved not in known:
        raise LoadError(f"config.json has dtype {saved!r:.40}; give dtype= one of {', '.join(known)}")
    return known[saved]
