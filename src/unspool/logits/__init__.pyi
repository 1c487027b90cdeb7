# Made by tools/make_stubs.py.
from unspool.grammar.processor import GrammarLogitsProcessor as GrammarLogitsProcessor
from unspool.logits.audio import AlternatingCodebooksLogitsProcessor as AlternatingCodebooksLogitsProcessor
from unspool.logits.base import LogitsProcessor as LogitsProcessor
from unspool.logits.base import LogitsProcessorList as LogitsProcessorList
from unspool.logits.bias import LogitBiasLogitsProcessor as LogitBiasLogitsProcessor
from unspool.logits.bias import NoBadWordsLogitsProcessor as NoBadWordsLogitsProcessor
from unspool.logits.bias import SequenceBiasLogitsProcessor as SequenceBiasLogitsProcessor
from unspool.logits.cleanup import InfNanRemoveLogitsProcessor as InfNanRemoveLogitsProcessor
from unspool.logits.cleanup import LogitNormalization as LogitNormalization
from unspool.logits.diversity import HammingDiversityLogitsProcessor as HammingDiversityLogitsProcessor
from unspool.logits.exclusion import XTCLogitsWarper as XTCLogitsWarper
from unspool.logits.forced import ForcedBOSTokenLogitsProcessor as ForcedBOSTokenLogitsProcessor
from unspool.logits.forced import ForcedEOSTokenLogitsProcessor as ForcedEOSTokenLogitsProcessor
from unspool.logits.forced import PrefixConstrainedLogitsProcessor as PrefixConstrainedLogitsProcessor
from unspool.logits.forced import SuppressTokensAtBeginLogitsProcessor as SuppressTokensAtBeginLogitsProcessor
from unspool.logits.forced import SuppressTokensLogitsProcessor as SuppressTokensLogitsProcessor
from unspool.logits.guidance import ClassifierFreeGuidanceLogitsProcessor as ClassifierFreeGuidanceLogitsProcessor
from unspool.logits.guidance import UnbatchedClassifierFreeGuidanceLogitsProcessor as UnbatchedClassifierFreeGuidanceLogitsProcessor
from unspool.logits.length import ExponentialDecayLengthPenalty as ExponentialDecayLengthPenalty
from unspool.logits.length import MinLengthLogitsProcessor as MinLengthLogitsProcessor
from unspool.logits.length import MinNewTokensLengthLogitsProcessor as MinNewTokensLengthLogitsProcessor
from unspool.logits.mirostat import MirostatLogitsWarper as MirostatLogitsWarper
from unspool.logits.ngrams import DRYLogitsProcessor as DRYLogitsProcessor
from unspool.logits.ngrams import EncoderNoRepeatNGramLogitsProcessor as EncoderNoRepeatNGramLogitsProcessor
from unspool.logits.ngrams import NoRepeatNGramLogitsProcessor as NoRepeatNGramLogitsProcessor
from unspool.logits.penalties import EncoderRepetitionPenaltyLogitsProcessor as EncoderRepetitionPenaltyLogitsProcessor
from unspool.logits.penalties import FrequencyPenaltyLogitsProcessor as FrequencyPenaltyLogitsProcessor
from unspool.logits.penalties import PresencePenaltyLogitsProcessor as PresencePenaltyLogitsProcessor
from unspool.logits.penalties import RepetitionPenaltyLogitsProcessor as RepetitionPenaltyLogitsProcessor
from unspool.logits.temperature import DynamicTemperatureLogitsWarper as DynamicTemperatureLogitsWarper
from unspool.logits.temperature import TemperatureLogitsWarper as TemperatureLogitsWarper
from unspool.logits.truncation import MinPLogitsWarper as MinPLogitsWarper
from unspool.logits.truncation import TopALogitsWarper as TopALogitsWarper
from unspool.logits.truncation import TopKLogitsWarper as TopKLogitsWarper
from unspool.logits.truncation import TopNSigmaLogitsWarper as TopNSigmaLogitsWarper
from unspool.logits.truncation import TopPLogitsWarper as TopPLogitsWarper
from unspool.logits.typicality import EpsilonLogitsWarper as EpsilonLogitsWarper
from unspool.logits.typicality import EtaLogitsWarper as EtaLogitsWarper
from unspool.logits.typicality import TopHLogitsWarper as TopHLogitsWarper
from unspool.logits.typicality import TypicalLogitsWarper as TypicalLogitsWarper
from unspool.logits.watermark import WatermarkProcessor as WatermarkProcessor
from unspool.logits.whisper import WhisperTimeStampLogitsProcessor as WhisperTimeStampLogitsProcessor
from unspool.thoughts.budget import ThinkingBudgetLogitsProcessor as ThinkingBudgetLogitsProcessor

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
    "GrammarLogitsProcessor",
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
    "ThinkingBudgetLogitsProcessor",
    "TopALogitsWarper",
    "TopHLogitsWarper",
    "TopKLogitsWarper",
    "TopNSigmaLogitsWarper",
    "TopPLogitsWarper",
    "TypicalLogitsWarper",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    "WatermarkProcessor",
    "WhisperTimeStampLogitsProcessor",
    "XTCLogitsWarper",
]
