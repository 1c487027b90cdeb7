"""Encoder-decoders' captured steps: their attention kernels beside torch's, and every family's tokens beside a CPU's.

The kernels run on a GPU, or slowly in Triton's interpreter, with `TRITON_INTERPRET=1`.
"""

from __future__ import annotations

import tempfile
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gpu.kernel_checks import DEVICE, HAS_GPU, needs_gpu, pytestmark

import unspool
from unspool.kernels.attention import attend
from unspool.kernels.branched import attend_shared
from unspool.models.registry import build_model
from unspool.models.weights import MemorySource
from unspool.protocols import Want

__all__ = ["pytestmark"]

DTYPES = [torch.float32, torch.bfloat16] if HAS_GPU else [torch.float32]
SHAPES = {
    "t5": {"feed_forward_proj": "relu"},
    "t5-gated": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "umt5": {},
    "bart": {},
    "bart-scaled-untied": {"scale_embedding": True, "tie_word_embeddings": False},
    "mbart": {"scale_embedding": True, "activation_function": "relu"},
    "pegasus": {"scale_embedding": True},
    "marian": {"activation_function": "swish"},
    "m2m_100": {},
    "whisper": {},
}
# Matrices whose columns `few_product` can divide among warps.
WIDE = {
    "t5-wide": {"d_model": 128, "d_ff": 256, "num_heads": 4, "d_kv": 32, "feed_forward_proj": "relu"},
    "t5-gated-wide": {"d_model": 128, "d_ff": 384, "num_heads": 2, "d_kv": 64, "feed_forward_proj": "gated-gelu"},
    "bart-wide": {"d_model": 256, "decoder_ffn_dim": 512},
    "bart-long": {"d_model": 128, "decoder_ffn_dim": 3072},
    "pegasus-wide": {"d_model": 128, "decoder_ffn_dim": 128, "scale_embedding": True},
    "whisper-wide": {"d_model": 128, "decoder_ffn_dim": 256},
}
# Blocks that `resident` can run as one kernel.
HEADS = {"decoder_attention_heads": 8, "encoder_attention_heads": 8}
RESIDENT = {
    "bart-resident": {"d_model": 512, "decoder_ffn_dim": 2048, **HEADS},
    "marian-resident": {"d_model": 512, "decoder_ffn_dim": 1024, "activation_function": "swish", **HEADS},
    "pegasus-resident": {
        "d_model": 1024,
        "decoder_attention_heads": 16,
        "encoder_attention_heads": 16,
        "decoder_ffn_dim": 4096,
        "activation_function": "relu",
    },
    "whisper-resident": {
        "d_model": 1280,
        "decoder_attention_heads": 20,
        "encoder_attention_heads": 20,
        "decoder_ffn_dim": 5120,
    },
}
HOPPER = HAS_GPU and torch.cuda.get_device_capability() == (9, 0)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def check(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    error = (found.double() - expected).norm() / expected.norm()
    assert error < (1e-5 if dtype == torch.float32 else 8e-3), float(error)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", [[5], [200, 0, 64], [1, 333]], ids=str)
@pytest.mark.parametrize("tokens", [1, 5])
def test_cross_attention_is_the_plain_one(dtype: torch.dtype, lengths: list[int], tokens: int) -> None:
    from unspool.kernels.gpu.attention.cross_attention import CrossAttention
    from unspool.kernels.gpu.attention.split_attention import HeadShape

    heads, width, layers, room = 3, 40, 2, max(lengths) + 3
    buffers = [random(len(lengths), room, 2, heads, width, dtype=dtype) for _ in range(layers)]
    base = torch.zeros(8, dtype=dtype, device=DEVICE)
    unit = 8 * base.element_size()
    places = [(buffer.data_ptr() - base.data_ptr()) // unit for buffer in buffers]
    assert all((buffer.data_ptr() - base.data_ptr()) % unit == 0 for buffer in buffers)
    table = torch.tensor([*places, room, *lengths], dtype=torch.int64, device=DEVICE)
    kernel = CrossAttention(len(lengths), tokens, HeadShape(heads, heads, width), DEVICE)
    for layer in range(layers):
        queries = random(len(lengths) * tokens, heads * width, dtype=dtype)
        out = torch.full_like(queries, torch.nan)
        kernel(queries, out, base, table, layer, layers, 0.3)
        for source, length in enumerate(lengths):
            some = slice(source * tokens, (source + 1) * tokens)
            if not length:
                assert out[some].isnan().all()  # nobody reads it
                continue
            keys, values = buffers[layer][source : source + 1, :length].double().permute(2, 0, 3, 1, 4)
            by_head = queries[some].double().view(tokens, heads, 1, width)
            read, _ = attend_shared(by_head, keys, values, scale=0.3)
            check(out[some], read.transpose(1, 2).flatten(1), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", [[0], [3, 250, 70]], ids=str)
def test_biases_by_distance(dtype: torch.dtype, lengths: list[int]) -> None:
    from unspool.kernels.gpu.attention.split_attention import HeadShape
    from unspool.kernels.gpu.attention.step_attention import StepAttention

    heads, width, room, distances, rows = 3, 32, 256, 17, len(lengths)
    buffer = random(rows, room, 2, heads, width, dtype=dtype)
    qkv, biases = random(rows, 3 * heads * width, dtype=dtype), random(heads, distances)
    base = torch.zeros(8, dtype=dtype, device=DEVICE)
    table = [(buffer.data_ptr() - base.data_ptr()) // (8 * base.element_size()), room]
    kernel = StepAttention(rows, HeadShape(heads, heads, width), DEVICE, distances=distances)
    out = torch.full((rows, heads * width), torch.nan, dtype=dtype, device=DEVICE)
    kernel(
        qkv,
        out,
        base,
        torch.tensor(table, device=DEVICE),
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        0,
        1,
        scale=0.2,
        slopes=biases,
    )
    for row, length in enumerate(lengths):
        query, key, value = qkv[row].view(3, heads, width).unbind(0)
        assert torch.equal(buffer[row, length], torch.stack((key, value)))
        keys, values = buffer[row : row + 1, : length + 1].double().permute(2, 0, 3, 1, 4)
        back = (length - torch.arange(length + 1, device=DEVICE)).clamp(max=distances - 1)
        mask = biases[:, back].double()[None, :, None]
        read, _ = attend(query.double()[None, :, None], keys, values, scale=0.2, mask=mask)
        check(out[row], read.flatten(), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [0, 1, 5, 33, 64, 150, 600, 601])
@pytest.mark.parametrize("distances", [0, 17])
@pytest.mark.parametrize(
    ("heads", "width", "block"), [(3, 32, 16), (4, 16, 64), (3, 32, 64), (2, 64, 128), (1, 128, 64)]
)
def test_parts_of_attention_in_the_next_product(
    dtype: torch.dtype, length: int, distances: int, heads: int, width: int, block: int
) -> None:
    """Attention over a row's keys and a new one, or over a source's, multiplied by a matrix and added to a state.

    Blocks of 64 keys and more are those of `held_attention` in 16 bits, for heads from 32 numbers on.
    """
    from unspool.kernels.gpu.attention.output_parts import PartedTiling
    from unspool.kernels.gpu.attention.parted_attention import PartedAttention
    from unspool.kernels.gpu.attention.split_attention import HeadShape
    from unspool.kernels.gpu.products.parts_product import multiply_parts
    from unspool.kernels.gpu.products.row_product import RowTiling

    layers, outputs, writes = 2, 21, bool(distances) or length % 2 == 0
    buffers = [random(1, 610, 2, heads, width, dtype=dtype) for _ in range(layers)]
    base = torch.zeros(8, dtype=dtype, device=DEVICE)
    unit = 8 * base.element_size()
    places = [(buffer.data_ptr() - base.data_ptr()) // unit for buffer in buffers]
    table = torch.tensor([*places, 610], device=DEVICE)
    shape = HeadShape(heads, heads, width)
    tiling = PartedTiling(block, 4, 4)
    attend_one = PartedAttention(shape, DEVICE, dtype, writes=writes, distances=distances, tiling=tiling)
    held = torch.tensor([length], dtype=torch.int32 if writes else torch.int64, device=DEVICE)
    biases = random(heads, distances) if distances else None
    for layer, buffer in enumerate(buffers):
        qkv, state = random(1, 3 * heads * width, dtype=dtype), random(1, outputs, dtype=dtype)
        matrix, bias = random(outputs, heads * width, dtype=dtype), random(outputs, dtype=dtype)
        query, key, value = qkv.view(3, heads, width).unbind(0)
        keys, values = buffer[:, :length].double().permute(2, 0, 3, 1, 4)
        if writes:
            keys = torch.cat((keys, key.double()[None, :, None]), 2)
            values = torch.cat((values, value.double()[None, :, None]), 2)
        mask = None
        if biases is not None:
            back = (length - torch.arange(length + 1, device=DEVICE)).clamp(max=distances - 1)
            mask = biases[:, back].double()[None, :, None]
        parts = attend_one(qkv, base, table, held, layer, layers, 0.3, biases=biases)
        if writes:
            assert torch.equal(buffer[0, length], torch.stack((key, value)))
        if not keys.shape[2]:
            continue
        read, _ = attend(query.double()[None, :, None], keys, values, scale=0.3, mask=mask)
        expected = state.double() + read.flatten()[None] @ matrix.double().T + bias.double()
        multiply_parts(matrix, parts, state, bias, RowTiling(4, 64, 4, ahead=2))
        check(state, expected, dtype)


@lru_cache(maxsize=32)
def make(name: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A small model of a family: its config and weights."""
    transformers = pytest.importorskip("transformers")
    from tests.models.conftest import make_pair
    from tests.models.encoder_decoder.test_model import BART, MODELS, T5

    kind = {"t5": "T5", "umt5": "UMT5", "mbart": "MBart", "m2m_100": "M2M100"}.get(name.split("-")[0])
    kind = kind or name.split("-")[0].title()
    settings = {**T5, "d_kv": 16} if "T5" in kind else {**BART, "d_model": 64}
    if kind == "Whisper":
        settings |= {"num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 48}

    def build() -> Any:
        config = getattr(transformers, f"{kind}Config")(**{**settings, **(SHAPES | WIDE | RESIDENT)[name]})
        return getattr(transformers, MODELS.get(kind, f"{kind}ForConditionalGeneration"))(config)

    with tempfile.TemporaryDirectory() as folder:
        pair = make_pair(build, Path(folder))
    if name not in RESIDENT:
        return pair.config, pair.weights
    # Products of matrices so wide are so large that a rounding turns attentions over, and half precision shows nothing.
    less = (24 / RESIDENT[name]["d_model"]) ** 0.5
    return pair.config, {key: one * less if one.dim() == 2 else one for key, one in pair.weights.items()}


def load(name: str, device: str, dtype: torch.dtype = torch.float32) -> Any:
    config, weights = make(name)
    return build_model(config, MemorySource(weights), device=torch.device(device), dtype=dtype)


def draw_sources(name: str, rows: int, length: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows + length)
    first = {"decoder_input_ids": torch.zeros(rows, 1, dtype=torch.int64)}
    if name.startswith("whisper"):
        return first | {"input_features": torch.randn(rows, 16, 40, generator=generator)}
    ids = torch.randint(4, 97, (rows, length), generator=generator)
    mask = (torch.arange(length) <= torch.randint(1, length, (rows, 1), generator=generator)).long()
    return first | {"input_ids": ids, "attention_mask": mask}


def encode(model: Any, source: dict[str, torch.Tensor]) -> Any:
    if "input_features" in source:
        return model.encode(None, embeds=source["input_features"].cuda())
    return model.encode(source["input_ids"].cuda(), source["attention_mask"].sum(1).tolist())


SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "seed": 3, "temperature": 1.3, "top_k": 0},
    "beams": {"num_beams": 3},
    "forbidding beams": {"num_beams": 4, "suppress_tokens": [5, 7, 11], "min_new_tokens": 6, "forced_eos_token_id": 9},
    "beam samples": {"num_beams": 5, "num_return_sequences": 2, "do_sample": True, "seed": 5, "top_k": 0},
    "groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.4},
    "contrastive": {"penalty_alpha": 0.5, "top_k": 4},
    "lookup": {"prompt_lookup_num_tokens": 3},
}


@needs_gpu
@pytest.mark.parametrize("kind", list(SETTINGS))
@pytest.mark.parametrize("name", list(SHAPES))
def test_tokens_are_a_cpus(name: str, kind: str) -> None:
    """Rows, lengths and buffers change between calls; nothing of an earlier call may be read."""
    if name == "whisper" and kind == "lookup":
        pytest.skip("there is no prompt to look anything up in")
    here, there = load(name, "cpu"), load(name, "cuda")
    for rows, length in [(1, 7), (3, 9), (1, 40)]:
        source = draw_sources(name, rows, length)
        told = {"max_new_tokens": 14, "eos_token_id": None, "return_dict_in_generate": True, **SETTINGS[kind]}
        if length > 7 and kind not in ("lookup", "forbidding beams"):
            told["repetition_penalty"] = 3.0  # so that tokens differ
        expected = unspool.generate(here, **source, **told)
        found = unspool.generate(there, **{key: value.cuda() for key, value in source.items()}, **told)
        if expected.sequences.tolist() != found.sequences.tolist() and "beams" in kind:
            told["output_scores"] = True  # without them there are no scores of sequences
            expected = unspool.generate(here, **source, **told)
            found = unspool.generate(there, **{key: value.cuda() for key, value in source.items()}, **told)
            torch.testing.assert_close(found.sequences_scores.cpu(), expected.sequences_scores, atol=1e-3, rtol=0)
        else:
            assert found.sequences.tolist() == expected.sequences.tolist()
        if kind in ("greedy", "sampling", "beams", "forbidding beams", "beam samples", "groups"):
            assert found.stats.path == "captured", found.stats.path_reason


@needs_gpu
@pytest.mark.parametrize("name", ["t5", "bart"])
@pytest.mark.parametrize("rows", [1, 3])
def test_passes_that_choose_beams_are_those_that_do_not(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches side by side use one graph in turn; each goes on from its own beams."""
    from unspool.kernels.gpu.sampling.captured_beams import CapturedBeams

    there = load(name, "cuda")
    lengths, taken = (9, 20, 13), CapturedBeams.take
    sources = [{key: one.cuda() for key, one in draw_sources(name, rows, length).items()} for length in lengths]
    told: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 24, "eos_token_id": [9, 18, 27], "pad_token_id": 1}
    told["num_return_sequences"] = 3
    num_taken = 0

    def count(self: CapturedBeams, num_rows: int) -> Any:
        nonlocal num_taken
        num_taken += 1
        return taken(self, num_rows)

    with monkeypatch.context() as patched:
        patched.setattr("unspool.decoding.beams.ahead.AheadBeamTurns._set_choice", lambda _: None)
        patched.setattr(CapturedBeams, "take", count)
        expected = [unspool.generate(there, **source, **told).tolist() for source in sources]
        assert not num_taken
    monkeypatch.setattr(CapturedBeams, "take", count)
    assert [unspool.generate(there, **source, **told).tolist() for source in sources] == expected
    assert num_taken > 10
    streams = [unspool.stream(there, **source, **told) for source in sources]
    found: list[list[Any]] = [[] for _ in sources]
    for emitted in zip_longest(*streams):
        for own, one in zip(found, emitted, strict=True):
            own += [] if one is None else [one]
    assert found == [list(unspool.stream(there, **source, **told)) for source in sources]


@needs_gpu
@pytest.mark.skipif(not HOPPER, reason="the kernel is written for Hopper")
@pytest.mark.parametrize("name", list(RESIDENT))
def test_steps_of_one_kernel_for_all_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of steps in one kernel and in many, over texts of several lengths in turn."""
    from unspool.models.paths import captured_pair_choice

    ids = torch.randint(4, 97, (1, 46), generator=torch.Generator().manual_seed(1)).cuda()

    def read() -> torch.Tensor:
        model, found = load(name, "cuda", torch.bfloat16), []
        for length in (9, 40, 21):
            cache = model.new_cache(rows=1, encoded=encode(model, draw_sources(name, 1, length)))
            model.forward(ids[:, : length - 3], cache)
            for place in range(length - 3, length + 5):
                found.append(model.forward(ids[:, place : place + 1], cache).logits.double().flatten())
        return torch.stack(found)

    one = read()
    monkeypatch.setattr(captured_pair_choice, "can_reside", lambda *_: False)
    many = read()
    assert not torch.equal(one, many)  # they add up in another order
    assert float(((one - many).norm(dim=1) / many.norm(dim=1)).max()) < 0.03


@needs_gpu
@pytest.mark.parametrize("name", ["t5", "bart", "pegasus"])
def test_rows_leave_and_steps_run_ahead(name: str) -> None:
    here, there = load(name, "cpu"), load(name, "cuda")
    source = draw_sources(name, 6, 12)
    told: dict[str, Any] = {"max_new_tokens": 20, "repetition_penalty": 3.0, "pad_token_id": 1}
    whole = unspool.generate(here, **source, **told, eos_token_id=None)
    ends = sorted({int(whole[row, 4 + 2 * row]) for row in range(6)})  # rows end at different steps
    told["eos_token_id"] = ends
    expected = unspool.generate(here, **source, **told)
    found = unspool.generate(there, **{key: value.cuda() for key, value in source.items()}, **told)
    assert found.tolist() == expected.tolist()


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("name", [*SHAPES, *WIDE, *RESIDENT])
def test_captured_steps_are_as_near_as_torchs(
    name: str, rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step's logits and states, captured and by operators, beside float64's."""
    from unspool.kernels.gpu.products.rows_tilings import starts_early
    from unspool.kernels.gpu.resident.blocks import ResidentBlocks, TokenState
    from unspool.models.paths import captured_pair_blocks

    small, multiply = 0, captured_pair_blocks.multiply_small
    resident, run_blocks = 0, ResidentBlocks.__call__

    def count(weight: torch.Tensor, *args: Any, **around: Any) -> None:
        nonlocal small
        small += weight.is_cuda  # otherwise the kernels of one row are compiled ahead
        multiply(weight, *args, **around)

    def count_blocks(blocks: ResidentBlocks, x: torch.Tensor | TokenState, out: torch.Tensor, *args: Any) -> None:
        nonlocal resident
        resident += out.is_cuda
        run_blocks(blocks, x, out, *args)

    monkeypatch.setattr(captured_pair_blocks, "multiply_small", count)
    monkeypatch.setattr(ResidentBlocks, "__call__", count_blocks)
    source = draw_sources(name, rows, 30)
    ids = torch.randint(4, 97, (rows, 20), generator=torch.Generator().manual_seed(1)).cuda()

    def read(kept_in: torch.dtype, path: str) -> torch.Tensor:
        model = load(name, "cuda", kept_in)
        cache = model.new_cache(rows=rows, encoded=encode(model, source))
        model.forward(ids[:, :-1], cache)
        with model.without_paths(*(["captured"] if path == "eager" else [])):
            forward = model.forward(ids[:, -1:], cache, want=Want(last_states=True))
        assert forward.path == path
        assert forward.last_states is not None and forward.last_states.shape[:2] == (rows, 1)
        return torch.cat((forward.logits.double(), forward.last_states[:, 0].double()), dim=1)

    exact = read(torch.float64, "eager")
    captured, eager = (float((read(dtype, path) - exact).norm() / exact.norm()) for path in ("captured", "eager"))
    assert captured < 1.5 * eager + {torch.float32: 5e-5, torch.bfloat16: 1e-3}[dtype]
    is_resident = name in RESIDENT and rows == 1 and dtype == torch.bfloat16 and HOPPER
    assert bool(resident) == is_resident
    is_fit = name in WIDE | RESIDENT or (rows == 1 and "t5" not in name)  # of which some have a tiling, if not all
    is_fit = is_fit and dtype == torch.bfloat16 and starts_early()
    assert bool(small) == (is_fit and not is_resident)


@needs_gpu
def test_a_table_of_positions_that_grows() -> None:
    """A text longer than the first table of sinusoids: graphs are made anew for the next one."""
    here, there = load("m2m_100", "cpu"), load("m2m_100", "cuda")
    source = draw_sources("m2m_100", 1, 9)
    told = {"max_new_tokens": 560, "eos_token_id": None}
    expected = unspool.generate(here, **source, **told)
    found = unspool.generate(there, **{key: value.cuda() for key, value in source.items()}, **told)
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("index", [[1, 0], [0, 0, 1, 2, 4], [4, 3, 2, 1, 0]], ids=str)
def test_rows_follow_an_index_on_the_device(dtype: torch.dtype, index: list[int]) -> None:
    from unspool.kernels.gpu.attention.row_copies import RowMover

    buffers = [random(len(index) + 1, 90, 2, 3, 8, dtype=dtype) for _ in range(3)]
    expected = [buffer.clone() for buffer in buffers]
    for buffer, old in zip(expected, buffers, strict=True):
        buffer[: len(index), :70] = old[index, :70]
    RowMover(buffers).follow(torch.tensor(index, device=buffers[0].device), 70)
    for buffer, wanted in zip(buffers, expected, strict=True):
        assert torch.equal(buffer, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("index", [[1, 0], [0, 0, 1, 2, 4], [4, 3, 2, 1, 0]], ids=str)
def test_rows_change_places(dtype: torch.dtype, index: list[int]) -> None:
    from unspool.kernels.gpu.attention.row_copies import RowMover

    buffers = [random(len(index), 90, 2, 3, 8, dtype=dtype) for _ in range(3)]
    expected = [buffer.clone() for buffer in buffers]
    for buffer, old in zip(expected, buffers, strict=True):
        buffer[:, 5:70] = old[index, 5:70]
    moved = [row for row, source in enumerate(index) if row != source]
    RowMover(buffers).move([index[row] for row in moved], moved, 5, 70)
    for buffer, wanted in zip(buffers, expected, strict=True):
        assert torch.equal(buffer, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(24, 256), (21, 300)])
@pytest.mark.parametrize("has_all", [False, True])
def test_products_after_a_layer_norm(dtype: torch.dtype, outputs: int, inputs: int, has_all: bool) -> None:
    from unspool.kernels.gpu.products.norm_product import WarpTiling, multiply_normed

    matrix, x = random(outputs, inputs, dtype=dtype), random(1, inputs, dtype=dtype) + 9
    norm, shift, bias = (random(size, dtype=dtype) if has_all else None for size in (inputs, inputs, outputs))
    out, kept = random(1, outputs, dtype=dtype), torch.empty_like(x) if has_all else None
    around = {"bias": bias, "activation": 2, "kept": kept}
    multiply_normed(matrix, x, out, WarpTiling(2, 2), norm=norm, eps=1e-5, shift=shift, **around)
    wide = [None if one is None else one.double() for one in (norm, shift, bias)]
    normed = torch.nn.functional.layer_norm(x.double(), (inputs,), *wide[:2], 1e-5)
    if kept is not None:
        check(kept, normed, dtype)
        normed = kept.double()
    check(out, torch.nn.functional.linear(normed, matrix.double(), wide[2]).relu(), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(24, 256), (21, 300)])
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_after_a_norm_of_squares(
    dtype: torch.dtype, outputs: int, inputs: int, is_gated: bool, has_bias: bool
) -> None:
    from unspool.kernels.gpu.products.norm_product import WarpTiling, multiply_normed

    rows = 2 * outputs if is_gated else outputs
    matrix, x, norm = random(rows, inputs, dtype=dtype), random(1, inputs, dtype=dtype) + 1, random(inputs, dtype=dtype)
    bias = random(rows, dtype=dtype) if has_bias else None
    out = random(1, outputs, dtype=dtype)
    around = {"bias": bias, "activation": 2, "is_gated": is_gated}
    multiply_normed(matrix, x, out, WarpTiling(2, 2), norm=norm, eps=1e-5, centres=False, **around)
    normed = torch.nn.functional.rms_norm(x.double(), (inputs,), norm.double(), 1e-5)
    made = torch.nn.functional.linear(normed, matrix.double(), None if bias is None else bias.double())
    first, *second = made.split(outputs, dim=1)
    check(out, first.relu() * second[0] if second else first.relu(), dtype)
