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
from unspool.compression.llmlingua.compressor import PromptCompressor as PromptCompressor
from unspool.compression.prompt import CompressedPrompt as CompressedPrompt
from unspool.compression.prompt import TokenLoss as TokenLoss
from unspool.compression.prompt import compress_prompt as compress_prompt
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
from unspool.frameworks.flax import FlaxForceTokensLogitsProcessor as FlaxForceTokensLogitsProcessor
from unspool.frameworks.flax import FlaxForcedBOSTokenLogitsProcessor as FlaxForcedBOSTokenLogitsProcessor
from unspool.frameworks.flax import FlaxForcedEOSTokenLogitsProcessor as FlaxForcedEOSTokenLogitsProcessor
from unspool.frameworks.flax import FlaxLogitsProcessor as FlaxLogitsProcessor
from unspool.frameworks.flax import FlaxLogitsProcessorList as FlaxLogitsProcessorList
from unspool.frameworks.flax import FlaxLogitsWarper as FlaxLogitsWarper
from unspool.frameworks.flax import FlaxMinLengthLogitsProcessor as FlaxMinLengthLogitsProcessor
from unspool.frameworks.flax import FlaxSuppressTokensAtBeginLogitsProcessor as FlaxSuppressTokensAtBeginLogitsProcessor
from unspool.frameworks.flax import FlaxSuppressTokensLogitsProcessor as FlaxSuppressTokensLogitsProcessor
from unspool.frameworks.flax import FlaxTemperatureLogitsWarper as FlaxTemperatureLogitsWarper
from unspool.frameworks.flax import FlaxTopKLogitsWarper as FlaxTopKLogitsWarper
from unspool.frameworks.flax import FlaxTopPLogitsWarper as FlaxTopPLogitsWarper
from unspool.frameworks.flax import FlaxWhisperTimeStampLogitsProcessor as FlaxWhisperTimeStampLogitsProcessor
from unspool.frameworks.outputs import FlaxBeamSearchOutput as FlaxBeamSearchOutput
from unspool.frameworks.outputs import FlaxGreedySearchOutput as FlaxGreedySearchOutput
from unspool.frameworks.outputs import FlaxSampleOutput as FlaxSampleOutput
from unspool.frameworks.outputs import TFBeamSampleDecoderOnlyOutput as TFBeamSampleDecoderOnlyOutput
from unspool.frameworks.outputs import TFBeamSampleEncoderDecoderOutput as TFBeamSampleEncoderDecoderOutput
from unspool.frameworks.outputs import TFBeamSearchDecoderOnlyOutput as TFBeamSearchDecoderOnlyOutput
from unspool.frameworks.outputs import TFBeamSearchEncoderDecoderOutput as TFBeamSearchEncoderDecoderOutput
from unspool.frameworks.outputs import TFContrastiveSearchDecoderOnlyOutput as TFContrastiveSearchDecoderOnlyOutput
from unspool.frameworks.outputs import TFContrastiveSearchEncoderDecoderOutput as TFContrastiveSearchEncoderDecoderOutput
from unspool.frameworks.outputs import TFGreedySearchDecoderOnlyOutput as TFGreedySearchDecoderOnlyOutput
from unspool.frameworks.outputs import TFGreedySearchEncoderDecoderOutput as TFGreedySearchEncoderDecoderOutput
from unspool.frameworks.outputs import TFSampleDecoderOnlyOutput as TFSampleDecoderOnlyOutput
from unspool.frameworks.outputs import TFSampleEncoderDecoderOutput as TFSampleEncoderDecoderOutput
from unspool.frameworks.tensorflow import TFForceTokensLogitsProcessor as TFForceTokensLogitsProcessor
from unspool.frameworks.tensorflow import TFForcedBOSTokenLogitsProcessor as TFForcedBOSTokenLogitsProcessor
from unspool.frameworks.tensorflow import TFForcedEOSTokenLogitsProcessor as TFForcedEOSTokenLogitsProcessor
from unspool.frameworks.tensorflow import TFLogitsProcessor as TFLogitsProcessor
from unspool.frameworks.tensorflow import TFLogitsProcessorList as TFLogitsProcessorList
from unspool.frameworks.tensorflow import TFLogitsWarper as TFLogitsWarper
from unspool.frameworks.tensorflow import TFMinLengthLogitsProcessor as TFMinLengthLogitsProcessor
from unspool.frameworks.tensorflow import TFNoBadWordsLogitsProcessor as TFNoBadWordsLogitsProcessor
from unspool.frameworks.tensorflow import TFNoRepeatNGramLogitsProcessor as TFNoRepeatNGramLogitsProcessor
from unspool.frameworks.tensorflow import TFRepetitionPenaltyLogitsProcessor as TFRepetitionPenaltyLogitsProcessor
from unspool.frameworks.tensorflow import TFSuppressTokensAtBeginLogitsProcessor as TFSuppressTokensAtBeginLogitsProcessor
from unspool.frameworks.tensorflow import TFSuppressTokensLogitsProcessor as TFSuppressTokensLogitsProcessor
from unspool.frameworks.tensorflow import TFTemperatureLogitsWarper as TFTemperatureLogitsWarper
from unspool.frameworks.tensorflow import TFTopKLogitsWarper as TFTopKLogitsWarper
from unspool.frameworks.tensorflow import TFTopPLogitsWarper as TFTopPLogitsWarper
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
from unspool.pretrained.architectures import ArceeForCausalLM as ArceeForCausalLM
from unspool.pretrained.architectures import BaiChuanForCausalLM as BaiChuanForCausalLM
from unspool.pretrained.architectures import BaichuanForCausalLM as BaichuanForCausalLM
from unspool.pretrained.architectures import BartForConditionalGeneration as BartForConditionalGeneration
from unspool.pretrained.architectures import BartTokenizer as BartTokenizer
from unspool.pretrained.architectures import BartTokenizerFast as BartTokenizerFast
from unspool.pretrained.architectures import BioGptForCausalLM as BioGptForCausalLM
from unspool.pretrained.architectures import BioGptTokenizer as BioGptTokenizer
from unspool.pretrained.architectures import BioGptTokenizerFast as BioGptTokenizerFast
from unspool.pretrained.architectures import BlenderbotForConditionalGeneration as BlenderbotForConditionalGeneration
from unspool.pretrained.architectures import BlenderbotTokenizer as BlenderbotTokenizer
from unspool.pretrained.architectures import BlenderbotTokenizerFast as BlenderbotTokenizerFast
from unspool.pretrained.architectures import BloomForCausalLM as BloomForCausalLM
from unspool.pretrained.architectures import BloomTokenizer as BloomTokenizer
from unspool.pretrained.architectures import BloomTokenizerFast as BloomTokenizerFast
from unspool.pretrained.architectures import CodeGenForCausalLM as CodeGenForCausalLM
from unspool.pretrained.architectures import CodeGenTokenizer as CodeGenTokenizer
from unspool.pretrained.architectures import CodeGenTokenizerFast as CodeGenTokenizerFast
from unspool.pretrained.architectures import Cohere2ForCausalLM as Cohere2ForCausalLM
from unspool.pretrained.architectures import CohereForCausalLM as CohereForCausalLM
from unspool.pretrained.architectures import CohereTokenizer as CohereTokenizer
from unspool.pretrained.architectures import CohereTokenizerFast as CohereTokenizerFast
from unspool.pretrained.architectures import CwmForCausalLM as CwmForCausalLM
from unspool.pretrained.architectures import Dots1ForCausalLM as Dots1ForCausalLM
from unspool.pretrained.architectures import Ernie4_5ForCausalLM as Ernie4_5ForCausalLM
from unspool.pretrained.architectures import Ernie4_5_MoeForCausalLM as Ernie4_5_MoeForCausalLM
from unspool.pretrained.architectures import Exaone4ForCausalLM as Exaone4ForCausalLM
from unspool.pretrained.architectures import FalconForCausalLM as FalconForCausalLM
from unspool.pretrained.architectures import FalconMambaForCausalLM as FalconMambaForCausalLM
from unspool.pretrained.architectures import FlexOlmoForCausalLM as FlexOlmoForCausalLM
from unspool.pretrained.architectures import GPT2LMHeadModel as GPT2LMHeadModel
from unspool.pretrained.architectures import GPT2Tokenizer as GPT2Tokenizer
from unspool.pretrained.architectures import GPT2TokenizerFast as GPT2TokenizerFast
from unspool.pretrained.architectures import GPTBigCodeForCausalLM as GPTBigCodeForCausalLM
from unspool.pretrained.architectures import GPTJForCausalLM as GPTJForCausalLM
from unspool.pretrained.architectures import GPTNeoForCausalLM as GPTNeoForCausalLM
from unspool.pretrained.architectures import GPTNeoXForCausalLM as GPTNeoXForCausalLM
from unspool.pretrained.architectures import GPTNeoXTokenizer as GPTNeoXTokenizer
from unspool.pretrained.architectures import GPTNeoXTokenizerFast as GPTNeoXTokenizerFast
from unspool.pretrained.architectures import Gemma2ForCausalLM as Gemma2ForCausalLM
from unspool.pretrained.architectures import Gemma3ForCausalLM as Gemma3ForCausalLM
from unspool.pretrained.architectures import Gemma3ForConditionalGeneration as Gemma3ForConditionalGeneration
from unspool.pretrained.architectures import GemmaForCausalLM as GemmaForCausalLM
from unspool.pretrained.architectures import GemmaTokenizer as GemmaTokenizer
from unspool.pretrained.architectures import GemmaTokenizerFast as GemmaTokenizerFast
from unspool.pretrained.architectures import GitForCausalLM as GitForCausalLM
from unspool.pretrained.architectures import Glm4ForCausalLM as Glm4ForCausalLM
from unspool.pretrained.architectures import Glm4MoeForCausalLM as Glm4MoeForCausalLM
from unspool.pretrained.architectures import GlmForCausalLM as GlmForCausalLM
from unspool.pretrained.architectures import GptOssForCausalLM as GptOssForCausalLM
from unspool.pretrained.architectures import GraniteForCausalLM as GraniteForCausalLM
from unspool.pretrained.architectures import GraniteMoeForCausalLM as GraniteMoeForCausalLM
from unspool.pretrained.architectures import HeliumForCausalLM as HeliumForCausalLM
from unspool.pretrained.architectures import Idefics3ForConditionalGeneration as Idefics3ForConditionalGeneration
from unspool.pretrained.architectures import Jais2ForCausalLM as Jais2ForCausalLM
from unspool.pretrained.architectures import LlamaForCausalLM as LlamaForCausalLM
from unspool.pretrained.architectures import LlamaTokenizer as LlamaTokenizer
from unspool.pretrained.architectures import LlamaTokenizerFast as LlamaTokenizerFast
from unspool.pretrained.architectures import LlavaForConditionalGeneration as LlavaForConditionalGeneration
from unspool.pretrained.architectures import M2M100ForConditionalGeneration as M2M100ForConditionalGeneration
from unspool.pretrained.architectures import M2M100Tokenizer as M2M100Tokenizer
from unspool.pretrained.architectures import M2M100TokenizerFast as M2M100TokenizerFast
from unspool.pretrained.architectures import MBart50Tokenizer as MBart50Tokenizer
from unspool.pretrained.architectures import MBart50TokenizerFast as MBart50TokenizerFast
from unspool.pretrained.architectures import MBartForConditionalGeneration as MBartForConditionalGeneration
from unspool.pretrained.architectures import MBartTokenizer as MBartTokenizer
from unspool.pretrained.architectures import MBartTokenizerFast as MBartTokenizerFast
from unspool.pretrained.architectures import MPTForCausalLM as MPTForCausalLM
from unspool.pretrained.architectures import MT5ForConditionalGeneration as MT5ForConditionalGeneration
from unspool.pretrained.architectures import MT5Tokenizer as MT5Tokenizer
from unspool.pretrained.architectures import MT5TokenizerFast as MT5TokenizerFast
from unspool.pretrained.architectures import Mamba2ForCausalLM as Mamba2ForCausalLM
from unspool.pretrained.architectures import MambaForCausalLM as MambaForCausalLM
from unspool.pretrained.architectures import MarianMTModel as MarianMTModel
from unspool.pretrained.architectures import MarianTokenizer as MarianTokenizer
from unspool.pretrained.architectures import MarianTokenizerFast as MarianTokenizerFast
from unspool.pretrained.architectures import MinistralForCausalLM as MinistralForCausalLM
from unspool.pretrained.architectures import MistralForCausalLM as MistralForCausalLM
from unspool.pretrained.architectures import MixtralForCausalLM as MixtralForCausalLM
from unspool.pretrained.architectures import MptForCausalLM as MptForCausalLM
from unspool.pretrained.architectures import MusicgenForConditionalGeneration as MusicgenForConditionalGeneration
from unspool.pretrained.architectures import NemotronForCausalLM as NemotronForCausalLM
from unspool.pretrained.architectures import NllbTokenizer as NllbTokenizer
from unspool.pretrained.architectures import NllbTokenizerFast as NllbTokenizerFast
from unspool.pretrained.architectures import OPTForCausalLM as OPTForCausalLM
from unspool.pretrained.architectures import Olmo2ForCausalLM as Olmo2ForCausalLM
from unspool.pretrained.architectures import Olmo3ForCausalLM as Olmo3ForCausalLM
from unspool.pretrained.architectures import OlmoForCausalLM as OlmoForCausalLM
from unspool.pretrained.architectures import OlmoeForCausalLM as OlmoeForCausalLM
from unspool.pretrained.architectures import PegasusForConditionalGeneration as PegasusForConditionalGeneration
from unspool.pretrained.architectures import PegasusTokenizer as PegasusTokenizer
from unspool.pretrained.architectures import PegasusTokenizerFast as PegasusTokenizerFast
from unspool.pretrained.architectures import PersimmonForCausalLM as PersimmonForCausalLM
from unspool.pretrained.architectures import Phi3ForCausalLM as Phi3ForCausalLM
from unspool.pretrained.architectures import PhiForCausalLM as PhiForCausalLM
from unspool.pretrained.architectures import Qwen2ForCausalLM as Qwen2ForCausalLM
from unspool.pretrained.architectures import Qwen2MoeForCausalLM as Qwen2MoeForCausalLM
from unspool.pretrained.architectures import Qwen2Tokenizer as Qwen2Tokenizer
from unspool.pretrained.architectures import Qwen2TokenizerFast as Qwen2TokenizerFast
from unspool.pretrained.architectures import Qwen2VLForConditionalGeneration as Qwen2VLForConditionalGeneration
from unspool.pretrained.architectures import Qwen2_5_VLForConditionalGeneration as Qwen2_5_VLForConditionalGeneration
from unspool.pretrained.architectures import Qwen3ForCausalLM as Qwen3ForCausalLM
from unspool.pretrained.architectures import Qwen3MoeForCausalLM as Qwen3MoeForCausalLM
from unspool.pretrained.architectures import SmolLM3ForCausalLM as SmolLM3ForCausalLM
from unspool.pretrained.architectures import SmolVLMForConditionalGeneration as SmolVLMForConditionalGeneration
from unspool.pretrained.architectures import StableLmForCausalLM as StableLmForCausalLM
from unspool.pretrained.architectures import Starcoder2ForCausalLM as Starcoder2ForCausalLM
from unspool.pretrained.architectures import T5ForConditionalGeneration as T5ForConditionalGeneration
from unspool.pretrained.architectures import T5Tokenizer as T5Tokenizer
from unspool.pretrained.architectures import T5TokenizerFast as T5TokenizerFast
from unspool.pretrained.architectures import UMT5ForConditionalGeneration as UMT5ForConditionalGeneration
from unspool.pretrained.architectures import VaultGemmaForCausalLM as VaultGemmaForCausalLM
from unspool.pretrained.architectures import WhisperForConditionalGeneration as WhisperForConditionalGeneration
from unspool.pretrained.architectures import WhisperTokenizer as WhisperTokenizer
from unspool.pretrained.architectures import WhisperTokenizerFast as WhisperTokenizerFast
from unspool.pretrained.auto import AutoModel as AutoModel
from unspool.pretrained.auto import AutoModelForCausalLM as AutoModelForCausalLM
from unspool.pretrained.auto import AutoModelForSeq2SeqLM as AutoModelForSeq2SeqLM
from unspool.pretrained.auto import AutoModelForSpeechSeq2Seq as AutoModelForSpeechSeq2Seq
from unspool.pretrained.auto import AutoTokenizer as AutoTokenizer
from unspool.pretrained.config import AutoConfig as AutoConfig
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
from unspool.stopping.repeats import RepeatCriteria as RepeatCriteria
from unspool.stopping.strings import StopStringCriteria as StopStringCriteria
from unspool.stopping.time import MaxTimeCriteria as MaxTimeCriteria
from unspool.streaming import AsyncTextIteratorStreamer as AsyncTextIteratorStreamer
from unspool.streaming import TextIteratorStreamer as TextIteratorStreamer
from unspool.streaming import TextStreamer as TextStreamer
from unspool.text import Tokenizer as Tokenizer
from unspool.thoughts.budget import ThinkingBudgetLogitsProcessor as ThinkingBudgetLogitsProcessor
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
    "ArceeForCausalLM",
    "AsyncTextIteratorStreamer",
    "AutoConfig",
    "AutoModel",
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForTextToWaveform",
    "AutoProcessor",
    "AutoTokenizer",
    "BaiChuanForCausalLM",
    "BaichuanForCausalLM",
    "BartForConditionalGeneration",
    "BartTokenizer",
    "BartTokenizerFast",
    "BayesianDetectorConfig",
    "BayesianDetectorModel",
    "BeamHypotheses",
    "BeamScorer",
    "BeamSearchScorer",
    "BeamTrace",
    "BioGptForCausalLM",
    "BioGptTokenizer",
    "BioGptTokenizerFast",
    "BitsAndBytesConfig",
    "BlenderbotForConditionalGeneration",
    "BlenderbotTokenizer",
    "BlenderbotTokenizerFast",
    "BlockPool",
    "BloomForCausalLM",
    "BloomTokenizer",
    "BloomTokenizerFast",
    "Cache",
    "CacheConfig",
    "ClassifierFreeGuidanceLogitsProcessor",
    "CodeGenForCausalLM",
    "CodeGenTokenizer",
    "CodeGenTokenizerFast",
    "Cohere2ForCausalLM",
    "CohereForCausalLM",
    "CohereTokenizer",
    "CohereTokenizerFast",
    "CompileConfig",
    "CompressedPrompt",
    "ConstrainedBeamSearchScorer",
    "Constraint",
    "ConstraintListState",
    "ContextError",
    "CwmForCausalLM",
    "DRYLogitsProcessor",
    "DisjunctiveConstraint",
    "Dots1ForCausalLM",
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
    "Ernie4_5ForCausalLM",
    "Ernie4_5_MoeForCausalLM",
    "EtaLogitsWarper",
    "Exaone4ForCausalLM",
    "ExponentialDecayLengthPenalty",
    "FalconForCausalLM",
    "FalconMambaForCausalLM",
    "FlaxBeamSearchOutput",
    "FlaxForceTokensLogitsProcessor",
    "FlaxForcedBOSTokenLogitsProcessor",
    "FlaxForcedEOSTokenLogitsProcessor",
    "FlaxGreedySearchOutput",
    "FlaxLogitsProcessor",
    "FlaxLogitsProcessorList",
    "FlaxLogitsWarper",
    "FlaxMinLengthLogitsProcessor",
    "FlaxSampleOutput",
    "FlaxSuppressTokensAtBeginLogitsProcessor",
    "FlaxSuppressTokensLogitsProcessor",
    "FlaxTemperatureLogitsWarper",
    "FlaxTopKLogitsWarper",
    "FlaxTopPLogitsWarper",
    "FlaxWhisperTimeStampLogitsProcessor",
    "FlexOlmoForCausalLM",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "FrequencyPenaltyLogitsProcessor",
    "GPT2LMHeadModel",
    "GPT2Tokenizer",
    "GPT2TokenizerFast",
    "GPTBigCodeForCausalLM",
    "GPTJForCausalLM",
    "GPTNeoForCausalLM",
    "GPTNeoXForCausalLM",
    "GPTNeoXTokenizer",
    "GPTNeoXTokenizerFast",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration",
    "GemmaForCausalLM",
    "GemmaTokenizer",
    "GemmaTokenizerFast",
    "GenerateBeamDecoderOnlyOutput",
    "GenerateBeamEncoderDecoderOutput",
    "GenerateDecoderOnlyOutput",
    "GenerateEncoderDecoderOutput",
    "Generation",
    "GenerationConfig",
    "GitForCausalLM",
    "Glm4ForCausalLM",
    "Glm4MoeForCausalLM",
    "GlmForCausalLM",
    "GptOssForCausalLM",
    "GrammarLogitsProcessor",
    "GraniteForCausalLM",
    "GraniteMoeForCausalLM",
    "GumbelWatermarkLogitsProcessor",
    "GumbelWatermarkingConfig",
    "HQQQuantizedCache",
    "HammingDiversityLogitsProcessor",
    "HeliumForCausalLM",
    "HybridCache",
    "Idefics3ForConditionalGeneration",
    "InfNanRemoveLogitsProcessor",
    "InputError",
    "Jais2ForCausalLM",
    "LanguageModel",
    "LlamaForCausalLM",
    "LlamaTokenizer",
    "LlamaTokenizerFast",
    "LlavaForConditionalGeneration",
    "LoadError",
    "LogitBiasLogitsProcessor",
    "LogitNormalization",
    "LogitsProcessor",
    "LogitsProcessorList",
    "M2M100ForConditionalGeneration",
    "M2M100Tokenizer",
    "M2M100TokenizerFast",
    "MBart50Tokenizer",
    "MBart50TokenizerFast",
    "MBartForConditionalGeneration",
    "MBartTokenizer",
    "MBartTokenizerFast",
    "MPTForCausalLM",
    "MT5ForConditionalGeneration",
    "MT5Tokenizer",
    "MT5TokenizerFast",
    "Mamba2ForCausalLM",
    "MambaCache",
    "MambaForCausalLM",
    "MarianMTModel",
    "MarianTokenizer",
    "MarianTokenizerFast",
    "MaxLengthCriteria",
    "MaxTimeCriteria",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "MinPLogitsWarper",
    "MinistralForCausalLM",
    "MirostatLogitsWarper",
    "MissingExtraError",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "ModelNotFoundError",
    "MptForCausalLM",
    "MusicgenForConditionalGeneration",
    "NemotronForCausalLM",
    "NllbTokenizer",
    "NllbTokenizerFast",
    "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "NoTokenLeftError",
    "OPTForCausalLM",
    "OffloadedCache",
    "OffloadedStaticCache",
    "Olmo2ForCausalLM",
    "Olmo3ForCausalLM",
    "OlmoForCausalLM",
    "OlmoeForCausalLM",
    "PagedCache",
    "PegasusForConditionalGeneration",
    "PegasusTokenizer",
    "PegasusTokenizerFast",
    "PersimmonForCausalLM",
    "Phi3ForCausalLM",
    "PhiForCausalLM",
    "PhrasalConstraint",
    "Piece",
    "Pipeline",
    "PluginError",
    "PrefixConstrainedLogitsProcessor",
    "PresencePenaltyLogitsProcessor",
    "PretrainedModel",
    "PromptCompressor",
    "QuantizedCache",
    "QuantizedCacheConfig",
    "QuantizedHybridCache",
    "QuantizedStaticCache",
    "QuantoQuantizedCache",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen2Tokenizer",
    "Qwen2TokenizerFast",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "RepeatCriteria",
    "RepetitionPenaltyLogitsProcessor",
    "Request",
    "ResourceError",
    "SequenceBiasLogitsProcessor",
    "SettingError",
    "SinkCache",
    "SlidingWindowCache",
    "SmolLM3ForCausalLM",
    "SmolVLMForConditionalGeneration",
    "StableLmForCausalLM",
    "Starcoder2ForCausalLM",
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
    "T5ForConditionalGeneration",
    "T5Tokenizer",
    "T5TokenizerFast",
    "TFBeamSampleDecoderOnlyOutput",
    "TFBeamSampleEncoderDecoderOutput",
    "TFBeamSearchDecoderOnlyOutput",
    "TFBeamSearchEncoderDecoderOutput",
    "TFContrastiveSearchDecoderOnlyOutput",
    "TFContrastiveSearchEncoderDecoderOutput",
    "TFForceTokensLogitsProcessor",
    "TFForcedBOSTokenLogitsProcessor",
    "TFForcedEOSTokenLogitsProcessor",
    "TFGreedySearchDecoderOnlyOutput",
    "TFGreedySearchEncoderDecoderOutput",
    "TFLogitsProcessor",
    "TFLogitsProcessorList",
    "TFLogitsWarper",
    "TFMinLengthLogitsProcessor",
    "TFNoBadWordsLogitsProcessor",
    "TFNoRepeatNGramLogitsProcessor",
    "TFRepetitionPenaltyLogitsProcessor",
    "TFSampleDecoderOnlyOutput",
    "TFSampleEncoderDecoderOutput",
    "TFSuppressTokensAtBeginLogitsProcessor",
    "TFSuppressTokensLogitsProcessor",
    "TFTemperatureLogitsWarper",
    "TFTopKLogitsWarper",
    "TFTopPLogitsWarper",
    "TemperatureLogitsWarper",
    "TextIteratorStreamer",
    "TextStreamer",
    "ThinkingBudgetLogitsProcessor",
    "TokenLogprob",
    "TokenLoss",
    "Tokenizer",
    "TopALogitsWarper",
    "TopHLogitsWarper",
    "TopKLogitsWarper",
    "TopNSigmaLogitsWarper",
    "TopPLogitsWarper",
    "TypicalLogitsWarper",
    "UMT5ForConditionalGeneration",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    "UnfulfilledError",
    "UnspoolError",
    "UnsupportedError",
    "VaultGemmaForCausalLM",
    "WatermarkDetector",
    "WatermarkDetectorOutput",
    "WatermarkLogitsProcessor",
    "WatermarkProcessor",
    "WatermarkingConfig",
    "WhisperForConditionalGeneration",
    "WhisperTimeStampLogitsProcessor",
    "WhisperTokenizer",
    "WhisperTokenizerFast",
    "XTCLogitsWarper",
    "__version__",
    "asgi",
    "attach",
    "compress_prompt",
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
