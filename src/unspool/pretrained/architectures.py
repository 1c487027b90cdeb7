"""Classes of one architecture, as code for transformers imports them: `LlamaForCausalLM`, `GPT2Tokenizer`.

They are made when they are asked for: a model's class for every architecture of the registered families, a tokenizer's
for every line of `TOKENIZERS`. Each loads what `AutoModel…` and `AutoTokenizer` load, and refuses another's.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from os import PathLike
from typing import Any, ClassVar, Self

from unspool.errors import LoadError
from unspool.loading.model import LoadedParts
from unspool.loading.source import find_source
from unspool.models.registry import FAMILIES, describe_gguf, find_family, name_architecture
from unspool.pretrained.auto import Auto, AutoTokenizer, load_pretrained
from unspool.pretrained.config import read_description
from unspool.pretrained.keywords import TOKENIZER_KEYWORDS, take_applied
from unspool.pretrained.locations import ModelLocation, read_location
from unspool.pretrained.model import PretrainedModel
from unspool.small_files import read_json_object
from unspool.text import Tokenizer

# Architectures without a native form whose classes are asked for by name: transformers loads them.
ADAPTED = ("GitForCausalLM", "MusicgenForConditionalGeneration")
# Beginnings of tokenizers' names, and the models whose files need not name their tokenizer's class.
TOKENIZERS: Mapping[str, tuple[str, ...]] = {
    "Bart": ("bart",),
    "BioGpt": ("biogpt",),
    "Blenderbot": ("blenderbot",),
    "Bloom": ("bloom",),
    "CodeGen": ("codegen", "phi"),
    "Cohere": ("cohere", "cohere2"),
    "GPT2": ("gpt2", "gpt_bigcode", "gpt_neo", "gptj", "opt", "starcoder2", "phi", "codegen", "jais2"),
    "GPTNeoX": ("gpt_neox", "olmo", "olmo2", "olmo3", "olmoe", "mpt", "mamba", "falcon_mamba", "mamba2", "stablelm"),
    "Gemma": ("gemma", "gemma2", "gemma3_text", "vaultgemma"),
    "Llama": ("llama", "mistral", "ministral", "mixtral", "persimmon", "phi3", "helium", "baichuan"),
    "M2M100": ("m2m_100",),
    "MBart": ("mbart",),
    "MBart50": ("mbart",),
    "MT5": ("mt5",),
    "Marian": ("marian",),
    "Nllb": ("m2m_100",),
    "Pegasus": ("pegasus",),
    "Qwen2": ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe"),
    "T5": ("t5", "mt5", "umt5"),
    "Whisper": ("whisper",),
}
_ANY_CLASS = ("PreTrainedTokenizer", "TokenizersBackend", None)  # classes that say nothing about the vocabulary


class ArchitectureModel(PretrainedModel):
    """A model of one architecture: `from_pretrained` loads it, or refuses a checkpoint of another."""

    architecture: ClassVar[str]

    def __init__(self, parts: LoadedParts) -> None:
        name = type(self).__name__
        if not isinstance(parts, LoadedParts):
            raise TypeError(f"{name} is not made by calling it; use {name}.from_pretrained(name_or_path)")
        super().__init__(parts)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | PathLike[str], *args: Any, **kwargs: Any) -> Self:
        """Load a model: a folder, a GGUF file, a hub id or a short name. Keywords: docs/transformers.md."""
        return load_pretrained(cls, cls.__name__, pretrained_model_name_or_path, args, kwargs, cls._check)

    @classmethod
    def _check(cls, location: ModelLocation) -> None:
        config, is_gguf = read_description(location)
        found = _list_architectures(config, is_gguf=is_gguf)
        if cls.architecture.casefold() in (name.casefold() for name in found):
            return
        right = next((name for name in found if name in list_architectures()), None)
        raise LoadError(
            f"{str(location.name)!r:.120} has the architecture {', '.join(found) or name_architecture(config)}, and "
            f"is no model for {cls.__name__}; load it with {right or 'AutoModelForCausalLM'}"
        )


def _list_architectures(config: Mapping[str, Any], *, is_gguf: bool) -> list[str]:
    """What a checkpoint's architecture is called: as its config says, or as its family is."""
    listed = None if is_gguf else config.get("architectures")
    if isinstance(listed, list) and listed:
        return [name for name in listed if isinstance(name, str)]
    family = describe_gguf(config) if is_gguf else find_family(config)
    if family is None:
        return []
    pairs = zip(family.model_types, family.architectures, strict=False)
    own = [name for kind, name in pairs if kind == config.get("model_type")]
    return own or list(family.architectures)


class ArchitectureTokenizer(Auto):
    """Tokenizers of one architecture: `from_pretrained` loads one, or refuses another's."""

    beginning: ClassVar[str]

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | PathLike[str], **kwargs: Any) -> Tokenizer:
        """Load the tokenizer of a folder, a GGUF file, a hub id or a short name. Keywords: docs/transformers.md."""
        applied = take_applied(kwargs, TOKENIZER_KEYWORDS, f"{cls.__name__}.from_pretrained()")
        cls._check(read_location(pretrained_model_name_or_path, applied))
        return AutoTokenizer.from_pretrained(pretrained_model_name_or_path, **kwargs)

    @classmethod
    def _check(cls, location: ModelLocation) -> None:
        path = find_source(
            location.name, revision=location.revision, offline=location.offline, hub=location.hub, has_weights=False
        )
        tokenizer, config = (
            read_json_object(path / name, is_strict=False) if (path / name).is_file() else {}
            for name in ("tokenizer_config.json", "config.json")
        )
        named, model_type = tokenizer.get("tokenizer_class"), config.get("model_type")
        plain = named.removesuffix("Fast") if isinstance(named, str) else None
        if plain not in _ANY_CLASS:
            is_own, found = plain == f"{cls.beginning}Tokenizer", f"of the class {named!r:.80}"
        else:
            owners = [one for one, kinds in TOKENIZERS.items() if model_type in kinds]
            is_own, found = not owners or cls.beginning in owners, f"of a {model_type!r:.80} model"
        if not is_own:
            raise LoadError(
                f"the tokenizer of {str(location.name)!r:.120} is {found}, and none for {cls.__name__}; load it with "
                "AutoTokenizer"
            )


def list_architectures() -> list[str]:
    """The names of all models' classes."""
    return sorted({*ADAPTED, *(name for family in FAMILIES.values() for name in family.architectures)})


def _list_tokenizers() -> dict[str, str]:
    return {f"{one}Tokenizer{end}": one for one in TOKENIZERS for end in ("", "Fast")}


@cache
def _make_model(name: str) -> type[ArchitectureModel]:
    doc = f"A model of the architecture {name}: `{name}.from_pretrained(name_or_path)`."
    return type(name, (ArchitectureModel,), {"architecture": name, "__doc__": doc, "__module__": __name__})


@cache
def _make_tokenizer(name: str) -> type[ArchitectureTokenizer]:
    doc = f"The tokenizer of such models: `{name}.from_pretrained(name_or_path)`."
    own = {"beginning": _list_tokenizers()[name], "__doc__": doc, "__module__": __name__}
    return type(name, (ArchitectureTokenizer,), own)


HOMES = {
    **{name: __name__ for family in FAMILIES.built_in for name in family.architectures},
    **dict.fromkeys((*ADAPTED, *_list_tokenizers()), __name__),
}
"""Where each of unspool's own names is; `unspool/__init__.pyi` says the same to type checkers."""


def __getattr__(name: str) -> Any:
    if name in _list_tokenizers():
        return _make_tokenizer(name)
    if name in list_architectures():
        return _make_model(name)
    raise AttributeError(f"module 'unspool' has no attribute {name!r}")
