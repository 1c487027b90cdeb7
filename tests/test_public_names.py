"""The public surface is a list, and this reads it: names, signatures, and what importing costs."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import time
from functools import lru_cache
from typing import Any

import pytest

import unspool
from tests.source import parse_files, read_imports, read_texts

# Constructor parameters and methods of the reference (transformers 4.52.4), by name: ours have these parameters, in
# this order, with these defaults.
REFERENCE = """
| `GenerateDecoderOnlyOutput` | `sequences`, `scores`, `logits`, `attentions`, `hidden_states`, `past_key_values` |  |
| `GenerateEncoderDecoderOutput` | `sequences`, `scores`, `logits`, `encoder_attentions`, `encoder_hidden_states`, `decoder_attentions`, `cross_attentions`, `decoder_hidden_states`, `past_key_values` |  |
| `GenerateBeamDecoderOnlyOutput` | `sequences`, `sequences_scores`, `scores`, `logits`, `beam_indices`, `attentions`, `hidden_states`, `past_key_values` |  |
| `GenerateBeamEncoderDecoderOutput` | `sequences`, `sequences_scores`, `scores`, `logits`, `beam_indices`, `encoder_attentions`, `encoder_hidden_states`, `decoder_attentions`, `cross_attentions`, `decoder_hidden_states`, `past_key_values` |  |
| `GenerationConfig` | `**kwargs` | `dict_torch_dtype_to_str`, `from_dict`, `from_model_config`, `from_pretrained`, `get_generation_mode`, `save_pretrained`, `to_dict`, `to_diff_dict`, `to_json_file`, `to_json_string`, `update`, `validate` |
| `WatermarkingConfig` | `greenlist_ratio=0.25`, `bias=2.0`, `hashing_key=15485863`, `seeding_scheme='lefthash'`, `context_width=1` | `construct_processor`, `from_dict`, `to_dict`, `to_json_file`, `to_json_string`, `update`, `validate` |
| `SynthIDTextWatermarkingConfig` | `ngram_len`, `keys`, `context_history_size=1024`, `sampling_table_seed=0`, `sampling_table_size=65536`, `skip_first_ngram_calls=False`, `debug_mode=False` | `construct_processor`, `from_dict`, `to_dict`, `to_json_file`, `to_json_string`, `update`, `validate` |
| `CompileConfig` | `fullgraph=True`, `dynamic=None`, `backend='inductor'`, `mode='reduce-overhead'`, `options=None` | `to_dict` |
| `AlternatingCodebooksLogitsProcessor` | `input_start_len`, `semantic_vocab_size`, `codebook_size` | `__call__` |
| `ClassifierFreeGuidanceLogitsProcessor` | `guidance_scale` | `__call__` |
| `EncoderNoRepeatNGramLogitsProcessor` | `encoder_ngram_size`, `encoder_input_ids` | `__call__` |
| `EncoderRepetitionPenaltyLogitsProcessor` | `penalty`, `encoder_input_ids` | `__call__` |
| `EpsilonLogitsWarper` | `epsilon`, `filter_value=-inf`, `min_tokens_to_keep=1` | `__call__` |
| `EtaLogitsWarper` | `epsilon`, `filter_value=-inf`, `min_tokens_to_keep=1`, `device='cpu'` | `__call__` |
| `ExponentialDecayLengthPenalty` | `exponential_decay_length_penalty`, `eos_token_id`, `input_ids_seq_length` | `__call__` |
| `ForcedBOSTokenLogitsProcessor` | `bos_token_id` | `__call__` |
| `ForcedEOSTokenLogitsProcessor` | `max_length`, `eos_token_id`, `device='cpu'` | `__call__` |
| `HammingDiversityLogitsProcessor` | `diversity_penalty`, `num_beams`, `num_beam_groups` | `__call__` |
| `InfNanRemoveLogitsProcessor` | `*args`, `**kwargs` | `__call__` |
| `LogitNormalization` | `*args`, `**kwargs` | `__call__` |
| `LogitsProcessor` | `*args`, `**kwargs` | `__call__` |
| `LogitsProcessorList` | `*args`, `**kwargs` | `__call__` |
| `MinLengthLogitsProcessor` | `min_length`, `eos_token_id`, `device='cpu'` | `__call__` |
| `MinNewTokensLengthLogitsProcessor` | `prompt_length_to_skip`, `min_new_tokens`, `eos_token_id`, `device='cpu'` | `__call__` |
| `MinPLogitsWarper` | `min_p`, `filter_value=-inf`, `min_tokens_to_keep=1` | `__call__` |
| `NoBadWordsLogitsProcessor` | `bad_words_ids`, `eos_token_id=None` |  |
| `NoRepeatNGramLogitsProcessor` | `ngram_size` | `__call__` |
| `PrefixConstrainedLogitsProcessor` | `prefix_allowed_tokens_fn`, `num_beams` | `__call__` |
| `RepetitionPenaltyLogitsProcessor` | `penalty`, `prompt_ignore_length=None` | `__call__` |
| `SequenceBiasLogitsProcessor` | `sequence_bias` | `__call__` |
| `SuppressTokensAtBeginLogitsProcessor` | `begin_suppress_tokens`, `begin_index`, `device='cpu'` | `__call__`, `set_begin_index` |
| `SuppressTokensLogitsProcessor` | `suppress_tokens`, `device='cpu'` | `__call__` |
| `SynthIDTextWatermarkLogitsProcessor` | `ngram_len`, `keys`, `sampling_table_size`, `sampling_table_seed`, `context_history_size`, `device`, `skip_first_ngram_calls=False`, `debug_mode=False` | `__call__`, `accumulate_hash`, `compute_context_repetition_mask`, `compute_eos_token_mask`, `compute_g_values`, `compute_ngram_keys`, `expected_mean_g_value`, `sample_g_values`, `update_scores` |
| `TemperatureLogitsWarper` | `temperature` | `__call__` |
| `TopKLogitsWarper` | `top_k`, `filter_value=-inf`, `min_tokens_to_keep=1` | `__call__` |
| `TopPLogitsWarper` | `top_p`, `filter_value=-inf`, `min_tokens_to_keep=1` | `__call__` |
| `TypicalLogitsWarper` | `mass=0.9`, `filter_value=-inf`, `min_tokens_to_keep=1` | `__call__` |
| `UnbatchedClassifierFreeGuidanceLogitsProcessor` | `guidance_scale`, `model`, `unconditional_ids=None`, `unconditional_attention_mask=None`, `use_cache=True` | `__call__`, `get_unconditional_logits` |
| `WhisperTimeStampLogitsProcessor` | `generate_config`, `begin_index=None`, `_detect_timestamp_from_logprob=None` | `__call__`, `set_begin_index` |
| `WatermarkLogitsProcessor` | `vocab_size`, `device`, `greenlist_ratio=0.25`, `bias=2.0`, `hashing_key=15485863`, `seeding_scheme='lefthash'`, `context_width=1` | `__call__`, `set_seed` |
| `StoppingCriteria` | `*args`, `**kwargs` | `__call__` |
| `StoppingCriteriaList` | `*args`, `**kwargs` | `__call__` |
| `MaxLengthCriteria` | `max_length`, `max_position_embeddings=None` | `__call__` |
| `MaxTimeCriteria` | `max_time`, `initial_timestamp=None` | `__call__` |
| `StopStringCriteria` | `tokenizer`, `stop_strings` | `__call__`, `clean_and_embed_tokens_with_cache`, `clean_tokenizer_vocab` |
| `EosTokenCriteria` | `eos_token_id` | `__call__` |
| `Constraint` |  | `advance`, `copy`, `does_advance`, `remaining`, `reset`, `test`, `update` |
| `PhrasalConstraint` | `token_ids` | `advance`, `copy`, `does_advance`, `remaining`, `reset`, `test`, `update` |
| `DisjunctiveConstraint` | `nested_token_ids` | `advance`, `copy`, `does_advance`, `remaining`, `reset`, `test`, `update` |
| `ConstraintListState` | `constraints` | `add`, `advance`, `copy`, `get_bank`, `init_state`, `reset` |
| `BeamScorer` | `*args`, `**kwargs` | `finalize`, `process` |
| `BeamSearchScorer` | `batch_size`, `num_beams`, `device`, `length_penalty=1.0`, `do_early_stopping=False`, `num_beam_hyps_to_keep=1`, `num_beam_groups=1`, `max_length=None` | `finalize`, `process` |
| `ConstrainedBeamSearchScorer` | `batch_size`, `num_beams`, `constraints`, `device`, `length_penalty=1.0`, `do_early_stopping=False`, `num_beam_hyps_to_keep=1`, `num_beam_groups=1`, `max_length=None` | `check_completes_constraints`, `finalize`, `make_constraint_states`, `process`, `step_sentence_constraint` |
| `TextStreamer` | `tokenizer`, `skip_prompt=False`, `**decode_kwargs` | `end`, `on_finalized_text`, `put` |
| `TextIteratorStreamer` | `tokenizer`, `skip_prompt=False`, `timeout=None`, `**decode_kwargs` | `end`, `on_finalized_text`, `put` |
| `AsyncTextIteratorStreamer` | `tokenizer`, `skip_prompt=False`, `timeout=None`, `**decode_kwargs` | `end`, `on_finalized_text`, `put` |
| `Cache` |  | `get_max_cache_shape`, `get_seq_length`, `get_usable_length`, `reorder_cache`, `update` |
| `CacheConfig` | `cache_implementation` | `from_dict`, `to_dict`, `to_json_file`, `to_json_string`, `update` |
| `QuantizedCacheConfig` | `backend='quanto'`, `nbits=4`, `axis_key=0`, `axis_value=0`, `q_group_size=64`, `residual_length=128`, `compute_dtype=torch.float16`, `device='cpu'` | `from_dict`, `to_dict`, `to_json_file`, `to_json_string`, `update`, `validate` |
| `DynamicCache` | `_distributed_cache_data=None` | `batch_repeat_interleave`, `batch_select_indices`, `batch_split`, `crop`, `from_batch_splits`, `from_legacy_cache`, `get_max_cache_shape`, `get_seq_length`, `get_usable_length`, `reorder_cache`, `to_legacy_cache`, `update` |
| `QuantizedCache` | `cache_config` | `batch_repeat_interleave`, `batch_select_indices`, `batch_split`, `crop`, `from_batch_splits`, `from_legacy_cache`, `get_max_cache_shape`, `get_seq_length`, `get_usable_length`, `reorder_cache`, `to_legacy_cache`, `update` |
| `QuantoQuantizedCache` | `cache_config` | `batch_repeat_interleave`, `batch_select_indices`, `batch_split`, `crop`, `from_batch_splits`, `from_legacy_cache`, `get_max_cache_shape`, `get_seq_length`, `get_usable_length`, `reorder_cache`, `to_legacy_cache`, `update` |
| `HQQQuantizedCache` | `cache_config` | `batch_repeat_interleave`, `batch_select_indices`, `batch_split`, `crop`, `from_batch_splits`, `from_legacy_cache`, `get_max_cache_shape`, `get_seq_length`, `get_usable_length`, `reorder_cache`, `to_legacy_cache`, `update` |
| `SinkCache` | `window_length`, `num_sink_tokens` | `get_max_cache_shape`, `get_seq_length`, `get_usable_length`, `reorder_cache`, `update` |
| `OffloadedCache` |  | `batch_repeat_interleave`, `batch_select_indices`, `batch_split`, `crop`, `evict_previous_layer`, `from_batch_splits`, `get_max_cache_shape`, `get_seq_length`, `get_usable_length`, `prefetch_layer`, `reorder_cache`, `update` |
| `StaticCache` | `config`, `max_batch_size`, `max_cache_len=None`, `device=None`, `dtype=torch.float32`, `layer_device_map=None` | `get_max_cache_shape`, `get_seq_length`, `get_usable_length`, `reorder_cache`, `reset`, `update` |
| `OffloadedStaticCache` | `config`, `max_batch_size`, `max_cache_len`, `device`, `dtype=None`, `offload_device=device(type='cpu')`, `layer_device_map=None` | `get_max_cache_shape`, `get_seq_length`, `get_usable_length`, `reorder_cache`, `reset`, `update` |
| `HybridCache` | `config`, `max_batch_size`, `max_cache_len=None`, `device=None`, `dtype=torch.float32`, `layer_device_map=None` | `get_max_cache_shape`, `get_seq_length`, `get_usable_length`, `reorder_cache`, `reset`, `update` |
| `SlidingWindowCache` | `config`, `max_batch_size`, `max_cache_len=None`, `device=None`, `dtype=torch.float32`, `layer_device_map=None` | `get_max_cache_shape`, `get_seq_length`, `get_usable_length`, `reorder_cache`, `reset`, `update` |
| `EncoderDecoderCache` | `self_attention_cache`, `cross_attention_cache` | `batch_repeat_interleave`, `batch_select_indices`, `batch_split`, `check_dynamic_cache`, `crop`, `from_batch_splits`, `from_legacy_cache`, `get_max_cache_shape`, `get_seq_length`, `get_usable_length`, `reorder_cache`, `reset`, `to_legacy_cache`, `update` |
| `MambaCache` | `config`, `max_batch_size`, `dtype=torch.float16`, `device=None` | `reset`, `update_conv_state`, `update_ssm_state` |
| `WatermarkDetector` | `model_config`, `device`, `watermarking_config`, `ignore_repeated_ngrams=False`, `max_cache_size=128` | `__call__` |
| `BayesianDetectorConfig` | `watermarking_depth=None`, `base_rate=0.5`, `**kwargs` | `set_detector_information` |
| `BayesianDetectorModel` | `config` | `config_class`, `forward` |
| `SynthIDTextWatermarkDetector` | `detector_module`, `logits_processor`, `tokenizer` | `__call__` |
"""  # noqa: E501 - lines of a table
ROWS: dict[str, tuple[list[str], list[str]]] = {}
for _line in REFERENCE.strip().splitlines():
    _name, _parameters, _methods = (re.findall(r"`([^`]+)`", cell) for cell in _line.split("|")[1:4])
    ROWS[_name[0]] = (_parameters, _methods)
# Inherited from the standard library's list, or taken to be anything: the names say nothing about arguments.
ANYTHING = ["*args", "**kwargs"]
# What the reference requires and we do not: code written for it runs all the same.
OPTIONAL_HERE = {("PrefixConstrainedLogitsProcessor", "num_beams")}


# --- names --------------------------------------------------------------------------------------------------


def test_the_list_is_what_can_be_imported() -> None:
    assert len(set(unspool.__all__)) == len(unspool.__all__)
    for name in unspool.__all__:
        assert getattr(unspool, name) is not None
    found: dict[str, Any] = {}
    exec("from unspool import *", found)  # what a star import gives
    assert {name for name in found if name != "__builtins__"} == set(unspool.__all__)


def test_every_name_of_the_reference_is_there() -> None:
    assert len(ROWS) == 75
    assert set(ROWS) <= set(unspool.__all__)


def test_every_error_is_public_and_one_of_ours() -> None:
    from unspool import errors

    own = (value for value in vars(errors).values() if isinstance(value, type))
    defined = {value.__name__ for value in own if value.__module__ == errors.__name__}
    assert defined <= set(unspool.__all__)
    for name in defined:
        assert issubclass(getattr(unspool, name), unspool.UnspoolError)


# --- signatures ---------------------------------------------------------------------------------------------


def show(parameter: inspect.Parameter) -> str:
    """A parameter as the table writes it."""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    default = "" if parameter.default is inspect.Parameter.empty else f"={parameter.default!r}"
    return f"{stars}{parameter.name}{default}"


@pytest.mark.parametrize("name", ROWS)
def test_constructors_are_the_references(name: str) -> None:
    expected, _ = ROWS[name]
    kind = getattr(unspool, name)
    if expected == ANYTHING:
        if not inspect.isabstract(kind):
            kind()  # works without arguments, as there
        return
    parameters = list(inspect.signature(kind).parameters.values())
    if name.startswith("Generate") and name.endswith("Output"):
        assert all(parameter.default is None for parameter in parameters)
        assert [parameter.name for parameter in parameters][: len(expected)] == expected
        return
    own = [parameter for parameter in parameters if parameter.kind is not inspect.Parameter.KEYWORD_ONLY]
    shown = [parameter.name if (name, parameter.name) in OPTIONAL_HERE else show(parameter) for parameter in own]
    assert shown == expected
    extra = [parameter for parameter in parameters if parameter.kind is inspect.Parameter.KEYWORD_ONLY]
    assert all(parameter.default is not inspect.Parameter.empty for parameter in extra)  # ours must be optional


@pytest.mark.parametrize("name", ROWS)
def test_methods_are_there(name: str) -> None:
    kind = getattr(unspool, name)
    missing = [method for method in ROWS[name][1] if not callable(getattr(kind, method, None))]
    assert missing == []


def test_generate_takes_what_the_reference_takes() -> None:
    parameters = list(inspect.signature(unspool.generate).parameters)
    assert parameters == [
        "model",
        "inputs",
        "generation_config",
        "logits_processor",
        "stopping_criteria",
        "prefix_allowed_tokens_fn",
        "synced_gpus",
        "assistant_model",
        "streamer",
        "negative_prompt_ids",
        "negative_prompt_attention_mask",
        "use_model_defaults",
        "custom_generate",
        "kwargs",
    ]


@pytest.mark.parametrize("name", [name for name in unspool.__all__ if not name.startswith("__")])
def test_every_public_name_says_what_it_is(name: str) -> None:
    text = inspect.getdoc(getattr(unspool, name))
    assert text and text.splitlines()[0].endswith((".", ":"))


# --- what importing costs -----------------------------------------------------------------------------------


def run_python(code: str) -> str:
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_importing_everything_is_quick_and_light() -> None:
    """Under two seconds beyond torch's own import, and nothing heavy that nobody asked for."""
    code = (
        "import sys, time, torch; begun = time.process_time();"
        "import unspool; [getattr(unspool, name) for name in unspool.__all__];"
        "print(time.process_time() - begun);"
        "print(sorted({'transformers', 'huggingface_hub', 'gguf', 'requests', 'pandas', 'scipy'} & set(sys.modules)))"
    )
    seconds = []
    for _ in range(3):  # the best of three: the machine is shared
        spent, heavy = run_python(code).splitlines()
        assert heavy == "[]"
        seconds.append(float(spent))
        if seconds[-1] < 2:
            break
        time.sleep(0.5)
    assert min(seconds) < 2


# --- what the source may not do -----------------------------------------------------------------------------


@lru_cache
def list_imports() -> list[tuple[str, str]]:
    found = [(path, one.module) for path, imports in read_imports().items() for one in imports]
    for path, tree in parse_files(r"\b(import_module|__import__)\b"):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                called = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
                if called in ("import_module", "__import__") and node.args and isinstance(node.args[0], ast.Constant):
                    found.append((path, str(node.args[0].value)))
    return found


def test_the_source_is_read() -> None:
    assert len(read_imports()) > 40 and ("plan/lengths.py", "unspool.errors") in list_imports()


def test_transformers_is_imported_only_by_its_adapter() -> None:
    users = {path for path, module in list_imports() if module.split(".")[0] == "transformers"}
    assert {path for path in users if not path.startswith("models/adapters/")} == set()


def is_confined(path: str) -> bool:
    """Whether a file is the program that reads pickles in a process of its own."""
    return path == "loading/pickled_program.py"


def reads_no_objects(call: ast.Call) -> bool:
    """Whether a call of numpy's reader says that it takes no pickle."""
    return any(
        one.arg == "allow_pickle" and isinstance(one.value, ast.Constant) and one.value.value is False
        for one in call.keywords
    )


def test_nothing_is_unpickled_or_evaluated() -> None:
    forbidden_modules = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib", "code"}
    assert [(path, module) for path, module in list_imports() if module.split(".")[0] in forbidden_modules] == []
    bad = []
    for path, tree in parse_files(r"\b(eval|exec|__import__)\b|(?<!\.)\bcompile\b|\.\s*(load|save|system)\b"):
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or reads_no_objects(node) or is_confined(path):
                continue
            if isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec", "compile", "__import__"):
                bad.append((path, node.lineno, node.func.id))
            if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
                name = f"{node.func.value.id}.{node.func.attr}"
                if name in ("torch.load", "numpy.load", "np.load", "torch.save", "os.system", "yaml.load"):
                    bad.append((path, node.lineno, name))
    assert bad == []


def test_options_are_not_promised_for_later() -> None:
    marks = re.compile(r"#.*\b(TODO|FIXME|XXX)\b")
    bad = [path for path, text in read_texts().items() if marks.search(text)]
    assert bad == []
