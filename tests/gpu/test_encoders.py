"""Encoders' passes on a GPU: attention over sources beside torch's, fused and captured passes beside the plain one.

The kernels run on a GPU, or slowly in Triton's interpreter, with `TRITON_INTERPRET=1`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.gpu.kernel_checks import DEVICE, HAS_GPU, IS_INTERPRETED, needs_gpu, pytestmark
from tests.gpu.test_captured_pairs import SHAPES, draw_sources, load

import unspool
from unspool.errors import SettingError
from unspool.protocols import Want

__all__ = ["pytestmark"]

IS_HOPPER = HAS_GPU and torch.cuda.get_device_capability() == (9, 0)
needs_copy_engine = pytest.mark.skipif(not IS_HOPPER and not IS_INTERPRETED, reason="needs a Hopper GPU")


@needs_copy_engine
@pytest.mark.parametrize("far", [0, 5, 128])
@pytest.mark.parametrize(
    ("tokens", "lengths"),
    [(40, None), (1, [1]), (64, [64, 33]), (150, [150, 97, 1]), (300, [7, 300]), *([(513, None)] if HAS_GPU else [])],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16] if HAS_GPU else [torch.float16], ids=str)
@pytest.mark.parametrize("width", [64, 128] if HAS_GPU else [64])
def test_attention_over_sources(
    dtype: torch.dtype, tokens: int, lengths: list[int] | None, far: int, width: int
) -> None:
    """Lengths around a program's share; keys beyond a row's length are not read into it."""
    from unspool.kernels.gpu.attention.prompt_attention import PromptTiling
    from unspool.kernels.gpu.attention.source_attention import SOURCES, attend_source, lay_out_biases

    rows, heads = len(lengths or [0]), 2
    qkv = torch.randn(rows, tokens, 3, heads, width, device=DEVICE).to(dtype)
    for row, length in enumerate(lengths or []):
        qkv[row, length:] = 100.0  # finite, and far from everything
    queries, keys, values = (part.transpose(1, 2) for part in qkv.unbind(2))
    counts = None if lengths is None else torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    biases = torch.randn(heads, 2 * far + 1, device=DEVICE) if far else None
    tiling = SOURCES if HAS_GPU else PromptTiling(16, 16, 4, 2, 128)
    tiles = None if biases is None else lay_out_biases(biases, tiling.keys)
    found = attend_source(queries, keys, values, 0.2, lengths=counts, biases=tiles, tiling=tiling)
    assert found.isfinite().all()
    place = torch.arange(tokens, device=DEVICE)
    mask = torch.zeros(rows, heads, tokens, tokens, dtype=torch.float64, device=DEVICE)
    if biases is not None:
        mask += biases[:, (place - place[:, None]).clamp(-far, far) + far]
    if counts is not None:
        mask = mask.masked_fill(~(place < counts[:, None])[:, None, None], -torch.inf)
    expected = F.scaled_dot_product_attention(queries.double(), keys.double(), values.double(), mask, scale=0.2)
    for row, length in enumerate(lengths or [tokens]):
        mine = expected[row, :, :length]
        assert (found[row, :, :length].double() - mine).norm() < 5e-3 * mine.norm()


def encode_plainly(model: Any, source: dict[str, torch.Tensor]) -> torch.Tensor:
    """The plain pass: torch's operators."""
    with model.without_paths("captured"):
        return encode(model, source)


def encode(model: Any, source: dict[str, torch.Tensor]) -> torch.Tensor:
    if "input_features" in source:
        return model.encode(None, embeds=source["input_features"].to(model.device)).states
    lengths = source["attention_mask"].sum(1).tolist()
    return model.encode(source["input_ids"].to(model.device), lengths).states


def take_real(states: torch.Tensor, source: dict[str, torch.Tensor]) -> torch.Tensor:
    """The states of real tokens."""
    if "input_features" in source:
        return states.flatten(0, 1)
    return states[source["attention_mask"].bool().to(states.device)]


@pytest.mark.parametrize("name", list(SHAPES))
def test_fused_passes_are_the_plain_one(name: str) -> None:
    """The body in float32, with lengths on the device, over padded sources."""
    from unspool.models.paths.captured_encoder import CapturedEncoder

    model = load(name, DEVICE.type)
    source = draw_sources(name, 3, 12)
    around = (model._encoder_positions, model._biases)
    work = CapturedEncoder(model.spec, model.weights, *around, DEVICE, torch.float32)
    expected = take_real(encode_plainly(model, source), source)
    if name == "whisper":
        found = work._run(source["input_features"].to(DEVICE), None)
    else:
        lengths = source["attention_mask"].sum(1).tolist()
        found = work._run(*work._lay_out(source["input_ids"].to(DEVICE), lengths, 16, False))[:, :12]
    torch.testing.assert_close(take_real(found, source), expected, atol=2e-5, rtol=2e-5)


@needs_gpu
@pytest.mark.parametrize("name", list(SHAPES))
def test_captured_passes(name: str) -> None:
    """First pass, capture and replays have the same bits, whatever stood in the graph's inputs between them, and are as
    near to float64's states as the plain pass."""
    model, exact = load(name, "cuda", torch.bfloat16), load(name, "cuda", torch.float64)
    for rows, length in [(1, 7), (3, 30), (2, 16)]:
        source, other = draw_sources(name, rows, length), draw_sources(name, rows, length - 1)
        first = encode(model, source)
        passes = [encode(model, given) for given in (source, other, source, other, source)]
        for one in (passes[0], passes[2], passes[4]):
            assert torch.equal(take_real(one, source), take_real(first, source))
        reference = take_real(encode_plainly(exact, source), source)
        plain, found = (
            float((take_real(states, source).double() - reference).norm() / reference.norm())
            for states in (encode_plainly(model, source), first)
        )
        assert found < 1.3 * plain + 1e-3
    assert model._encoder._graphs


@needs_gpu
def test_graphs_follow_weights_that_move() -> None:
    model = load("bart", "cuda", torch.bfloat16)
    source = draw_sources("bart", 2, 9)
    for _ in range(3):
        encode(model, source)
    layer = model.weights.encoder.layers[0]
    layer.up.weight.data = layer.up.weight * 2
    torch.testing.assert_close(
        take_real(encode(model, source), source),
        take_real(encode_plainly(model, source), source),
        atol=0.05,
        rtol=0.05,
    )


@needs_gpu
@pytest.mark.parametrize("name", list(SHAPES))
@pytest.mark.parametrize("num_first", [1, 4, 5])
def test_what_a_text_begins_with_is_captured(name: str, num_first: int) -> None:
    """Up to four tokens, in float32 as near to the plain pass as rounding is; keys too, which the next step reads."""
    model = load(name, "cuda")
    source = draw_sources(name, 3, 12)
    states = encode(model, source)
    lengths = [states.shape[1]] * 3 if name == "whisper" else source["attention_mask"].sum(1).tolist()
    ids = torch.randint(4, 97, (3, num_first + 1), device="cuda")

    def begin() -> tuple[Any, torch.Tensor]:
        cache = model.new_cache(rows=3, encoded=unspool.protocols.Encoded(states, lengths))
        first = model.forward(ids[:, :-1], cache)
        assert cache.lengths == [num_first] * 3
        return first, model.forward(ids[:, -1:], cache).logits

    with model.without_paths("captured"):
        first, following = begin()
    for _ in range(2):
        found, after = begin()
        assert found.path == ("captured" if num_first <= 4 else "eager")
        torch.testing.assert_close(found.logits, first.logits, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(after, following, atol=1e-4, rtol=1e-4)


@needs_gpu
def test_texts_without_sources_are_refused() -> None:
    model = load("bart", "cuda")
    states = encode(model, draw_sources("bart", 2, 9))
    cache = model.new_cache(rows=3, encoded=unspool.protocols.Encoded(states, [9, 9]))
    with pytest.raises(SettingError, match="sources for 2 rows and the forward pass has 3"):
        model.forward(torch.full((3, 1), 5, device="cuda"), cache)


@needs_gpu
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("name", ["bart", "t5", "whisper"])
def test_keys_by_one_product(name: str, rows: int) -> None:
    """All layers' at once, and layer by layer."""
    model = load(name, "cuda", torch.bfloat16)
    source = draw_sources(name, rows, 12)
    states = encode(model, source)
    lengths = [states.shape[1]] * rows if name == "whisper" else source["attention_mask"].sum(1).tolist()
    encoded = unspool.protocols.Encoded(states, lengths)
    assert model._stack_keys() is not None
    found = model.new_cache(rows=rows, encoded=encoded).cross_attention_cache
    for cross in model.weights.decoder.crosses:
        cross.kv.weight = cross.kv.weight.clone()
    assert model._stack_keys() is None
    expected = model.new_cache(rows=rows, encoded=encoded).cross_attention_cache
    for one, two in zip(found, expected, strict=True):
        for part, other in zip(one, two, strict=True):
            torch.testing.assert_close(part, other[:, :, : part.shape[2]], atol=0.02, rtol=0.02)


WIDE: dict[str, tuple[str, dict[str, Any]]] = {  # heads of 64 numbers, and products of whole tiles
    "bart": ("BartForConditionalGeneration", {"d_model": 256, "encoder_ffn_dim": 512, "decoder_ffn_dim": 512}),
    "m2m_100": ("M2M100ForConditionalGeneration", {"d_model": 256, "encoder_ffn_dim": 512, "decoder_ffn_dim": 512}),
    "t5": ("T5ForConditionalGeneration", {"d_model": 256, "d_kv": 64, "d_ff": 384, "feed_forward_proj": "gated-gelu"}),
    "whisper": (
        "WhisperForConditionalGeneration",
        {"d_model": 256, "num_mel_bins": 16, "max_source_positions": 150, "max_target_positions": 64},
    ),
}


def make_wide(name: str) -> Any:
    """A function that builds a model of two layers and some heads of 64 numbers, in a dtype."""
    transformers = pytest.importorskip("transformers")
    from unspool.models.registry import build_model
    from unspool.models.weights import MemorySource

    kind, sizes = WIDE[name]
    common = {"vocab_size": 200, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
    if name == "t5":
        common |= {"num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
    else:
        common |= {f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers",)}
        common |= {f"{side}_attention_heads": 4 for side in ("encoder", "decoder")}
        common |= {"init_std": 0.1}
    config = getattr(transformers, kind.replace("ForConditionalGeneration", "Config"))(**{**common, **sizes})
    torch.manual_seed(3)
    weights = getattr(transformers, kind)(config).bfloat16().state_dict()
    told = {**config.to_dict(), "architectures": [kind]}
    return lambda dtype: build_model(told, MemorySource(weights), device=DEVICE, dtype=dtype)


def draw_wide(name: str, rows: int, length: int) -> dict[str, torch.Tensor]:
    if name == "whisper":
        return {"input_features": torch.randn(rows, 16, 300)}
    mask = (torch.arange(length) <= torch.randint(1, length, (rows, 1))).long()
    return {"input_ids": torch.randint(4, 197, (rows, length)), "attention_mask": mask}


@needs_gpu
@pytest.mark.parametrize("name", list(WIDE))
def test_wide_encoders(name: str) -> None:
    """As near to float64's states as the plain pass, over lengths beyond the biases' reach."""
    build = make_wide(name)
    model, exact = build(torch.bfloat16), build(torch.float64)
    for rows, length in [(1, 64), (3, 300), (2, 33)]:
        source = draw_wide(name, rows, length)
        reference = take_real(encode_plainly(exact, source), source)
        plain = float((take_real(encode_plainly(model, source), source) - reference).norm() / reference.norm())
        for _ in range(3):
            found = take_real(encode(model, source), source)
            assert (found - reference).norm() < (1.3 * plain + 1e-3) * reference.norm()
    assert model._encoder._graphs


@needs_gpu
@pytest.mark.parametrize("rows", [2, 5, 16, 40])
@pytest.mark.parametrize("name", list(WIDE))
def test_wide_steps_of_several_rows(name: str, rows: int) -> None:
    """Logits and states beside float64's, as near as torch's operators are."""
    build, source = make_wide(name), draw_wide(name, rows, 30)
    ids = torch.randint(4, 197, (rows, 20), device=DEVICE)

    def read(dtype: torch.dtype, path: str) -> torch.Tensor:
        model = build(dtype)
        states = encode_plainly(model, source)
        lengths = [states.shape[1]] * rows if name == "whisper" else source["attention_mask"].sum(1).tolist()
        cache = model.new_cache(rows=rows, encoded=unspool.protocols.Encoded(states, lengths))
        model.forward(ids[:, :-1], cache)
        with model.without_paths(*(["captured"] if path == "eager" else [])):
            forward = model.forward(ids[:, -1:], cache, want=Want(last_states=True))
        assert forward.path == path
        return torch.cat((forward.logits.double(), forward.last_states[:, 0].double()), dim=1)

    exact = read(torch.float64, "eager")
    found, plain = (float((read(torch.bfloat16, path) - exact).norm() / exact.norm()) for path in ("captured", "eager"))
    assert found < 1.3 * plain + 1e-3
