"""unspool: every way to decode a language model, composable, at the speed of the hardware.

>>> import unspool
>>> lm = unspool.load("smollm2-135m")
>>> lm.generate("The capital of France is", max_new_tokens=8).text
"""

from unspool._version import __version__
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
