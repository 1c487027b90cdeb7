# Made by tools/make_stubs.py.
from unspool._version import __version__ as __version__
from unspool.api import Answer as Answer
from unspool.api import LanguageModel as LanguageModel
from unspool.api import Piece as Piece
from unspool.api import attach as attach
from unspool.api import detach as detach
from unspool.api import generate as generate
from unspool.api import load as load
from unspool.api import stream as stream
from unspool.beams import BeamHypotheses as BeamHypotheses
from unspool.beams import BeamScorer as BeamScorer
from unspool.beams import BeamSearchScorer as BeamSearchScorer
from unspool.beams import ConstrainedBeamSearchScorer as ConstrainedBeamSearchScorer
from unspool.cache import BlockPool as BlockPool
from unspool.cache import Cache as Cache
from unspool.cache import CacheConfig as CacheConfig
from unspool.cache import DynamicCache as DynamicCache
from unspool.cache import EncoderDecoderCache as EncoderDecoderCache
from unspool.cache import HQQQuantizedCache as HQQQuantizedCache
from unspool.cache import HybridCache as HybridCache
from unspool.cache import MambaCache as MambaCache
from unspool.cache import OffloadedCache as OffloadedCache
from unspool.cache import OffloadedStaticCache as OffloadedStaticCache
from unspool.cache import PagedCache as PagedCache
from unspool.cache import QuantizedCache as QuantizedCache
from unspool.cache import QuantizedCacheConfig as QuantizedCacheConfig
from unspool.cache import QuantizedHybridCache as QuantizedHybridCache
from unspool.cache import QuantizedStaticCache as QuantizedStaticCache
from unspool.cache import QuantoQuantizedCache as QuantoQuantizedCache
from unspool.cache import SinkCache as SinkCache
from unspool.cache import SlidingWindowCache as SlidingWindowCache
from unspool.cache import StaticCache as StaticCache
from unspool.cache import StaticCacheConfig as StaticCacheConfig
from unspool.config import CompileConfig as CompileConfig
from unspool.config import GenerationConfig as GenerationConfig
from unspool.config import GumbelWatermarkingConfig as GumbelWatermarkingConfig
from unspool.config import SynthIDTextWatermarkingConfig as SynthIDTextWatermarkingConfig
from unspool.config import WatermarkingConfig as WatermarkingConfig
from unspool.constraints import Constraint as Constraint
from unspool.constraints import ConstraintListState as ConstraintListState
from unspool.constraints import DisjunctiveConstraint as DisjunctiveConstraint
from unspool.constraints import PhrasalConstraint as PhrasalConstraint
from unspool.decoding.beams.trace import BeamTrace as BeamTrace
from unspool.decoding.transitions import compute_transition_scores as compute_transition_scores
from unspool.engine import Engine as Engine
from unspool.engine import EngineStats as EngineStats
from unspool.engine import Request as Request
from unspool.errors import ContextError as ContextError
from unspool.errors import EngineError as EngineError
from unspool.errors import InputError as InputError
from unspool.errors import LoadError as LoadError
from unspool.errors import MissingExtraError as MissingExtraError
from unspool.errors import ModelNotFoundError as ModelNotFoundError
from unspool.errors import NoTokenLeftError as NoTokenLeftError
from unspool.errors import PluginError as PluginError
from unspool.errors import ResourceError as ResourceError
from unspool.errors import SettingError as SettingError
from unspool.errors import UnfulfilledError as UnfulfilledError
from unspool.errors import UnspoolError as UnspoolError
from unspool.errors import UnsupportedError as UnsupportedError
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
from unspool.outputs import GenerateBeamDecoderOnlyOutput as GenerateBeamDecoderOnlyOutput
from unspool.outputs import GenerateBeamEncoderDecoderOutput as GenerateBeamEncoderDecoderOutput
from unspool.outputs import GenerateDecoderOnlyOutput as GenerateDecoderOnlyOutput
from unspool.outputs import GenerateEncoderDecoderOutput as GenerateEncoderDecoderOutput
from unspool.outputs import Generation as Generation
from unspool.outputs import TokenLogprob as TokenLogprob
from unspool.pretrained.auto import AutoModelForCausalLM as AutoModelForCausalLM
from unspool.pretrained.auto import AutoModelForSeq2SeqLM as AutoModelForSeq2SeqLM
from unspool.pretrained.auto import AutoModelForSpeechSeq2Seq as AutoModelForSpeechSeq2Seq
from unspool.pretrained.auto import AutoTokenizer as AutoTokenizer
from unspool.pretrained.model import PretrainedModel as PretrainedModel
from unspool.pretrained.pictures import AutoModelForImageTextToText as AutoModelForImageTextToText
from unspool.pretrained.pipelines.base import Pipeline as Pipeline
from unspool.pretrained.pipelines.opening import pipeline as pipeline
from unspool.pretrained.processor import AutoProcessor as AutoProcessor
from unspool.pretrained.quantization import BitsAndBytesConfig as BitsAndBytesConfig
from unspool.pretrained.seeding import set_seed as set_seed
from unspool.pretrained.voices import AutoModelForTextToWaveform as AutoModelForTextToWaveform
from unspool.registry import register as register
from unspool.server import asgi as asgi
from unspool.server import serve as serve
from unspool.stopping.base import StoppingCriteria as StoppingCriteria
from unspool.stopping.eos import EosTokenCriteria as EosTokenCriteria
from unspool.stopping.length import MaxLengthCriteria as MaxLengthCriteria
from unspool.stopping.lists import StoppingCriteriaList as StoppingCriteriaList
from unspool.stopping.strings import StopStringCriteria as StopStringCriteria
from unspool.stopping.time import MaxTimeCriteria as MaxTimeCriteria
from unspool.streaming import AsyncTextIteratorStreamer as AsyncTextIteratorStreamer
from unspool.streaming import TextIteratorStreamer as TextIteratorStreamer
from unspool.streaming import TextStreamer as TextStreamer
from unspool.text import Tokenizer as Tokenizer
from unspool.watermark import BayesianDetectorConfig as BayesianDetectorConfig
from unspool.watermark import BayesianDetectorModel as BayesianDetectorModel
from unspool.watermark import GumbelWatermarkLogitsProcessor as GumbelWatermarkLogitsProcessor
from unspool.watermark import SynthIDTextWatermarkDetector as SynthIDTextWatermarkDetector
from unspool.watermark import SynthIDTextWatermarkLogitsProcessor as SynthIDTextWatermarkLogitsProcessor
from unspool.watermark import WatermarkDetector as WatermarkDetector
from unspool.watermark import WatermarkDetectorOutput as WatermarkDetectorOutput
from unspool.watermark import WatermarkLogitsProcessor as WatermarkLogitsProcessor

__all__ = [
    "AlternatingCodebooksLogitsProcessor",
    "Answer",
    "AsyncTextIteratorStreamer",
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForTextToWaveform",
    "AutoProcessor",
    "AutoTokenizer",
    "BayesianDetectorConfig",
    "BayesianDetectorModel",
    "BeamHypotheses",
    "BeamScorer",
    "BeamSearchScorer",
    "BeamTrace",
    "BitsAndBytesConfig",
    "BlockPool",
    "Cache",
    "CacheConfig",
    "ClassifierFreeGuidanceLogitsProcessor",
    "CompileConfig",
    "ConstrainedBeamSearchScorer",
    "Constraint",
    "ConstraintListState",
    "ContextError",
    "DRYLogitsProcessor",
    "DisjunctiveConstraint",
    "DynamicCache",
    "DynamicTemperatureLogitsWarper",
    "EncoderDecoderCache",
    "EncoderNoRepeatNGramLogitsProcessor",
    "EncoderRepetitionPenaltyLogitsProcessor",
    "Engine",
    "EngineError",
    "EngineStats",
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
    "GrammarLogitsProcessor",
    "GumbelWatermarkLogitsProcessor",
    "GumbelWatermarkingConfig",
    "HQQQuantizedCache",
    "HammingDiversityLogitsProcessor",
    "HybridCache",
    "InfNanRemoveLogitsProcessor",
    "InputError",
    "LanguageModel",
    "LoadError",
    "LogitBiasLogitsProcessor",
    "LogitNormalization",
    "LogitsProcessor",
    "LogitsProcessorList",
    "MambaCache",
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
    "OffloadedCache",
    "OffloadedStaticCache",
    "PagedCache",
    "PhrasalConstraint",
    "Piece",
    "Pipeline",
    "PluginError",
    "PrefixConstrainedLogitsProcessor",
    "PresencePenaltyLogitsProcessor",
    "PretrainedModel",
    "QuantizedCache",
    "QuantizedCacheConfig",
    "QuantizedHybridCache",
    "QuantizedStaticCache",
    "QuantoQuantizedCache",
    "RepetitionPenaltyLogitsProcessor",
    "Request",
    "ResourceError",
    "SequenceBiasLogitsProcessor",
    "SettingError",
    "SinkCache",
    "SlidingWindowCache",
    "StaticCache",
    "StaticCacheConfig",
    "StopStringCriteria",
    "StoppingCriteria",
    "StoppingCriteriaList",
    "SuppressTokensAtBeginLogitsProcessor",
    "SuppressTokensLogitsProcessor",
    "SynthIDTextWatermarkDetector",
    "SynthIDTextWatermarkLogitsProcessor",
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
    "UnfulfilledError",
    "UnspoolError",
    "UnsupportedError",
    "WatermarkDetector",
    "WatermarkDetectorOutput",
    "WatermarkLogitsProcessor",
    "WatermarkProcessor",
    "WatermarkingConfig",
    "WhisperTimeStampLogitsProcessor",
    "XTCLogitsWarper",
    "__version__",
    "asgi",
    "attach",
    "compute_transition_scores",
    "detach",
    "generate",
    "load",
    "pipeline",
    "register",
    "serve",
    "set_seed",
    "stream",
]
