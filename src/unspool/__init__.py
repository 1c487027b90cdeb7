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
    from unspool.api import Answer, LanguageModel, Piece, generate, load, stream
    from unspool.beams import BeamHypotheses, BeamScorer, BeamSearchScorer, ConstrainedBeamSearchScorer
    from unspool.cache import Cache, CacheConfig, DynamicCache, EncoderDecoderCache, StaticCache, StaticCacheConfig
    from unspool.config import (
        CompileConfig,
        GenerationConfig,
        SynthIDTextWatermarkingConfig,
        WatermarkingConfig,
    )
    from unspool.constraints import Constraint, ConstraintListState, DisjunctiveConstraint, PhrasalConstraint
    from unspool.decoding.transitions import compute_transition_scores
    from unspool.errors import (
        InputError,
        LoadError,
        MissingExtraError,
        ModelNotFoundError,
        NoTokenLeftError,
        SettingError,
        UnspoolError,
        UnsupportedError,
    )
    from unspool.logits import (
        AlternatingCodebooksLogitsProcessor,
        ClassifierFreeGuidanceLogitsProcessor,
        DRYLogitsProcessor,
        DynamicTemperatureLogitsWarper,
        EncoderNoRepeatNGramLogitsProcessor,
        EncoderRepetitionPenaltyLogitsProcessor,
        EpsilonLogitsWarper,
        EtaLogitsWarper,
        ExponentialDecayLengthPenalty,
        ForcedBOSTokenLogitsProcessor,
        ForcedEOSTokenLogitsProcessor,
        FrequencyPenaltyLogitsProcessor,
        HammingDiversityLogitsProcessor,
        InfNanRemoveLogitsProcessor,
        LogitBiasLogitsProcessor,
        LogitNormalization,
        LogitsProcessor,
        LogitsProcessorList,
        MinLengthLogitsProcessor,
        MinNewTokensLengthLogitsProcessor,
        MinPLogitsWarper,
        MirostatLogitsWarper,
        NoBadWordsLogitsProcessor,
        NoRepeatNGramLogitsProcessor,
        PrefixConstrainedLogitsProcessor,
        PresencePenaltyLogitsProcessor,
        RepetitionPenaltyLogitsProcessor,
        SequenceBiasLogitsProcessor,
        SuppressTokensAtBeginLogitsProcessor,
        SuppressTokensLogitsProcessor,
        TemperatureLogitsWarper,
        TopALogitsWarper,
        TopHLogitsWarper,
        TopKLogitsWarper,
        TopNSigmaLogitsWarper,
        TopPLogitsWarper,
        TypicalLogitsWarper,
        UnbatchedClassifierFreeGuidanceLogitsProcessor,
        WhisperTimeStampLogitsProcessor,
        XTCLogitsWarper,
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
    "AlternatingCodebooksLogitsProcessor",
    "Answer",
    "AsyncTextIteratorStreamer",
    "BeamHypotheses",
    "BeamScorer",
    "BeamSearchScorer",
    "Cache",
    "CacheConfig",
    "ClassifierFreeGuidanceLogitsProcessor",
    "CompileConfig",
    "ConstrainedBeamSearchScorer",
    "Constraint",
    "ConstraintListState",
    "DRYLogitsProcessor",
    "DisjunctiveConstraint",
    "DynamicCache",
    "DynamicTemperatureLogitsWarper",
    "EncoderDecoderCache",
    "EncoderNoRepeatNGramLogitsProcessor",
    "EncoderRepetitionPenaltyLogitsProcessor",
    "EosTokenCriteria",
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "ExponentialDecayLengthPenalty",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "FrequencyPenaltyLogitsProcessor",
    "GenerateBeamDecoderOnlyOutput",
    "GenerateBeamEncoderDecoderOutput",
    "GenerateDecoderOnlyOutput",
    "GenerateEncoderDecoderOutput",
    "Generation",
    "GenerationConfig",
    "HammingDiversityLogitsProcessor",
    "InfNanRemoveLogitsProcessor",
    "InputError",
    "LanguageModel",
    "LoadError",
    "LogitBiasLogitsProcessor",
    "LogitNormalization",
    "LogitsProcessor",
    "LogitsProcessorList",
    "MaxLengthCriteria",
    "MaxTimeCriteria",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "MinPLogitsWarper",
    "MirostatLogitsWarper",
    "MissingExtraError",
    "ModelNotFoundError",
    "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "NoTokenLeftError",
    "PhrasalConstraint",
    "Piece",
    "PrefixConstrainedLogitsProcessor",
    "PresencePenaltyLogitsProcessor",
    "RepetitionPenaltyLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "SettingError",
    "StaticCache",
    "StaticCacheConfig",
    "StopStringCriteria",
    "StoppingCriteria",
    "StoppingCriteriaList",
    "SuppressTokensAtBeginLogitsProcessor",
    "SuppressTokensLogitsProcessor",
    "SynthIDTextWatermarkingConfig",
    "TemperatureLogitsWarper",
    "TextIteratorStreamer",
    "TextStreamer",
    "TokenLogprob",
    "Tokenizer",
    "TopALogitsWarper",
    "TopHLogitsWarper",
    "TopKLogitsWarper",
    "TopNSigmaLogitsWarper",
    "TopPLogitsWarper",
    "TypicalLogitsWarper",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    "UnspoolError",
    "UnsupportedError",
    "WatermarkingConfig",
    "WhisperTimeStampLogitsProcessor",
    "XTCLogitsWarper",
    "__version__",
    "compute_transition_scores",
    "generate",
    "load",
    "stream",
]

# Names are imported when they are first asked for, so that `unspool --help` need not wait for torch.
_HOMES: dict[str, tuple[str, ...]] = {
    "api": ("Answer", "LanguageModel", "Piece", "generate", "load", "stream"),
    "beams": ("BeamHypotheses", "BeamScorer", "BeamSearchScorer", "ConstrainedBeamSearchScorer"),
    "cache": ("Cache", "CacheConfig", "DynamicCache", "EncoderDecoderCache", "StaticCache", "StaticCacheConfig"),
    "config": ("CompileConfig", "GenerationConfig", "SynthIDTextWatermarkingConfig", "WatermarkingConfig"),
    "constraints": ("Constraint", "ConstraintListState", "DisjunctiveConstraint", "PhrasalConstraint"),
    "decoding.transitions": ("compute_transition_scores",),
    "errors": (
        "InputError",
        "LoadError",
        "MissingExtraError",
        "ModelNotFoundError",
        "NoTokenLeftError",
        "SettingError",
        "UnspoolError",
        "UnsupportedError",
    ),
    "logits": (
        "AlternatingCodebooksLogitsProcessor",
        "ClassifierFreeGuidanceLogitsProcessor",
        "DRYLogitsProcessor",
        "DynamicTemperatureLogitsWarper",
        "EncoderNoRepeatNGramLogitsProcessor",
        "EncoderRepetitionPenaltyLogitsProcessor",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "ExponentialDecayLengthPenalty",
        "ForcedBOSTokenLogitsProcessor",
        "ForcedEOSTokenLogitsProcessor",
        "FrequencyPenaltyLogitsProcessor",
        "HammingDiversityLogitsProcessor",
        "InfNanRemoveLogitsProcessor",
        "LogitBiasLogitsProcessor",
        "LogitNormalization",
        "LogitsProcessor",
        "LogitsProcessorList",
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "MinPLogitsWarper",
        "MirostatLogitsWarper",
        "NoBadWordsLogitsProcessor",
        "NoRepeatNGramLogitsProcessor",
        "PrefixConstrainedLogitsProcessor",
        "PresencePenaltyLogitsProcessor",
        "RepetitionPenaltyLogitsProcessor",
        "SequenceBiasLogitsProcessor",
        "SuppressTokensAtBeginLogitsProcessor",
        "SuppressTokensLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopALogitsWarper",
        "TopHLogitsWarper",
        "TopKLogitsWarper",
        "TopNSigmaLogitsWarper",
        "TopPLogitsWarper",
        "TypicalLogitsWarper",
        "UnbatchedClassifierFreeGuidanceLogitsProcessor",
        "WhisperTimeStampLogitsProcessor",
        "XTCLogitsWarper",
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
