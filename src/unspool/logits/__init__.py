"""Processors: pure functions that change the scores of the next token."""

from __future__ import annotations

from unspool.logits.audio import AlternatingCodebooksLogitsProcessor
from unspool.logits.base import LogitsProcessor, LogitsProcessorList
from unspool.logits.bias import LogitBiasLogitsProcessor, NoBadWordsLogitsProcessor, SequenceBiasLogitsProcessor
from unspool.logits.cleanup import InfNanRemoveLogitsProcessor, LogitNormalization
from unspool.logits.diversity import HammingDiversityLogitsProcessor
from unspool.logits.exclusion import XTCLogitsWarper
from unspool.logits.forced import (
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)
from unspool.logits.guidance import (
    ClassifierFreeGuidanceLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from unspool.logits.length import (
    ExponentialDecayLengthPenalty,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
)
from unspool.logits.mirostat import MirostatLogitsWarper
from unspool.logits.ngrams import (
    DRYLogitsProcessor,
    EncoderNoRepeatNGramLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
)
from unspool.logits.penalties import (
    EncoderRepetitionPenaltyLogitsProcessor,
    FrequencyPenaltyLogitsProcessor,
    PresencePenaltyLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)
from unspool.logits.temperature import DynamicTemperatureLogitsWarper, TemperatureLogitsWarper
from unspool.logits.truncation import (
    MinPLogitsWarper,
    TopALogitsWarper,
    TopKLogitsWarper,
    TopNSigmaLogitsWarper,
    TopPLogitsWarper,
)
from unspool.logits.typicality import EpsilonLogitsWarper, EtaLogitsWarper, TopHLogitsWarper, TypicalLogitsWarper
from unspool.logits.whisper import WhisperTimeStampLogitsProcessor

__all__ = [
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
]
