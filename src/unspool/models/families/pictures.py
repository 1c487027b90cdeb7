"""Models that read pictures beside text: their language part is a decoder of another family.

A picture becomes embeddings outside of the decoder (`models/adapters/pictures`), which stand among those of the prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from unspool.errors import LoadError, UnsupportedError
from unspool.kernels.cpu import AnyRows
from unspool.models.assembly import Packing, Progress
from unspool.models.decoder.model import Decoder
from unspool.models.decoder.spec import DecoderSpec
from unspool.models.families.base import DecoderFamily
from unspool.models.families.entry import FamilyEntry
from unspool.models.families.gemma import GEMMA3
from unspool.models.families.llama import LLAMA, MISTRAL, QWEN2, QWEN3, read_qwen2_config
from unspool.models.native import ModelConfig
from unspool.models.settings import Settings
from unspool.models.sharing import SharedSource
from unspool.models.weights import StoredTensor, WeightSource

_PREFIXES = (
    "model.language_model.",
    "language_model.model.",
    "model.text_model.",
    "model.",  # the first files of Qwen2-VL
)
_HEADS = ("lm_head.weight", "language_model.lm_head.weight")
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_NUM_AXES = 3


class LanguageSource:
    """The tensors of a language part among those of a whole model, by the names that they have alone."""

    def __init__(self, source: WeightSource, names: Mapping[str, str]) -> None:
        self._source, self._names = source, names

    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def _find(self, name: str) -> str:
        if name not in self._names:
            raise LoadError(f"the files have no tensor {name!r:.200} of the language part")
        return self._names[name]

    def info(self, name: str) -> StoredTensor:
        """A tensor's shape, dtype and size."""
        return self._source.info(self._find(name))

    def read(self, name: str, *, dtype: torch.dtype, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """A tensor, or a range of its rows."""
        return self._source.read(self._find(name), dtype=dtype, rows=rows)

    def copy_into(self, name: str, out: torch.Tensor, *, transpose: bool = False) -> None:
        """Write a tensor into `out`, converting it."""
        self._source.copy_into(self._find(name), out, transpose=transpose)

    def blocks(self, name: str) -> AnyRows | None:
        """The quantised blocks of a tensor, if it has any."""
        return self._source.blocks(self._find(name))

    def release(self, name: str) -> None:
        """Let go of what reading a tensor has kept."""
        self._source.release(self._find(name))

    def finish(self) -> None:
        """Let go of everything."""
        self._source.finish()


def name_language(names: Iterable[str]) -> dict[str, str]:
    """The names of a language part's tensors if it were alone, each with the one that it has."""
    known = set(names)
    prefix = next((one for one in _PREFIXES if f"{one}embed_tokens.weight" in known), None)
    if prefix is None:
        raise LoadError("the files have no embeddings of a language part (language_model.model.embed_tokens.weight)")
    found = {f"model.{name.removeprefix(prefix)}": name for name in known if name.startswith(prefix)}
    if prefix == "model.":
        found = {alone: name for alone, name in found.items() if not name.startswith("model.visual.")}
    head = next((name for name in _HEADS if name in known), None)
    return found if head is None else found | {"lm_head.weight": head}


@dataclass(frozen=True, kw_only=True)
class PictureFamily(FamilyEntry):
    """A family whose language part becomes a decoder."""

    languages: tuple[DecoderFamily, ...]  # what the language part may be, by its `model_type`; one alone is it
    has_axes: bool = False  # a picture's tokens are rotated by their time, line and column
    has_groups: bool = False  # a picture's tokens see each other, later ones too

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
    ) -> Decoder:
        """The decoder that is the language part of a whole model's config and weights."""
        source = tensors if isinstance(tensors, SharedSource) else self._select(tensors)
        text = self.read_text_config(config, has_head="lm_head.weight" in source)
        made = self._choose(text).build(
            text, source, is_gguf=is_gguf, device=device, dtype=dtype, progress=progress, packing=packing
        )
        made.config = ModelConfig(**{**config, **vars(made.config)})
        return made

    def prepare(
        self, config: Mapping[str, Any], tensors: WeightSource, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Start compiling the kernels of the decoder that `build` would make of the same."""
        source = tensors if isinstance(tensors, SharedSource) else self._select(tensors)
        text = self.read_text_config(config, has_head="lm_head.weight" in source)
        self._choose(text).prepare(text, source, device, dtype)

    @staticmethod
    def _select(tensors: WeightSource) -> LanguageSource:
        return LanguageSource(tensors, name_language(tensors.names()))

    def _choose(self, text: Mapping[str, Any]) -> DecoderFamily:
        if len(self.languages) == 1:
            return self.languages[0]
        kind = text.get("model_type")
        for family in self.languages:
            if kind in family.model_types:
                return family
        known = ", ".join(name for family in self.languages for name in family.model_types)
        raise UnsupportedError(
            f"the language part of this {self.name} model is a {kind!r:.80}, which has no native form beside pictures "
            f"(these have: {known}); load it with native=False"
        )

    @staticmethod
    def read_text_config(config: Mapping[str, Any], *, has_head: bool) -> dict[str, Any]:
        """The config of the language part, with what the whole model's config says of tokens."""
        text = config.get("text_config")
        if not isinstance(text, Mapping):
            raise LoadError("config.json has no text_config, which describes the language part")
        found = {**text, "architectures": None}
        for name in _IDS:
            if found.get(name) is None and config.get(name) is not None:
                found[name] = config[name]
        # Which of the two configs a release of transformers ties the head by has changed; the files decide.
        found["tie_word_embeddings"] = not has_head
        return found


def _read_axes(config: Settings) -> DecoderSpec:
    """Qwen 2 whose tokens of pictures have three positions, each of which some pairs are rotated by."""
    scaling = config.part("rope_parameters") or config.part("rope_scaling")
    sections = None if scaling is None else scaling.find("mrope_section")
    values = dict(config.values)
    for name in ("rope_parameters", "rope_scaling"):
        part = values.get(name)
        if isinstance(part, Mapping) and (part.get("type") == "mrope" or part.get("rope_type") == "mrope"):
            values[name] = {**part, "type": "default", "rope_type": "default"}
    spec = replace(read_qwen2_config(Settings(values, config.where)), family="qwen2_vl")
    assert spec.rope is not None
    num_pairs = len(spec.rope.frequencies)
    is_list = isinstance(sections, list | tuple) and all(type(one) is int and one > 0 for one in sections)
    counts: list[int] = list(sections) if is_list and sections is not None else []
    if len(counts) < _NUM_AXES or sum(counts) != num_pairs:
        raise LoadError(
            f"{config.where} has mrope_section={sections!r:.80}, where whole numbers are needed that divide the "
            f"{num_pairs} pairs of a head"
        )
    axes = tuple(place % _NUM_AXES for place, count in enumerate(counts) for _ in range(count))
    return replace(spec, rope=replace(spec.rope, axes=axes))


_QWEN2_AXES = replace(QWEN2, read_config=_read_axes, gguf=())

LLAVA = PictureFamily(
    name="llava",
    architectures=("LlavaForConditionalGeneration",),
    model_types=("llava",),
    languages=(LLAMA, MISTRAL, QWEN2, QWEN3),
)
IDEFICS3 = PictureFamily(
    name="idefics3",
    architectures=("Idefics3ForConditionalGeneration",),
    model_types=("idefics3",),
    languages=(LLAMA,),
)
SMOLVLM = PictureFamily(
    name="smolvlm",
    architectures=("SmolVLMForConditionalGeneration",),
    model_types=("smolvlm",),
    languages=(LLAMA,),
)
QWEN2_VL = PictureFamily(
    name="qwen2_vl",
    architectures=("Qwen2VLForConditionalGeneration",),
    model_types=("qwen2_vl",),
    languages=(_QWEN2_AXES,),
    has_axes=True,
)
QWEN2_5_VL = PictureFamily(
    name="qwen2_5_vl",
    architectures=("Qwen2_5_VLForConditionalGeneration",),
    model_types=("qwen2_5_vl",),
    languages=(_QWEN2_AXES,),
    has_axes=True,
)
GEMMA3_PICTURES = PictureFamily(
    name="gemma3_pictures",
    architectures=("Gemma3ForConditionalGeneration",),
    model_types=("gemma3",),
    languages=(GEMMA3,),
    has_groups=True,
)
PICTURES = (LLAVA, IDEFICS3, SMOLVLM, QWEN2_VL, QWEN2_5_VL, GEMMA3_PICTURES)
