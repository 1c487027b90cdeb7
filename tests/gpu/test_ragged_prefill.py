"""Prompts of different lengths on a GPU: real tokens alone beside filled rows, torch's kernel beside its definition."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from tests.conformance.cases import GOLDENS

import unspool
from unspool.decoding import reader as reader_module
from unspool.kernels import ragged as ragged_module
from unspool.kernels.ragged import Ragged, attend_ragged, find_flash, has_flash
from unspool.protocols import Want

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FAMILIES = ("llama", "gemma2", "mistral", "qwen3", "bloom", "gpt2", "opt", "phi")
COUNTS = [[300, 20, 120, 1], [70, 0, 200, 33]]  # prompts, then what follows them: one row reads nothing
needs_kernel = pytest.mark.skipif(
    not torch.cuda.is_available() or not has_flash(torch.device("cuda"), torch.bfloat16, 64),
    reason="this torch has no attention for ragged rows that takes a scale and windows",
)


@lru_cache(maxsize=16)
def load(name: str) -> Any:
    return unspool.load(GOLDENS / "models" / name, device="cuda", dtype=torch.float32).model


@lru_cache(maxsize=8)
def make_model(dtype: torch.dtype = torch.bfloat16, window: int | None = None) -> Any:
    """A small model whose heads torch's kernel takes; random weights."""
    from unspool.models.registry import build_model
    from unspool.models.weights import MemorySource

    hidden, ffn, kv, layers, vocab = 256, 512, 128, 3, 500
    generator = torch.Generator().manual_seed(3)

    def random(*size: int) -> torch.Tensor:
        return (torch.randn(*size, generator=generator) * 0.06).to(dtype)

    weights = {"model.embed_tokens.weight": random(vocab, hidden), "model.norm.weight": torch.ones(hidden, dtype=dtype)}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        for name, size in {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (ffn, hidden),
            "mlp.up_proj": (ffn, hidden),
            "mlp.down_proj": (hidden, ffn),
        }.items():
            weights[f"{at}{name}.weight"] = random(*size)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{at}{name}.weight"] = torch.ones(hidden, dtype=dtype)
    config = {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "sliding_window": window,
        "tie_word_embeddings": True,
    }
    model = build_model(config, MemorySource(weights))
    return model.to("cuda", dtype)


def make_tokens(rows: int, num_new: int, most: int = 90) -> torch.Tensor:
    return torch.randint(3, most, (rows, num_new), generator=torch.Generator().manual_seed(1)).cuda()


def read(model: Any, counts: list[list[int]], kind: str = "dynamic") -> list[torch.Tensor]:
    """The logits of passes over rows of one cache, of rows that read something, and of a step after them."""
    rows = len(counts[0])
    cache, made = model.new_cache(kind, rows, 512), []
    for real in counts:
        made.append(model.forward(make_tokens(rows, max(real)), cache, counts=real).logits[[n > 0 for n in real]])
    return [*made, model.forward(make_tokens(rows, 1), cache).logits]


def both_ways(model: Any, passes: Callable[[], list[torch.Tensor]], bound: float) -> None:
    made = []
    try:
        for model.flattens_rows in (False, True):
            made.append(passes())
    finally:
        model.flattens_rows = None
    for filled, flat in zip(*made, strict=True):
        assert filled.shape == flat.shape
        assert float((filled - flat).abs().max()) <= bound * max(1.0, float(filled.abs().max()))


@pytest.mark.parametrize("kind", ["dynamic", "static", "offloaded", "quantized_static"])
@pytest.mark.parametrize("name", FAMILIES)
def test_flat_passes_equal_filled_ones(name: str, kind: str) -> None:
    model = load(name)
    longest = min(model.info.max_context or 512, 512) // 2 - 8
    counts = [[max(min(n, 1), n * longest // 300) for n in real] for real in COUNTS]
    both_ways(model, lambda: read(model, counts, kind), 2e-5)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype: torch.dtype, window: int | None) -> None:
    model = make_model(dtype, window)
    both_ways(model, lambda: read(model, COUNTS), 0.03)


def test_a_row_alone_is_a_row_in_a_batch() -> None:
    model, counts, tokens = make_model(), [300, 20, 120, 64], make_tokens(4, 300)
    model.flattens_rows = True
    try:
        together = model.forward(tokens, model.new_cache("dynamic", 4), counts=counts).logits
    finally:
        model.flattens_rows = None
    for row, count in enumerate(counts):
        alone = model.forward(tokens[row : row + 1, :count], model.new_cache("dynamic", 1)).logits[0]
        assert float((together[row] - alone).abs().max()) <= 0.03 * max(1.0, float(alone.abs().max()))


# --- the choice -----------------------------------------------------------------------------------------------


@pytest.fixture
def flash_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many queries each call of torch's kernel had."""
    seen: list[int] = []
    flash = find_flash()

    def call(queries: torch.Tensor, *rest: Any, **settings: Any) -> Any:
        assert flash is not None
        seen.append(len(queries))
        return flash(queries, *rest, **settings)

    monkeypatch.setattr(ragged_module, "find_flash", lambda: None if flash is None else call)
    return seen


@needs_kernel
def test_the_kernel_reads_ragged_prompts_and_later_parts(flash_calls: list[int]) -> None:
    model = make_model()
    cache, tokens = model.new_cache("dynamic", 2), make_tokens(2, 400)
    model.forward(tokens, cache, counts=[400, 50])
    assert flash_calls == [450] * model.info.num_layers
    model.forward(tokens[:, :300], cache)  # rows that hold something: filled, they would need a mask
    assert flash_calls[3:] == [600] * model.info.num_layers
    flash_calls.clear()
    model.forward(tokens, model.new_cache("dynamic", 2))  # equal rows that hold nothing are causal as they are
    assert not flash_calls


@needs_kernel
def test_the_host_waits_for_nothing() -> None:
    """A pass is launched without a word from the device: a wait would be an error here."""
    model, counts = make_model(), [300, 20, 120, 64]
    tokens = make_tokens(4, 300)
    cache = model.new_cache("dynamic", 4, 512)
    model.forward(tokens, cache, counts=counts)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model.forward(tokens[:, :200], cache, counts=[200, 10, 120, 64])
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 1, 33, 4000])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(8, 2, 64), (4, 4, 128), (6, 1, 80), (2, 1, 256)])
def test_the_kernel_beside_rows_read_one_by_one(
    heads: int, kv_heads: int, width: int, window: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts, counts, room = [0, 37, 5, 0, 600], [257, 128, 0, 1, 90], 704
    generator = torch.Generator("cuda").manual_seed(0)
    positions = torch.tensor(starts, device="cuda")[:, None] + torch.arange(max(counts), device="cuda")
    ragged = Ragged(starts, counts, positions)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, device="cuda", dtype=dtype, generator=generator)

    qkv = random(ragged.num_tokens, heads + 2 * kv_heads, width)  # queries are a part of what a product gives
    kv = random(len(starts), room, 2, kv_heads, width)
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        kv[row, start + count :] = torch.nan  # whoever reads past a row's end shows it
    keys, values = kv.unbind(2)
    scale = 0.7 * width**-0.5
    assert has_flash(qkv.device, dtype, width)
    read = attend_ragged(qkv[:, :heads], keys, values, ragged, scale=scale, window=window)
    monkeypatch.setattr(ragged_module, "find_flash", lambda: None)
    expected = attend_ragged(qkv[:, :heads].float(), keys.float(), values.float(), ragged, scale=scale, window=window)
    assert read.shape == expected.shape and not read.isnan().any()
    assert float((read.float() - expected).abs().max()) <= 0.02


# --- how much a pass reads ------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 40])
def test_prompts_read_in_parts(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, so that a sum of another order can't choose another token."""
    model, ids = make_model(torch.float32, window), make_tokens(5, 400)
    mask = torch.ones_like(ids)
    for row, pads in enumerate((0, 390, 120, 300, 0)):
        mask[row, :pads] = 0
    settings = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    whole = unspool.generate(model, input_ids=ids, pad_token_id=0, **settings)
    monkeypatch.setattr(reader_module, "MOST_TOKENS_OF_A_PASS", 256)
    assert torch.equal(unspool.generate(model, input_ids=ids, pad_token_id=0, **settings), whole)


def test_memory_of_a_prompt_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = make_model(), make_tokens(32, 512)

    def measure() -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        unspool.generate(model, input_ids=ids, max_new_tokens=1, do_sample=False, eos_token_id=None, pad_token_id=0)
        return torch.cuda.max_memory_allocated() - before

    measure()  # what is kept from the first call on
    whole = measure()
    monkeypatch.setattr(reader_module, "MOST_TOKENS_OF_A_PASS", 1024)
    keys = 32 * 576 * 3 * 2 * 2 * 64 * 2
    assert measure() - keys < 0.5 * (whole - keys)


def test_all_logits_and_last_states_are_filled() -> None:
    model, counts = load("llama"), [40, 9, 25]
    want, tokens = Want("all", last_states=True), make_tokens(3, 40)

    def passes() -> list[torch.Tensor]:
        made = model.forward(tokens, model.new_cache("dynamic", 3), counts=counts, want=want)
        real = [(row, place) for row, count in enumerate(counts) for place in range(count)]
        rows, places = (list(part) for part in zip(*real, strict=True))
        return [made.logits[rows, places], made.last_states[rows, places]]

    both_ways(model, passes, 2e-5)
