"""Steps through torch.compile against the same steps operator by operator."""

from __future__ import annotations

import gc
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo

import unspool
from unspool import CompileConfig, GenerationConfig
from unspool.errors import InputError, SettingError, UnsupportedError
from unspool.kernels.cpu import find_library
from unspool.models.decoder.model import Decoder
from unspool.models.paths.compiled import explain_no_compile
from unspool.models.registry import build_model
from unspool.models.weights import MemorySource, WordEmbedding
from unspool.protocols import Want

TRACED = CompileConfig(backend="eager")  # traces as every backend does, and runs torch's operators
FAMILIES = [
    *("llama", "llama-yarn", "mistral", "qwen2-window", "qwen3", "gemma2", "gemma3", "gpt2-scaled-by-layer"),
    *("gpt_neox", "gptj", "opt-350m", "bloom-6-heads", "phi", "falcon-40b"),
]


@pytest.fixture(autouse=True)
def forget_graphs() -> Any:
    yield
    torch._dynamo.reset()


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the function that would be compiled as it is: what it computes is one thing, that torch traces it another."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def rebuild(pair: Any, **how: Any) -> Any:
    """The pair's native model, with no compiled steps that another test has made."""
    return build_model(pair.config, MemorySource(pair.weights), **how)


def shrink(pair: Any, **how: Any) -> Any:
    """The model with its first layer alone: tracing takes its time for every one."""
    config = {name: value for name, value in pair.config.items() if name != "layer_types"}
    weights = {name: tensor for name, tensor in pair.weights.items() if ".layers." not in name or ".layers.0." in name}
    return build_model({**config, "num_hidden_layers": 1}, MemorySource(weights), **how)


def make_tokens(rows: int, length: int) -> torch.Tensor:
    return torch.randint(3, 97, (rows, length), generator=torch.Generator().manual_seed(rows))


def read(model: Any, counts: list[int], kind: str = "dynamic") -> list[torch.Tensor]:
    """The logits of ragged prompts, three steps, a pass of drafts that is half taken back, and a last step."""
    tokens = make_tokens(2, 20)
    cache = model.new_cache(kind, 2, 24)
    passes = [model.forward(tokens[:, :7], cache, counts=counts)]
    passes += [model.forward(tokens[:, i : i + 1], cache) for i in range(7, 10)]
    passes.append(model.forward(tokens[:, 10:14], cache, counts=[4, 2], want=Want(logits="all")))
    passes[-1].logits = torch.cat((passes[-1].logits[0], passes[-1].logits[1, :2]))
    cache.truncate([length - 1 for length in cache.lengths])
    passes.append(model.forward(tokens[:, 14:15], cache))
    if isinstance(model, Decoder) and model.find_path("compiled") is not None:
        assert [made.path for made in passes[1:]] == ["compiled"] * 5
    return [made.logits for made in passes]


def assert_close(made: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(made, expected, strict=True):
        assert float((one - other).abs().max()) <= 3e-5 * max(1.0, float(other.abs().max()))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_steps_equal_those_of_operators(pair_of: Callable[[str], Any], name: str, kind: str) -> None:
    model = rebuild(pair_of(name))
    assert_close(read(model.compiled(TRACED), [7, 4], kind), read(model, [7, 4], kind))


@pytest.mark.parametrize("name", ["gemma3", "opt"])
def test_traced_steps_equal_those_of_operators(pair_of: Callable[[str], Any], name: str) -> None:
    """Layers with windows and without, and a table of positions."""
    model = rebuild(pair_of(name)) if name == "gemma3" else shrink(pair_of(name))
    assert_close(read(model.compiled(TRACED), [7, 4]), read(model, [7, 4]))


@pytest.mark.usefixtures("untraced")
def test_states_and_early_logits_come_with_a_step(pair_of: Callable[[str], Any]) -> None:
    model, want = rebuild(pair_of("llama")), Want(last_states=True, early=(0, 2))
    made = []
    for each in (model, model.compiled(TRACED)):
        cache = each.new_cache("dynamic", 2, 12)
        each.forward(make_tokens(2, 5), cache)
        forward = each.forward(make_tokens(2, 1), cache, want=want)
        made.append([forward.logits, forward.last_states, *forward.early_logits])
        shallow = each.forward(make_tokens(2, 1), cache, want=Want(exit_layer=1))
        made[-1].append(shallow.logits)
    assert forward.path == shallow.path == "compiled"
    assert_close(made[1], made[0])


def test_growing_texts_and_leaving_rows_are_not_compiled_anew(pair_of: Callable[[str], Any]) -> None:
    """One graph for a row alone, one for several: lengths and capacities change under them."""
    graphs: list[Any] = []

    def count(graph: Any, inputs: Any, **_: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = shrink(pair_of("llama-llama3-rope")).compiled(CompileConfig(backend=count))
    cache = model.new_cache("dynamic", 1, 8)
    model.forward(make_tokens(1, 7), cache)
    sizes = set()
    for _ in range(260):  # past the first stride of keys in view, and through several buffers
        assert model.forward(make_tokens(1, 1), cache).path == "compiled"
        sizes.add(cache.places().buffers[0].shape[1])
    assert len(sizes) > 1 and len(graphs) == 1
    cache = model.new_cache("dynamic", 5, 40)
    model.forward(make_tokens(5, 7), cache)
    for rows in (5, 4, 3, 2):
        cache.select_rows(range(rows))
        assert model.forward(make_tokens(rows, 1), cache).path == "compiled"
    assert len(graphs) <= 3


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"do_sample": True, "seed": 5, "num_return_sequences": 3},
        {"num_beams": 3},
        {"penalty_alpha": 0.6, "top_k": 3},
        {"dola_layers": "high"},
        {"guidance_scale": 1.5},
        {"prompt_lookup_num_tokens": 3},
        {"cache_implementation": "static"},
    ],
    ids=lambda settings: next(iter(settings), "greedy"),
)
def test_every_strategy_chooses_the_same_tokens(pair_of: Callable[[str], Any], settings: dict[str, Any]) -> None:
    model, ids = rebuild(pair_of("llama")), torch.tensor([[5, 6, 7, 5, 6], [0, 0, 9, 8, 9]])
    asked = {
        "attention_mask": (ids != 0).long(),
        "max_new_tokens": 8,
        "eos_token_id": None,
        "return_dict_in_generate": True,
        **settings,
    }
    plain = unspool.generate(model, ids, **asked)
    compiled = unspool.generate(model, ids, compile_config=TRACED, **asked)
    assert compiled.stats.path == "compiled"
    assert plain.stats.path != "compiled"
    assert compiled.sequences.tolist() == plain.sequences.tolist()


@pytest.mark.skipif(find_library() is None, reason="products of blocks are the library's")
def test_quantised_products_are_part_of_the_graph(pair_of: Callable[[str], Any]) -> None:
    model = shrink(pair_of("llama-tied-biased"), packing="int8")
    compiled = model.compiled(CompileConfig(backend="aot_eager"))
    made, expected = read(compiled, [7, 5]), read(model, [7, 5])
    for one, other in zip(made, expected, strict=True):
        assert float((one - other).abs().max()) <= 2e-2 * float(other.abs().max())  # activations are rounded to int8


@pytest.mark.usefixtures("untraced")
def test_what_a_compiled_step_cant_do_is_the_models_own_pass(pair_of: Callable[[str], Any]) -> None:
    model = rebuild(pair_of("llama")).compiled(TRACED)
    cache = model.new_cache("dynamic", 2, 12)
    prompt = model.forward(make_tokens(2, 5), cache)
    assert prompt.path != "compiled" and "5 tokens a row" in prompt.path_reason
    told = model.forward(make_tokens(2, 1), cache, want=Want(hidden_states=True))
    assert told.path != "compiled" and "hidden states" in told.path_reason
    cache = model.new_cache("sink", 2, 12, config={"window_length": 8, "num_sink_tokens": 2})
    model.forward(make_tokens(2, 4), cache)
    assert "SinkCache" in model.forward(make_tokens(2, 1), cache).path_reason


@pytest.mark.usefixtures("untraced")
def test_learned_positions_end(pair_of: Callable[[str], Any]) -> None:
    model = rebuild(pair_of("gpt2")).compiled(TRACED)
    cache = model.new_cache("dynamic", 1, 64)
    model.forward(make_tokens(1, 64), cache)
    with pytest.raises(InputError, match="position 64"):
        model.forward(make_tokens(1, 1), cache)


# --- what is asked for -----------------------------------------------------------------------------------
def stats_of(model: Any, **settings: Any) -> Any:
    given = {"max_new_tokens": 3, "eos_token_id": None, "return_dict_in_generate": True, **settings}
    return unspool.generate(model, [[5, 6, 7]], **given).stats


@pytest.mark.usefixtures("untraced")
def test_compile_true_leaves_alone_what_is_faster(pair_of: Callable[[str], Any]) -> None:
    model = rebuild(pair_of("llama"))
    assert model.fast_path == ("library" if find_library() is not None else None)
    if model.fast_path is not None:
        assert stats_of(model, compile=True).path == "library"
    half = rebuild(pair_of("llama"), dtype=torch.bfloat16)
    assert half.fast_path is None
    assert stats_of(half).path == "eager"
    assert stats_of(half, compile=True).path == "compiled"
    assert stats_of(half, compile=True, output_hidden_states=True).path == "eager"


@pytest.mark.usefixtures("untraced")
def test_who_asks_last_is_heard(pair_of: Callable[[str], Any]) -> None:
    model = rebuild(pair_of("llama"))
    model.generation_config = GenerationConfig(compile_config=TRACED)
    assert stats_of(model).path == "compiled"
    assert stats_of(model, disable_compile=True).path != "compiled"
    assert stats_of(model, compile=False).path != "compiled"
    model.generation_config = GenerationConfig(disable_compile=True)
    assert stats_of(model, compile_config=TRACED).path == "compiled"
    with pytest.raises(SettingError, match="`compile_config` asks for a compiled step and `disable_compile`=True"):
        stats_of(model, compile_config=TRACED, disable_compile=True)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"use_cache": False}, "use_cache"),
        ({"output_hidden_states": True}, "output_hidden_states"),
        ({"cache_implementation": "sink"}, "plain buffers"),
        ({"cache_implementation": "quantized"}, "plain buffers"),
    ],
)
def test_what_no_step_could_follow_is_refused(
    pair_of: Callable[[str], Any], settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(SettingError, match=f"`compile_config`, set in the call, .*{reason}"):
        stats_of(pair_of("llama").native, compile_config=TRACED, **settings)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (CompileConfig(backend="inductr"), "inductr.*not known to torch"),
        (CompileConfig(mode="fastest"), "fastest.*use one of default"),
        (CompileConfig(options={"no_such_thing": 1}), "no_such_thing"),
        (CompileConfig(fullgraph=1), "fullgraph=1"),
        (CompileConfig(dynamic="yes"), "dynamic='yes'"),
        (CompileConfig(backend=3), "backend=3"),
        (CompileConfig(options={1: 2}), "options"),
    ],
)
def test_arguments_are_checked_before_the_first_pass(
    pair_of: Callable[[str], Any], config: CompileConfig, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Decoder, "forward", None)
    with pytest.raises(SettingError, match=message):
        stats_of(pair_of("llama").native, compile_config=config)


def test_a_missing_compiler_is_told_before_the_first_pass(
    pair_of: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    def find_none(*_: Any, **__: Any) -> str:
        raise InvalidCxxCompiler

    model = rebuild(pair_of("llama"))
    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", find_none)
    monkeypatch.setattr(Decoder, "forward", None)
    with pytest.raises(UnsupportedError, match="no C\\+\\+ compiler here; install one"):
        stats_of(model, compile_config=CompileConfig())


def test_what_cant_be_compiled_is_refused(pair_of: Callable[[str], Any], golden_pair: Callable[[str], Any]) -> None:
    with pytest.raises(UnsupportedError, match="falcon rounds its position biases"):
        stats_of(pair_of("falcon-rw").native, compile_config=TRACED)
    with pytest.raises(UnsupportedError, match=r"`compile_config`, set in the call, .* t5 model can't be compiled"):
        stats_of(golden_pair("t5").native, compile_config=TRACED, decoder_start_token_id=0)


def test_words_of_a_gpu_are_refused(pair_of: Callable[[str], Any]) -> None:
    model = rebuild(pair_of("llama"))
    table = WordEmbedding(
        torch.zeros(4, 4, dtype=torch.int32), torch.zeros(4, 1, dtype=torch.int16), "int8", torch.float32
    )
    reason = explain_no_compile(model.spec, replace(model.weights, embedding=table))
    assert reason is not None and "quantize=None" in reason


def test_a_backend_that_fails_is_named(pair_of: Callable[[str], Any]) -> None:
    def fail(graph: Any, inputs: Any, **_: Any) -> Any:
        raise RuntimeError("no such luck")

    with pytest.raises(UnsupportedError, match=r"could not compile this step.*no such luck.*leave out compile_config"):
        stats_of(shrink(pair_of("llama")), compile_config=CompileConfig(backend=fail))


IN_A_PROCESS = """
import torch, unspool
from unspool.models.registry import build_model
from unspool.models.weights import MemorySource

torch.manual_seed(0)
sizes = {
    "model.embed_tokens": (97, 32), "lm_head": (97, 32), "model.norm": (32,),
    **{f"model.layers.0.{name}": size for name, size in {
        "input_layernorm": (32,), "post_attention_layernorm": (32,), "self_attn.q_proj": (32, 32),
        "self_attn.k_proj": (16, 32), "self_attn.v_proj": (16, 32), "self_attn.o_proj": (32, 32),
        "mlp.gate_proj": (64, 32), "mlp.up_proj": (64, 32), "mlp.down_proj": (32, 64),
    }.items()},
}
config = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 97, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}
model = build_model(config, MemorySource({f"{name}.weight": torch.randn(size) for name, size in sizes.items()}))
given = {"max_new_tokens": 12, "eos_token_id": None, "return_dict_in_generate": True}
plain = unspool.generate(model, [[5, 6, 7]], **given)
compiled_config = unspool.CompileConfig(options={"compile_threads": 1})
compiled = unspool.generate(model, [[5, 6, 7]], compile_config=compiled_config, **given)
assert compiled.stats.path == "compiled", compiled.stats
assert compiled.sequences.tolist() == plain.sequences.tolist()
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler")
def test_inductor_chooses_the_same_tokens() -> None:
    """In a process of its own: inductor's imports mind what others have imported before."""
    done = subprocess.run([sys.executable, "-c", IN_A_PROCESS], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.usefixtures("untraced")
def test_weights_are_freed_with_the_last_name_of_a_model(pair_of: Callable[[str], Any]) -> None:
    model = rebuild(pair_of("llama"))
    twin = model.compiled(TRACED)
    assert twin.compiled(TRACED) is twin and model.compiled(TRACED) is twin
    unspool.generate(model, make_tokens(2, 5), max_new_tokens=3, compile_config=TRACED)
    unspool.generate(model, make_tokens(2, 5), max_new_tokens=3, num_beams=2)
    weight = weakref.ref(model.weights.layers[0].qkv.weight)
    gc.collect()
    gc.disable()  # reference counts alone must do it
    try:
        del model
        assert weight() is not None
        del twin
        assert weight() is None
    finally:
        gc.enable()
