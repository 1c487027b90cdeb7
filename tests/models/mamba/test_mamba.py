"""Mamba against transformers: logits, states and tokens; ragged rows, dtypes, GGUF, and what is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers

import unspool
from unspool.cache import DynamicCache, MambaCache
from unspool.errors import InputError, LoadError, SettingError, UnsupportedError
from unspool.models.registry import build_model
from unspool.models.weights import MemorySource
from unspool.protocols import Want

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "state_size": 5,
    "num_hidden_layers": 3,
    "conv_kernel": 4,
    "time_step_rank": 3,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biased": {"use_bias": True, "use_conv_bias": False, "tie_word_embeddings": False, "conv_kernel": 3},
    "wide": {"expand": 3, "residual_in_fp32": False, "time_step_rank": "auto", "layer_norm_epsilon": 1e-3},
}
TOKENS = torch.randint(3, 97, (3, 90), generator=torch.Generator().manual_seed(0))  # longer than a chunk of the scan


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory, load_pair: Any) -> dict[str, Any]:
    def build(kind: str) -> Callable[[], Any]:
        return lambda: transformers.MambaForCausalLM(transformers.MambaConfig(**{**SIZES, **KINDS[kind]}))

    return {kind: load_pair(build(kind), tmp_path_factory.mktemp("mamba")) for kind in KINDS}


@pytest.fixture(params=list(KINDS))
def pair(request: pytest.FixtureRequest, pairs: dict[str, Any]) -> Any:
    return pairs[request.param]


@pytest.fixture
def plain(pairs: dict[str, Any]) -> Any:
    return pairs["plain"]


def gap(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours.float() - theirs.float()).abs().max() / theirs.abs().max().clamp(min=1))


# --- the same numbers as the reference ----------------------------------------------------------------------


@torch.no_grad()
def test_logits_hidden_states_and_states_equal_the_reference(pair: Any) -> None:
    theirs = pair.reference(TOKENS, output_hidden_states=True, use_cache=True)
    ours = pair.native(TOKENS, output_hidden_states=True)
    assert gap(ours.logits, theirs.logits) < 1e-5
    assert len(ours.hidden_states) == len(theirs.hidden_states) == 4
    for mine, other in zip(ours.hidden_states, theirs.hidden_states, strict=True):
        assert gap(mine, other) < 1e-5
    for layer in range(3):
        kept = theirs.cache_params.layers[layer]
        kernel = pair.native.spec.kernel_size
        assert gap(ours.cache_params.conv_states[layer][..., -kernel:], kept.conv_states[0][..., -kernel:]) < 1e-5
        assert gap(ours.cache_params.ssm_states[layer], kept.recurrent_states[0]) < 1e-5


def test_greedy_tokens_equal_the_references(pair: Any) -> None:
    mask = torch.ones(3, 12, dtype=torch.int64)
    mask[0, :5] = mask[1, :8] = 0
    ids = TOKENS[:, :12] * mask
    theirs = pair.reference.generate(ids, attention_mask=mask, max_new_tokens=25, do_sample=False)
    told = {"eos_token_id": 2, "pad_token_id": 0}
    ours = unspool.generate(pair.native, ids, attention_mask=mask, max_new_tokens=25, **told)
    assert ours.tolist() == theirs.tolist()


def test_the_number_of_parameters_is_the_references(pair: Any) -> None:
    assert pair.native.num_parameters() == pair.reference.num_parameters()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_stay_near(pairs: dict[str, Any], dtype: torch.dtype) -> None:
    """Rounding weights and activations costs what their digits say; the states stay in float32."""
    plain = pairs["plain"]
    exact = plain.native(TOKENS[:, :40]).logits
    narrow = build_model(plain.config, MemorySource(plain.weights), dtype=dtype)
    output = narrow(TOKENS[:, :40])
    assert output.logits.dtype == dtype
    assert output.cache_params.ssm_states.dtype == torch.float32 and output.cache_params.conv_states.dtype == dtype
    bound = 0.1 if dtype == torch.bfloat16 else 0.02
    assert 1e-5 < gap(output.logits, exact) < bound
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "mkldnn_matmul failed")  # their product says so on a CPU without bfloat16
        reference = transformers.MambaForCausalLM(plain.reference.config).to(dtype)
        reference.load_state_dict(plain.reference.state_dict())
        assert gap(output.logits, reference(TOKENS[:, :40]).logits) < bound
    step = narrow(TOKENS[:, 40:41], cache_params=output.cache_params)
    assert gap(step.logits, plain.native(TOKENS[:, :41]).logits[:, -1:]) < bound


def test_moving_to_another_dtype_keeps_the_recurrence_exact(plain: Any) -> None:
    model = build_model(plain.config, MemorySource(plain.weights)).to(torch.bfloat16)
    space = model.weights.layers[0].space
    assert space.decay.dtype == space.conv.dtype == torch.float32
    assert torch.equal(space.decay, plain.native.weights.layers[0].space.decay)
    assert model.weights.layers[0].out.weight.dtype == torch.bfloat16
    assert model.new_cache().dtype == torch.bfloat16


# --- rows of different lengths, and pieces of a text --------------------------------------------------------


def test_a_row_alone_is_a_row_in_a_batch(pair: Any) -> None:
    model, counts = pair.native, [70, 2, 41]
    cache = model.new_cache(rows=3)
    together = model.forward(TOKENS[:, :70], cache, counts=counts)
    assert cache.lengths == counts
    for row, count in enumerate(counts):
        own = model.new_cache()
        alone = model.forward(TOKENS[row : row + 1, :count], own)
        assert gap(together.logits[row], alone.logits[0]) < 1e-5
        assert gap(cache.conv_states[:, row], own.conv_states[:, 0]) < 1e-5
        assert gap(cache.ssm_states[:, row], own.ssm_states[:, 0]) < 1e-5


@pytest.mark.parametrize("sizes", [[90], [1] * 12, [3, 1, 60, 5, 1], [2, 2, 2]])
def test_pieces_of_a_text_are_the_whole(pair: Any, sizes: list[int]) -> None:
    model, cache, first = pair.native, pair.native.new_cache(rows=3), 0
    whole = model(TOKENS).logits
    for size in sizes:
        part = model.forward(TOKENS[:, first : first + size], cache, want=Want("all")).logits
        assert gap(part, whole[:, first : first + size]) < 1e-5
        first += size
    assert cache.lengths == [first] * 3


def test_a_row_may_read_nothing(plain: Any) -> None:
    model = plain.native
    for num_new in (1, 5):
        cache = model.new_cache(rows=2)
        model.forward(TOKENS[:2, :6], cache)
        before = cache.ssm_states[:, 0].clone(), cache.conv_states[:, 0].clone()
        model.forward(TOKENS[:2, 6 : 6 + num_new], cache, counts=[0, num_new])
        assert cache.lengths == [6, 6 + num_new]
        assert torch.equal(cache.ssm_states[:, 0], before[0]) and torch.equal(cache.conv_states[:, 0], before[1])


def test_embeddings_say_the_same_as_tokens(plain: Any) -> None:
    embeds = plain.native.get_input_embeddings()(TOKENS)
    assert gap(plain.native(inputs_embeds=embeds).logits, plain.native(TOKENS).logits) < 1e-6


# --- calling it ---------------------------------------------------------------------------------------------


def test_the_cache_goes_by_two_names(plain: Any) -> None:
    model = plain.native
    whole = model(TOKENS[:, :12]).logits
    for name in ("cache_params", "past_key_values"):
        cache = MambaCache(model.config, 3, dtype=model.dtype, device=model.device)
        first = model(TOKENS[:, :7], **{name: cache}, use_cache=True)
        assert first.cache_params is first.past_key_values is first["cache_params"] is cache
        rest = model(TOKENS[:, 7:12], **{name: cache})
        assert gap(torch.cat((first.logits, rest.logits), 1), whole) < 1e-5
    with pytest.raises(InputError, match="two names"):
        model(TOKENS, cache_params=cache, past_key_values=model.new_cache(rows=3))
    assert set(model(TOKENS, use_cache=False)) == {"logits"}
    assert isinstance(model(TOKENS, return_dict=False), tuple)


def test_padding_of_either_side_is_not_read(plain: Any) -> None:
    mask = torch.ones(3, 10, dtype=torch.int64)
    mask[0, :4] = 0
    mask[1, 6:] = 0
    output = plain.native(TOKENS[:, :10], mask, output_hidden_states=True)
    assert output.cache_params.lengths == [6, 6, 10]
    assert gap(output.logits[0, 4:], plain.native(TOKENS[:1, 4:10]).logits[0]) < 1e-5
    assert gap(output.logits[1, :6], plain.native(TOKENS[1:2, :6]).logits[0]) < 1e-5
    assert not output.hidden_states[0][0, :4].any()
    assert gap(plain.native(TOKENS[:, :10], mask, logits_to_keep=1).logits, output.logits[:, -1:]) < 1e-6


def test_the_states_that_the_head_reads(plain: Any) -> None:
    found = plain.native.forward(TOKENS, plain.native.new_cache(rows=3), want=Want(last_states=True))
    assert found.last_states.shape == (3, 90, 32)
    assert gap(plain.native.get_output_embeddings()(found.last_states[:, -1]), found.logits) < 1e-6


def test_what_it_refuses(plain: Any) -> None:
    model = plain.native
    with pytest.raises(UnsupportedError, match="attentions were requested"):
        model(TOKENS, output_attentions=True)
    with pytest.raises(UnsupportedError, match="attentions were requested"):
        model.forward(TOKENS, model.new_cache(rows=3), want=Want(attentions=True))
    with pytest.raises(UnsupportedError, match="DynamicCache, which holds keys"):
        model.forward(TOKENS, DynamicCache())
    with pytest.raises(SettingError, match=r"dtype=model\.dtype"):
        model(TOKENS, cache_params=MambaCache(model.config, 3))
    other = transformers.MambaConfig(**{**SIZES, "state_size": 7})
    with pytest.raises(SettingError, match="another model"):
        model(TOKENS, cache_params=MambaCache(other, 3, dtype=torch.float32))
    with pytest.raises(UnsupportedError, match="'static' cache holds keys"):
        model.new_cache("static")
    with pytest.raises(UnsupportedError, match="no encoder"):
        model.encode(TOKENS)
    with pytest.raises(InputError, match="vocabulary has 97"):
        model(TOKENS + 60)


def test_it_says_what_it_is(plain: Any) -> None:
    info = plain.native.info
    assert info.family == "mamba" and info.max_context is None and info.layer_kinds == ("state",) * 3
    assert info.can == {"early_logits", "hidden_states", "inputs_embeds", "last_states"}
    assert info.has_tied_embeddings and (info.bos_token_id, info.eos_token_id) == (1, 2)


# --- files --------------------------------------------------------------------------------------------------


def test_the_golden_model_and_the_first_name_of_embeddings(golden_pair: Callable[[str], Any]) -> None:
    pair = golden_pair("mamba")
    with torch.no_grad():
        theirs = pair.reference(TOKENS).logits
    assert gap(pair.native(TOKENS).logits, theirs) < 1e-5
    weights = dict(pair.weights)
    weights["backbone.embedding.weight"] = weights.pop("backbone.embeddings.weight")
    assert torch.equal(build_model(pair.config, MemorySource(weights))(TOKENS).logits, pair.native(TOKENS).logits)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"hidden_act": "mish"}, UnsupportedError, "mish"),
        ({"state_size": 6}, LoadError, "x_proj"),
        ({"conv_kernel": 1}, LoadError, "conv_kernel"),
        ({"time_step_rank": "automatic"}, LoadError, "time_step_rank"),
        ({"use_bias": True}, LoadError, "in_proj.bias"),
        ({"use_conv_bias": False}, LoadError, "no place for"),
        ({"num_hidden_layers": 2}, LoadError, "no place for"),
        ({"quantization_config": {"quant_method": "gptq"}}, UnsupportedError, "gptq"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_name(
    plain: Any, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        build_model({**plain.config, **changes}, MemorySource(plain.weights))


def write_gguf(pair: Any, path: Path, **more: Any) -> None:
    """The file that llama.cpp's converter makes of a Mamba."""
    config = pair.native.config
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_context_length(2**20)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_inner_size(config.intermediate_size)
    writer.add_ssm_state_size(config.state_size)
    writer.add_ssm_time_step_rank(config.time_step_rank)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    writer.add_ssm_dt_b_c_rms(more.get("dt_b_c_rms", False))
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MAMBA, config.num_hidden_layers)
    for name, weight in pair.weights.items():
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None
        kept = -weight.exp() if name.endswith("A_log") else weight.squeeze(1) if "conv1d.weight" in name else weight
        writer.add_tensor(found, kept.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_gives_the_same_logits(pairs: dict[str, Any], tmp_path: Path) -> None:
    pair = pairs["plain"]
    write_gguf(pair, tmp_path / "m.gguf")
    model = unspool.load(tmp_path / "m.gguf", device="cpu").model
    assert gap(model(TOKENS).logits, pair.native(TOKENS).logits) < 1e-5
    assert model.info.max_context is None and model.num_parameters() == pair.native.num_parameters()
    expected = unspool.generate(pair.native, TOKENS[:, :5], max_new_tokens=8)
    assert torch.equal(unspool.generate(model, TOKENS[:, :5], max_new_tokens=8, eos_token_id=2), expected)
    write_gguf(pair, tmp_path / "falcon.gguf", dt_b_c_rms=True)
    falcon = {**pair.config, "model_type": "falcon_mamba", "architectures": ["FalconMambaForCausalLM"]}
    expected = build_model({**falcon, "mixer_rms_eps": 1e-5}, MemorySource(pair.weights))(TOKENS).logits
    assert gap(unspool.load(tmp_path / "falcon.gguf", device="cpu").model(TOKENS).logits, expected) < 1e-5
