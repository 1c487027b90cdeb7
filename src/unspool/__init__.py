"""unspool: every way to decode a language model, composable, at the speed of the hardware.

>>> import unspool
>>> lm = unspool.load("smollm2-135m")
>>> lm.generate("The capital of France is", max_new_tokens=8).text
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from unspool._version import __version__

if TYPE_CHECKING:  # what type checkers and editors see; at run time _HOMES says the same
    from unspool.api import LanguageModel, Piece, generate, load, stream
    from unspool.cache import Cache, DynamicCache, EncoderDecoderCache, StaticCache
    from unspool.config import (
        CompileConfig,
        GenerationConfig,
        SynthIDTextWatermarkingConfig,
        WatermarkingConfig,
    )
    from unspool.errors import (
        InputError,
        LoadError,
        MissingExtraError,
        ModelNotFoundError,
        SettingError,
        UnspoolError,
        UnsupportedError,
    )
    from unspool.logits import (
        LogitsProcessor,
        LogitsProcessorList,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )
    from unspool.outputs import (
        GenerateBeamDecoderOnlyOutput,
        GenerateBeamEncoderDecoderOutput,
        GenerateDecoderOnlyOutput,
        GenerateEncoderDecoderOutput,
        Generation,
        TokenLogprob,
    )
    from unspool.stopping import (
        EosTokenCriteria,
        MaxLengthCriteria,
        MaxTimeCriteria,
        StoppingCriteria,
        StoppingCriteriaList,
        StopStringCriteria,
    )
    from unspool.streaming import AsyncTextIteratorStreamer, TextIteratorStreamer, TextStreamer
    from unspool.text import Tokenizer

__all__ = [
    "AsyncTextIteratorStreamer",
    "Cache",
    "CompileConfig",
    "DynamicCache",
    "EncoderDecoderCache",
    "EosTokenCriteria",
    "GenerateBeamDecoderOnlyOutput",
    "GenerateBeamEncoderDecoderOutput",
    "GenerateDecoderOnlyOutput",
    "GenerateEncoderDecoderOutput",
    "Generation",
    "GenerationConfig",
    "InputError",
    "LanguageModel",
    "LoadError",
    "LogitsProcessor",
    "LogitsProcessorList",
    "MaxLengthCriteria",
    "MaxTimeCriteria",
    "MissingExtraError",
    "ModelNotFoundError",
    "Piece",
    "SettingError",
    "StaticCache",
    "StopStringCriteria",
    "StoppingCriteria",
    "StoppingCriteriaList",
    "SynthIDTextWatermarkingConfig",
    "TemperatureLogitsWarper",
    "TextIteratorStreamer",
    "TextStreamer",
    "TokenLogprob",
    "Tokenizer",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "UnspoolError",
    "UnsupportedError",
    "WatermarkingConfig",
    "__version__",
    "generate",
    "load",
    "stream",
]

# Names are imported when they are first asked for, so that `unspool --help` need not wait for torch.
_HOMES: dict[str, tuple[str, ...]] = {
    "api": ("LanguageModel", "Piece", "generate", "load", "stream"),
    "cache": ("Cache", "DynamicCache", "EncoderDecoderCache", "StaticCache"),
    "config": ("CompileConfig", "GenerationConfig", "SynthIDTextWatermarkingConfig", "WatermarkingConfig"),
    "errors": (
        "InputError",
        "LoadError",
        "MissingExtraError",
        "ModelNotFoundError",
        "SettingError",
        "UnspoolError",
        "UnsupportedError",
    ),
    "logits": (
        "LogitsProcessor",
        "LogitsProcessorList",
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
    ),
    "outputs": (
        "GenerateBeamDecoderOnlyOutput",
        "GenerateBeamEncoderDecoderOutput",
        "GenerateDecoderOnlyOutput",
        "GenerateEncoderDecoderOutput",
        "Generation",
        "TokenLogprob",
    ),
    "stopping": (
        "EosTokenCriteria",
        "MaxLengthCriteria",
        "MaxTimeCriteria",
        "StopStringCriteria",
        "StoppingCriteria",
        "StoppingCriteriaList",
    ),
    "streaming": ("AsyncTextIteratorStreamer", "TextIteratorStreamer", "TextStreamer"),
    "text": ("Tokenizer",),
}
_MODULES = {name: f"unspool.{home}" for home, names in _HOMES.items() for name in names}

if not TYPE_CHECKING:  # a type checker that saw this would take every misspelt name for a real one

    def __getattr__(name: str) -> object:
        if name in _HOMES:  # `import unspool; unspool.config`
            return import_module(f"unspool.{name}")
        if name not in _MODULES:
            raise AttributeError(f"module 'unspool' has no attribute {name!r}")
        value = getattr(import_module(_MODULES[name]), name)
        globals()[name] = value  # asked for once; the next look-up finds it
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
