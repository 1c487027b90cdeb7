"""unspool: every way to decode a language model, composable, at the speed of the hardware.

>>> import unspool
>>> lm = unspool.load("smollm2-135m")
>>> lm.generate("The capital of France is", max_new_tokens=8).text
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

from unspool._version import __version__ as __version__

# Names are imported when they are first asked for, so that `unspool --help` need not wait for torch. This is the one
# list of them; `__init__.pyi` is made from it for type checkers and editors (`python tools/make_stubs.py`).
_HOMES: dict[str, tuple[str, ...]] = {
    "api": ("Answer", "LanguageModel", "Piece", "attach", "detach", "generate", "load", "stream"),
    "beams": ("BeamHypotheses", "BeamScorer", "BeamSearchScorer", "ConstrainedBeamSearchScorer"),
    "cache": (
        "Cache",
        "CacheConfig",
        "DynamicCache",
        "EncoderDecoderCache",
        "StaticCache",
        "StaticCacheConfig",
        "HQQQuantizedCache",
        "QuantizedCache",
        "QuantizedCacheConfig",
        "QuantizedHybridCache",
        "QuantizedStaticCache",
        "QuantoQuantizedCache",
        "HybridCache",
        "MambaCache",
        "OffloadedCache",
        "OffloadedStaticCache",
        "BlockPool",
        "PagedCache",
        "SinkCache",
        "SlidingWindowCache",
    ),
    "compression.llmlingua.compressor": ("PromptCompressor",),
    "compression.prompt": ("CompressedPrompt", "TokenLoss", "compress_prompt"),
    "config": (
        "CompileConfig",
        "GenerationConfig",
        "GumbelWatermarkingConfig",
        "SynthIDTextWatermarkingConfig",
        "WatermarkingConfig",
    ),
    "constraints": ("Constraint", "ConstraintListState", "DisjunctiveConstraint", "PhrasalConstraint"),
    "decoding.beams.trace": ("BeamTrace",),
    "decoding.transitions": ("compute_transition_scores",),
    "engine": ("Engine", "EngineStats", "Request"),
    "errors": (
        "ContextError",
        "EngineError",
        "InputError",
        "LoadError",
        "MissingExtraError",
        "ModelNotFoundError",
        "NoTokenLeftError",
        "PluginError",
        "ResourceError",
        "SettingError",
        "UnfulfilledError",
        "UnspoolError",
        "UnsupportedError",
    ),
    "frameworks.flax": (
        "FlaxForceTokensLogitsProcessor",
        "FlaxForcedBOSTokenLogitsProcessor",
        "FlaxForcedEOSTokenLogitsProcessor",
        "FlaxLogitsProcessor",
        "FlaxLogitsProcessorList",
        "FlaxLogitsWarper",
        "FlaxMinLengthLogitsProcessor",
        "FlaxSuppressTokensAtBeginLogitsProcessor",
        "FlaxSuppressTokensLogitsProcessor",
        "FlaxTemperatureLogitsWarper",
        "FlaxTopKLogitsWarper",
        "FlaxTopPLogitsWarper",
        "FlaxWhisperTimeStampLogitsProcessor",
    ),
    "frameworks.outputs": (
        "FlaxBeamSearchOutput",
        "FlaxGreedySearchOutput",
        "FlaxSampleOutput",
        "TFBeamSampleDecoderOnlyOutput",
        "TFBeamSampleEncoderDecoderOutput",
        "TFBeamSearchDecoderOnlyOutput",
        "TFBeamSearchEncoderDecoderOutput",
        "TFContrastiveSearchDecoderOnlyOutput",
        "TFContrastiveSearchEncoderDecoderOutput",
        "TFGreedySearchDecoderOnlyOutput",
        "TFGreedySearchEncoderDecoderOutput",
        "TFSampleDecoderOnlyOutput",
        "TFSampleEncoderDecoderOutput",
    ),
    "frameworks.tensorflow": (
        "TFForceTokensLogitsProcessor",
        "TFForcedBOSTokenLogitsProcessor",
        "TFForcedEOSTokenLogitsProcessor",
        "TFLogitsProcessor",
        "TFLogitsProcessorList",
        "TFLogitsWarper",
        "TFMinLengthLogitsProcessor",
        "TFNoBadWordsLogitsProcessor",
        "TFNoRepeatNGramLogitsProcessor",
        "TFRepetitionPenaltyLogitsProcessor",
        "TFSuppressTokensAtBeginLogitsProcessor",
        "TFSuppressTokensLogitsProcessor",
        "TFTemperatureLogitsWarper",
        "TFTopKLogitsWarper",
        "TFTopPLogitsWarper",
    ),
    "outputs": (
        "GenerateBeamDecoderOnlyOutput",
        "GenerateBeamEncoderDecoderOutput",
        "GenerateDecoderOnlyOutput",
        "GenerateEncoderDecoderOutput",
        "Generation",
        "TokenLogprob",
    ),
    "pretrained.auto": (
        "AutoModel",
        "AutoModelForCausalLM",
        "AutoModelForSeq2SeqLM",
        "AutoModelForSpeechSeq2Seq",
        "AutoTokenizer",
    ),
    "pretrained.config": ("AutoConfig",),
    "pretrained.model": ("PretrainedModel",),
    "pretrained.pipelines.base": ("Pipeline",),
    "pretrained.pipelines.opening": ("pipeline",),
    "pretrained.pictures": ("AutoModelForImageTextToText",),
    "pretrained.voices": ("AutoModelForTextToWaveform",),
    "pretrained.processor": ("AutoProcessor",),
    "pretrained.quantization": ("BitsAndBytesConfig",),
    "pretrained.seeding": ("set_seed",),
    "registry": ("register",),
    "server": ("asgi", "serve"),
    "streaming": ("AsyncTextIteratorStreamer", "TextIteratorStreamer", "TextStreamer"),
    "text": ("Tokenizer",),
    "watermark": (
        "BayesianDetectorConfig",
        "BayesianDetectorModel",
        "GumbelWatermarkLogitsProcessor",
        "SynthIDTextWatermarkDetector",
        "SynthIDTextWatermarkLogitsProcessor",
        "WatermarkDetector",
        "WatermarkDetectorOutput",
        "WatermarkLogitsProcessor",
    ),
}
# Rooms that keep a table of their public names, most of them made from the entries of their parts.
_TABLED = ("logits", "stopping")
# `LlamaForCausalLM` and its kin: the classes of the registered families, made when they are asked for.
_ARCHITECTURES = "unspool.pretrained.architectures"
_ROOMS = frozenset({*_HOMES, *_TABLED, "plugins"})


@cache
def find_homes() -> dict[str, str]:
    """The module of every public name."""
    homes = {name: f"unspool.{home}" for home, names in _HOMES.items() for name in names}
    for room in _TABLED:
        homes |= import_module(f"unspool.{room}").PUBLIC
    return homes


def __getattr__(name: str) -> object:
    if name in _ROOMS:  # `import unspool; unspool.config`
        return import_module(f"unspool.{name}")
    if name == "__all__":
        return sorted((*find_homes(), "__version__"))
    home = None if name.startswith("__") else find_homes().get(name)
    if home is None and not name[:1].isupper():
        raise AttributeError(f"module 'unspool' has no attribute {name!r}")
    value = getattr(import_module(home or _ARCHITECTURES), name)  # which raises for a name that is none
    globals()[name] = value  # the next look-up finds it
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *find_homes()})
