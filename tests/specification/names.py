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
    "pretrained/test_architectures": "GitForCausalLM GPT2LMHeadModel GPT2Tokenizer MambaForCausalLM "
    "WhisperForConditionalGeneration",
}
SETTINGS = (
    *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "stop_strings", "eos_token_id"),
    *("early_stopping", "do_sample", "num_beams", "num_beam_groups", "penalty_alpha", "dola_layers", "use_cache"),
    *("cache_implementation", "cache_config", "temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff"),
    *("eta_cutoff", "diversity_penalty", "repetition_penalty", "encoder_repetition_penalty", "length_penalty"),
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "sequence_bias", "renormalize_logits"),
    *("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty", "suppress_tokens"),
    *("begin_suppress_tokens", "guidance_scale", "watermarking_config", "num_return_sequences", "output_attentions"),
    *("output_hidden_states", "output_scores", "return_dict_in_generate", "pad_token_id", "bos_token_id"),
    *("decoder_start_token_id", "prompt_lookup_num_tokens", "assistant_early_exit", "compile_config"),
)
"""The settings that the documents name."""
ARGUMENTS = {
    "inputs": "decoding/test_inputs::lists_are_as_good_as_tensors",
    "attention_mask": "decoding/test_inputs::a_masked_token_is_as_if_it_were_not_there",
    "input_features": "speech/test_generate::one_window",
    "generation_config": "plan/test_plan::the_later_layer_wins_and_is_known",
    "logits_processor": "logits/test_pipeline::a_custom_processor_takes_the_place_of_the_models_own",
    "stopping_criteria": "decoding/test_stops::an_answer_a_row_stops_these_rows",
    "prefix_allowed_tokens_fn": (
        "logits/test_pipeline_in_calls::prefix_function_sees_the_rows_that_are_left_by_their_number"
    ),
    "streamer": "decoding/test_streamers::prompt_then_a_token_a_row_then_the_end",
    "assistant_model": "decoding/speculative/test_exactness::greedy_equals_plain_greedy",
    "assistant_tokenizer": "decoding/speculative/test_universal::greedy_equals_plain_greedy",
    "tokenizer": "decoding/test_stops::stop_strings_need_a_tokenizer",
    "negative_prompt_ids": "decoding/test_guidance::one_negative_prompt_for_all_rows",
    "past_key_values": "decoding/test_inputs::a_second_turn_reads_only_what_is_new",
    "recipe": "recipes/test_recipes::a_folder_in_the_references_manner",
}
"""The arguments of generate() that the documents name, and a test of each."""
OF_EXAMPLES = (
    *("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoProcessor", "AutoTokenizer", "BitsAndBytesConfig"),
    *("GPT2LMHeadModel", "GPT2Tokenizer", "MambaForCausalLM", "WhisperForConditionalGeneration"),
    *("GitForCausalLM", "MusicgenForConditionalGeneration", "pipeline", "set_seed"),
)
"""What the examples import besides, or link to."""
AWAITED = {"MusicgenForConditionalGeneration": "MusicgenForConditionalGeneration.from_pretrained"}

_FRAMEWORKS = {**frameworks.OUTPUTS, **frameworks.PROCESSORS, **dict.fromkeys(sorted(frameworks.BASES), "")}


def list_names() -> dict[str, tuple[str, str]]:
    """Every name with its arguments, and the file below `tests/` that shows what it does; empty if none does yet."""
    files = {name: file for file, names in TESTS.items() for name in names.split()}
    found = {name: (", ".join(f"`{one}`" for one in given), files[name]) for name, (given, _) in ROWS.items()}
    for name, given in _FRAMEWORKS.items():
        shown = ", ".join(f"`{one}`" for one in given.replace(",", "").split())
        found[name] = shown, "frameworks/test_names" if "Output" in name else "frameworks/test_processors"
    return found | {name: ("", files.get(name, "")) for name in OF_EXAMPLES}
