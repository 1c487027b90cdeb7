"""A pass over packed keys in one call of the CPU library, against the same pass made of torch's operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from unspool.cache import Cache
from unspool.errors import SettingError
from unspool.kernels.cpu import find_library, why_missing
from unspool.kernels.cpu.structures import describe_packed
from unspool.kernels.packing import Packed, Scheme
from unspool.models.decoder.model import Decoder
from unspool.models.paths.library import LibraryPath
from unspool.models.registry import build_model
from unspool.models.weights import MemorySource
from unspool.protocols import Forward, Want

pytestmark = pytest.mark.skipif(find_library() is None, reason=f"no CPU library: {why_missing()}")

KINDS = ["quantized", "quantized_static", "quantized_hybrid"]


def make_model(width: int = 16, kv_heads: int = 2, share: int = 2, window: int | None = None, **more: Any) -> Decoder:
    """A random Llama, or a Mistral where there is a window."""
    hidden, heads, ffn = 32, kv_heads * share, 32
    name = "Llama" if window is None else "Mistral"
    config = {
        "model_type": name.lower(),
        "architectures": [f"{name}ForCausalLM"],
        "vocab_size": 64,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": width,
        "max_position_embeddings": 512,
        "sliding_window": window,
        **more,
    }
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    weights = {"model.embed_tokens.weight": draw(64, hidden), "lm_head.weight": draw(64, hidden)}
    weights["model.norm.weight"] = torch.ones(hidden)
    for layer in range(2):
        at = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{at}{norm}.weight"] = torch.ones(hidden)
        shapes = {"q": (heads * width, hidden), "k": (kv_heads * width, hidden), "v": (kv_heads * width, hidden)}
        for part, shape in {**shapes, "o": (hidden, heads * width)}.items():
            weights[f"{at}self_attn.{part}_proj.weight"] = draw(*shape)
        for part, shape in {"gate": (ffn, hidden), "up": (ffn, hidden), "down": (hidden, ffn)}.items():
            weights[f"{at}mlp.{part}_proj.weight"] = draw(*shape)
    model = build_model(config, MemorySource(weights))
    assert isinstance(model, Decoder)
    return take_all_passes(model)


def take_all_passes(model: Decoder) -> Decoder:
    """The model with a library that takes passes of any length: how many pay off differs between machines."""
    library = model.find_path("library")
    assert isinstance(library, LibraryPath)
    library.most_float = None
    return model


def fill(model: Decoder, cache: Cache, lengths: Sequence[int]) -> None:
    """Random keys and values, with channels that stand out, for rows of such lengths."""
    spec, most = model.spec, max(lengths)
    generator = torch.Generator().manual_seed(most)
    cache.attach(model._views)
    cache.begin(len(lengths), most, lengths)
    for layer in range(spec.num_layers):
        shape = (len(lengths), most, 2, spec.num_kv_heads, spec.head_dim)
        kv = torch.randn(shape, generator=generator)
        kv[..., 0] += 5
        cache.write(layer, kv)
    cache.end()


def run_both(model: Decoder, tokens: torch.Tensor, cache: Cache, **more: Any) -> tuple[Forward, Forward]:
    """A pass of the library, and the same one over a copy of the cache by operators."""
    other = cache.clone()
    made = model.forward(tokens, cache, **more)
    with model.without_paths("library"):
        return made, model.forward(tokens, other, **more)


def assert_close(made: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-5) -> None:
    assert float((made - expected).abs().max()) <= tolerance * max(1.0, float(expected.abs().max()))


def make_tokens(rows: int, length: int) -> torch.Tensor:
    return torch.randint(3, 60, (rows, length), generator=torch.Generator().manual_seed(rows + length))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "gemma2", "gemma3", "gpt2", "bloom"])
def test_passes_equal_those_of_operators(pair_of: Callable[[str], Any], name: str, kind: str) -> None:
    native = pair_of(name).native
    model = take_all_passes(Decoder(native.spec, native.weights, pair_of(name).config, native.device, native.dtype))
    for nbits, lengths in ((8, [30]), (4, [30, 9, 21]), (2, [13, 13])):
        config = {"nbits": nbits, "q_group_size": 4, "residual_length": 6}
        cache = model.new_cache(kind, len(lengths), 60, config=config)
        fill(model, cache, lengths)
        for num_new, counts in ((1, None), (1, None), (3, [3, 1, 2][: len(lengths)]), (1, None), (5, None)):
            for wanted in ("last",) if num_new == 1 else ("last", "all"):
                tokens, want = make_tokens(len(lengths), num_new), Want(logits=wanted)
                made, expected = run_both(model, tokens, cache, counts=counts, want=want)
                assert made.path == "library" and expected.path == "eager"
                for row in range(len(lengths)):
                    count = counts[row] if counts is not None and wanted == "all" else num_new
                    assert_close(made.logits[row, :count], expected.logits[row, :count])


@settings(max_examples=30)
@given(data=st.data())
def test_any_shape_and_scheme(data: st.DataObject) -> None:
    draw = data.draw
    window = draw(st.none() | st.integers(1, 150))
    model = make_model(
        draw(st.sampled_from([8, 16, 24, 32, 64, 80, 128])), draw(st.integers(1, 3)), draw(st.integers(1, 9)), window
    )
    lengths = draw(st.lists(st.integers(1, 220), min_size=1, max_size=3))
    config = {
        "backend": "unspool",
        "nbits": draw(st.sampled_from([2, 4, 8])),
        "axis_key": draw(st.sampled_from([0, 0, 1])),
        "axis_value": draw(st.sampled_from([0, 1, 1])),
        "q_group_size": draw(st.integers(1, 80) | st.sampled_from([16, 32, 64])),
        "residual_length": draw(st.integers(0, 40)),
        "compute_dtype": draw(st.sampled_from(["float16", "bfloat16", "float32"])),
    }
    kind = draw(st.sampled_from(KINDS))
    try:
        cache = model.new_cache(kind, len(lengths), 260, config=config)
        fill(model, cache, lengths)
    except SettingError as error:  # heads that have no even groups of that size
        assume("even groups" not in str(error))
        raise
    for num_new in draw(st.lists(st.integers(1, 6), min_size=1, max_size=2)):
        made, expected = run_both(model, make_tokens(len(lengths), num_new), cache, want=Want(logits="all"))
        assert made.path == "library"
        assert_close(made.logits, expected.logits)


@pytest.mark.parametrize("nbits", [2, 4, 8])
@pytest.mark.parametrize("width", [16, 64])
def test_a_row_alone_is_a_row_in_a_batch_bit_by_bit(nbits: int, width: int) -> None:
    library = find_library()
    assert library is not None
    model, lengths, before = make_model(width, 3, 3), [300, 7, 129, 1, 64], library.threads
    cache = model.new_cache("quantized", 5, 320, config={"nbits": nbits, "q_group_size": 16, "residual_length": 20})
    fill(model, cache, lengths)
    tokens = make_tokens(5, 5)
    alone = []
    for row in range(5):
        copied = cache.clone()
        copied.select_rows([row])
        passes = [model.forward(tokens[row : row + 1, i : i + 1], copied).logits[0] for i in range(3)]
        alone.append(torch.stack([*passes, model.forward(tokens[row : row + 1, 3:], copied).logits[0]]))
    try:
        for threads in (1, 2, 3):
            library.threads = threads
            copied = cache.clone()
            passes = [model.forward(tokens[:, i : i + 1], copied).logits for i in range(3)]
            together = torch.stack([*passes, model.forward(tokens[:, 3:], copied).logits], dim=1)
            assert all(torch.equal(together[row], alone[row]) for row in range(5))
    finally:
        library.threads = before


def test_every_instruction_set_reads_alike() -> None:
    library = find_library()
    assert library is not None
    model, before = make_model(64, 2, 3), library.instructions
    cache = model.new_cache("quantized", 2, 320, config={"nbits": 8})
    fill(model, cache, [310, 280])
    made = {}
    try:
        for name in library.available:
            library.use_instructions(name)
            made[name] = model.forward(make_tokens(2, 3), cache.clone(), want=Want(logits="all")).logits
    finally:
        library.use_instructions(before)
    for logits in made.values():
        assert_close(logits, made["plain"])


def test_windows_read_alike_wherever_they_have_slid_to() -> None:
    model = make_model(16, window=20)
    config = {"q_group_size": 4, "residual_length": 4}
    hybrid, plain = (model.new_cache(kind, 1, 200, config=config) for kind in ("quantized_hybrid", "quantized"))
    for cache in (hybrid, plain):
        fill(model, cache, [30])
    tokens = make_tokens(1, 120)
    for i in range(120):
        made, kept = (model.forward(tokens[:, i : i + 1], cache) for cache in (hybrid, plain))
        assert (made.path, kept.path) == ("library", "library")
        assert torch.equal(made.logits, kept.logits)
    assert hybrid._store._slider.bases[0] > 0


def test_a_pass_that_is_longer_than_the_recent_ones_have_room_for_takes_operators() -> None:
    model = make_model()
    cache = model.new_cache("quantized", 1, 200, config={"q_group_size": 8, "residual_length": 8})
    assert model.forward(make_tokens(1, 60), cache).path == "eager"
    assert model.forward(make_tokens(1, 9), cache).path == "library"


def test_drafts_are_tried_and_taken_back() -> None:
    model = make_model()
    config = {"q_group_size": 4, "residual_length": 4}
    cache = model.new_cache("quantized", 2, 200, config=config)
    fill(model, cache, [40, 31])
    expected = model.forward(make_tokens(2, 1), cache.clone()).logits
    cache.begin_trial()
    for num_new in (3, 9, 6):
        made, plain = run_both(model, make_tokens(2, num_new), cache, want=Want(logits="all"))
        assert made.path == "library"
        assert_close(made.logits, plain.logits)
    cache.truncate([40, 31])
    assert torch.equal(model.forward(make_tokens(2, 1), cache).logits, expected)


def test_sizes_are_checked_before_the_call() -> None:
    scheme = Scheme.of(16, 4, 8, True, torch.float16)
    packed = Packed.empty(scheme, 2, 3, 24, torch.device("cpu"))
    describe_packed(packed, 2, 3)
    wrong = [
        (packed, 3, 3),  # more rows than there are
        (packed, 2, 2),
        (Packed(scheme, packed.codes[:, :, :20], packed.scale, packed.zero), 2, 3),  # no whole blocks
        (Packed(scheme, packed.codes, packed.scale[:, :, :2], packed.zero), 2, 3),
        (Packed(scheme, packed.codes, packed.scale.float(), packed.zero.float()), 2, 3),
        (Packed(replace(scheme, nbits=8), packed.codes, packed.scale, packed.zero), 2, 3),
        (Packed(replace(scheme, width=32), packed.codes, packed.scale, packed.zero), 2, 3),
    ]
    for case in wrong:
        with pytest.raises(SettingError, match="packed as"):
            describe_packed(*case)
