"""Which test files show what each name of the documents does; its arguments and methods are compared elsewhere."""

from __future__ import annotations

from tests.frameworks import test_names as frameworks
from tests.test_public_names import ROWS

TESTS: dict[str, str] = {
    "test_outputs": "GenerateDecoderOnlyOutput GenerateEncoderDecoderOutput GenerateBeamDecoderOnlyOutput "
    "GenerateBeamEncoderDecoderOutput",
    "config/test_generation": "GenerationConfig",
    "config/test_watermarking": "WatermarkingConfig SynthIDTextWatermarkingConfig",
    "models/paths/test_compiled": "CompileConfig",
    "logits/cases": "AlternatingCodebooksLogitsProcessor LogitNormalization WhisperTimeStampLogitsProcessor",
    "logits/test_penalties": "EncoderNoRepeatNGramLogitsProcessor EncoderRepetitionPenaltyLogitsProcessor "
    "NoRepeatNGramLogitsProcessor RepetitionPenaltyLogitsProcessor",
    "logits/test_sampling_processors": "EpsilonLogitsWarper EtaLogitsWarper MinPLogitsWarper TypicalLogitsWarper",
    "logits/test_bias_and_forced": "ClassifierFreeGuidanceLogitsProcessor ExponentialDecayLengthPenalty "
    "ForcedBOSTokenLogitsProcessor ForcedEOSTokenLogitsProcessor HammingDiversityLogitsProcessor "
    "InfNanRemoveLogitsProcessor MinLengthLogitsProcessor NoBadWordsLogitsProcessor PrefixConstrainedLogitsProcessor "
    "SequenceBiasLogitsProcessor SuppressTokensAtBeginLogitsProcessor UnbatchedClassifierFreeGuidanceLogitsProcessor",
    "logits/test_forbidden": "MinNewTokensLengthLogitsProcessor SuppressTokensLogitsProcessor",
    "logits/test_temperature_and_truncation": "LogitsProcessor LogitsProcessorList TemperatureLogitsWarper "
    "TopKLogitsWarper TopPLogitsWarper",
    "watermark/test_processors": "SynthIDTextWatermarkLogitsProcessor WatermarkLogitsProcessor",
    "stopping/test_criteria": "StoppingCriteria StoppingCriteriaList MaxLengthCriteria MaxTimeCriteria "
    "EosTokenCriteria",
    "stopping/test_strings": "StopStringCriteria",
    "constraints/test_constraints": "Constraint PhrasalConstraint DisjunctiveConstraint ConstraintListState",
    "beams/test_scorers": "BeamScorer BeamSearchScorer",
    "beams/test_constrained": "ConstrainedBeamSearchScorer",
    "streaming/test_streamers": "TextStreamer TextIteratorStreamer AsyncTextIteratorStreamer",
    "cache/test_contract": "Cache",
    "api/test_shortage": "CacheConfig",
    "cache/test_quantized_config": "QuantizedCacheConfig",
    "cache/test_quantized": "QuantizedCache QuantoQuantizedCache HQQQuantizedCache",
    "cache/test_reference_surface": "DynamicCache StaticCache EncoderDecoderCache",
    "cache/test_kinds_on_models": "SinkCache SlidingWindowCache OffloadedStaticCache",
    "cache/test_memory_and_files": "OffloadedCache",
    "cache/test_ring_places": "HybridCache",
    "cache/test_mamba": "MambaCache",
    "watermark/test_detector": "WatermarkDetector",
    "watermark/test_bayesian": "BayesianDetectorConfig BayesianDetectorModel SynthIDTextWatermarkDetector",
    "pretrained/test_auto": "AutoModelForCausalLM AutoModelForSeq2SeqLM AutoTokenizer BitsAndBytesConfig set_seed",
    "pretrained/test_pipelines": "pipeline",
    "examples/test_seeds": "AutoProcessor",
    "pretrained/test_architectures": "GPT2LMHeadModel GPT2Tokenizer MambaForCausalLM WhisperForConditionalGeneration",
}
OF_EXAMPLES = (
    *("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoProcessor", "AutoTokenizer", "BitsAndBytesConfig"),
    *("GPT2LMHeadModel", "GPT2Tokenizer", "MambaForCausalLM", "WhisperForConditionalGeneration"),
    *("GitForCausalLM", "MusicgenForConditionalGeneration", "pipeline", "set_seed"),
)
"""What the examples import besides, or link to."""
AWAITED = {name: f"{name}.from_pretrained" for name in ("GitForCausalLM", "MusicgenForConditionalGeneration")}

_FRAMEWORKS = {**frameworks.OUTPUTS, **frameworks.PROCESSORS, **dict.fromkeys(sorted(frameworks.BASES), "")}


def list_names() -> dict[str, tuple[str, str]]:
    """Every name with its arguments, and the file below `tests/` that shows what it does; empty if none does yet."""
    files = {name: file for file, names in TESTS.items() for name in names.split()}
    found = {name: (", ".join(f"`{one}`" for one in given), files[name]) for name, (given, _) in ROWS.items()}
    for name, given in _FRAMEWORKS.items():
        shown = ", ".join(f"`{one}`" for one in given.replace(",", "").split())
        found[name] = shown, "frameworks/test_names" if "Output" in name else "frameworks/test_processors"
    return found | {name: ("", files.get(name, "")) for name in OF_EXAMPLES}
