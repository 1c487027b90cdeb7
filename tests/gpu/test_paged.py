"""Blocks on a GPU: kernels that find keys through a table beside those that find rows whole, and captured passes.

The kernels also run, slowly, in Triton's interpreter: `TRITON_INTERPRET=1 pytest tests/gpu/test_paged.py`.
"""

from __future__ import annotations

import gc
import threading
from functools import lru_cache
from typing import Any

import pytest
import torch
from tests.conformance import cases
from tests.conformance.cases import GOLDENS, Case, read_cases, run_case
from tests.gpu.kernel_checks import DTYPES, HAS_GPU, needs_gpu, pytestmark

import unspool
from unspool.cache import BlockPool, PagedCache
from unspool.kernels.alibi import alibi_slopes
from unspool.kernels.key_layout import KeyLayout
from unspool.protocols import Forward, Want

__all__ = ["pytestmark"]

DEVICE = torch.device("cuda:0" if HAS_GPU else "cpu")
SIZES = [16, 64, 256] if HAS_GPU else [16, 64]
WINDOW = 50


# --- kernels ------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=not HAS_GPU)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs one program after the other."""
    from unspool.kernels.gpu.attention import step_attention as attention
    from unspool.kernels.gpu.attention import wide_attention

    few = attention.AttentionTiling(64, 128, 20, 4, 2)
    for name in ("SEVERAL_ROWS", "SEVERAL_ROWS_OF_NARROW_HEADS", "ONE_ROW"):
        monkeypatch.setattr(attention, name, few)
    monkeypatch.setattr(wide_attention, "SEVERAL_ROWS", few)


class Scattered:
    """Rows' keys once whole and once in blocks that lie anywhere, with the tables that kernels are told."""

    def __init__(self, held: list[int], room: int, size: int, kv_heads: int, width: int, dtype: torch.dtype) -> None:
        self.held, self.size = held, size
        num_each = -(-room // size)
        order = torch.randperm(len(held) * num_each) + 1
        self.blocks = order.view(len(held), num_each).to(DEVICE, torch.int32)
        shape = (2, kv_heads, width)
        self.whole = [
            torch.randn(len(held), num_each * size, *shape, device=DEVICE).to(dtype) for _ in range(2)
        ]  # two layers
        self.paged = [torch.zeros(len(held) * num_each + 1, size, *shape, device=DEVICE, dtype=dtype) for _ in range(2)]
        for whole, paged in zip(self.whole, self.paged, strict=True):
            paged[self.blocks.long()] = whole.view(len(held), num_each, size, *shape)
        self.base = torch.zeros(16, device=DEVICE, dtype=dtype)
        self.lengths = torch.tensor(held, device=DEVICE, dtype=torch.int32)

    def tell(self, buffers: list[torch.Tensor]) -> torch.Tensor:
        unit = 8 * self.base.element_size()
        told = [(buffer.data_ptr() - self.base.data_ptr()) // unit for buffer in buffers]
        index = (self.blocks.data_ptr() - self.lengths.data_ptr()) // 4
        return torch.tensor([*told, buffers[0].shape[1], index, self.blocks.shape[1]], device=DEVICE)

    def gather(self, layer: int) -> torch.Tensor:
        """What is in blocks, as rows."""
        found = self.paged[layer][self.blocks.long()]
        return found.view(self.whole[layer].shape)


def read_both_ways(
    keys: Scattered, make: Any, qkv: torch.Tensor, num_out: int, **settings: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    outs = []
    for buffers, layout in ((keys.whole, KeyLayout()), (keys.paged, KeyLayout(block_size=keys.size))):
        out = torch.full((qkv.shape[0], num_out), torch.nan, device=DEVICE, dtype=qkv.dtype)
        step, table = make(), keys.tell(buffers)
        for _ in range(2):  # what is left behind must not matter
            step(qkv, out, keys.base, table, keys.lengths, 1, 2, layout=layout, **settings)
        outs.append(out)
    return outs[0], outs[1]


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Nothing of a row that is not there, and else the same but for the order of sums."""
    assert torch.equal(found.isnan(), expected.isnan())
    error = (
        found.nan_to_num().double() - expected.nan_to_num().double()
    ).norm() / expected.nan_to_num().double().norm()
    assert error < (1e-5 if found.dtype == torch.float32 else 6e-3), float(error)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("manner", ["plain", "window", "window of one", "slopes"])
@pytest.mark.parametrize("rows", [1, 6])
def test_one_token_a_row(rows: int, manner: str, dtype: torch.dtype, size: int) -> None:
    from unspool.kernels.gpu.attention.split_attention import HeadShape
    from unspool.kernels.gpu.attention.step_attention import StepAttention

    heads, kv_heads, width = (32, 8, 128) if HAS_GPU else (4, 2, 16)
    held = [300] if rows == 1 else [0, 1, 63, 64, 290, -1]
    keys = Scattered(held, 301, size, kv_heads, width, dtype)
    before = keys.whole[1].clone()
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * width, device=DEVICE).to(dtype)
    window = {"window": WINDOW, "window of one": 1}.get(manner)
    shape = HeadShape(heads, kv_heads, width, width**-0.5, window=window)
    slopes = alibi_slopes(heads).to(DEVICE) if manner == "slopes" else None
    settings = {"is_windowed": window is not None, "slopes": slopes}
    whole, paged = read_both_ways(keys, lambda: StepAttention(rows, shape, DEVICE), qkv, heads * width, **settings)
    check(paged, whole)
    assert torch.equal(keys.gather(1), keys.whole[1])  # the new key lies where it belongs, and nothing else moved
    assert torch.equal(keys.gather(0), keys.whole[0]) and not keys.paged[1][0].any()
    changed = (keys.whole[1] != before).flatten(2).any(2).sum(1)
    assert changed.tolist() == [int(length >= 0) for length in held]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_forked", [False, True])
@pytest.mark.parametrize("window", [None, WINDOW, 2])
def test_several_tokens_a_row(window: int | None, is_forked: bool, dtype: torch.dtype, size: int) -> None:
    from unspool.kernels.gpu.attention.split_attention import HeadShape
    from unspool.kernels.gpu.attention.wide_attention import WideAttention

    heads, kv_heads, width, new = (32, 8, 128, 5) if HAS_GPU else (4, 2, 16, 3)
    held = [0, 14, 64, 290, -1]
    keys = Scattered(held, 300, size, kv_heads, width, dtype)
    qkv = torch.randn(len(held) * new, (heads + 2 * kv_heads) * width, device=DEVICE).to(dtype)
    shape = HeadShape(heads, kv_heads, width, width**-0.5, window=window)

    def make() -> Any:
        return WideAttention(len(held), new, shape, DEVICE, is_forked=is_forked)

    whole, paged = read_both_ways(keys, make, qkv, heads * width, is_windowed=window is not None)
    check(paged, whole)
    assert torch.equal(keys.gather(1), keys.whole[1]) and not keys.paged[1][0].any()


def test_nothing_is_written_where_a_row_has_no_block() -> None:
    from unspool.kernels.gpu.attention.split_attention import HeadShape
    from unspool.kernels.gpu.attention.wide_attention import WideAttention

    keys = Scattered([30, 14], 64, 16, 2, 16, torch.float32)
    keys.blocks[:, 2:] = 0
    keys.blocks[1, 1:] = 0
    before = keys.paged[1].clone()
    qkv = torch.randn(2 * 4, 8 * 16, device=DEVICE)
    out = torch.empty(8, 4 * 16, device=DEVICE)
    attend = WideAttention(2, 4, HeadShape(4, 2, 16, 0.25), DEVICE, is_forked=False)
    table = keys.tell(keys.paged)
    attend(qkv, out, keys.base, table, keys.lengths, 1, 2, layout=KeyLayout(block_size=16))
    changed = (keys.paged[1] != before).flatten(2).any(2).nonzero().tolist()  # block, place
    first, second = keys.blocks[0].tolist(), keys.blocks[1].tolist()
    assert sorted(changed) == sorted([[first[1], 14], [first[1], 15], [second[0], 14], [second[0], 15]])
    assert out.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kept_candidates_and_copied_blocks(dtype: torch.dtype) -> None:
    from unspool.kernels.gpu.attention.block_copies import BlockMover
    from unspool.kernels.gpu.attention.forks import ForkKeeper

    held, chosen = [14, 31, 3], torch.tensor([3, 1, 0], device=DEVICE)
    keys = Scattered(held, 64, 16, 2, 40, dtype)
    ForkKeeper(keys.paged, keys.blocks).keep(chosen, held)
    for layer in range(2):
        for row, (end, fork) in enumerate(zip(held, chosen.tolist(), strict=True)):
            keys.whole[layer][row, end] = keys.whole[layer][row, end + fork]
        assert torch.equal(keys.gather(layer), keys.whole[layer])
    expected = [buffer.clone() for buffer in keys.paged]
    BlockMover(keys.paged).move([0, 5, 5], [2, 1, 9])
    for buffer, before in zip(keys.paged, expected, strict=True):
        before[[2, 1, 9]] = before[[0, 5, 5]]
        assert torch.equal(buffer, before)


# --- captured passes ------------------------------------------------------------------------------------------

FAMILIES = ("llama", "gemma2", "mistral", "bloom", "gpt2", "gpt_neox")
RUNNING = [
    case
    for case in read_cases()
    if case.model in ("llama", "gemma2", "gpt2") and case.to_come is None and "sequences" in case.expected
]


@lru_cache(maxsize=16)
def load(name: str) -> unspool.LanguageModel:
    return unspool.load(GOLDENS / "models" / name, device="cuda", dtype=torch.float32)


@needs_gpu
@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize("name", FAMILIES)
def test_passes_over_blocks(name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps, rows that part, drafts of different numbers, candidates and clones: as the same passes eager."""
    model = load(name).model
    ids = torch.randint(3, 90, (3, 30), generator=torch.Generator().manual_seed(0)).cuda()
    tokens = torch.randint(3, 90, (9, 3), generator=torch.Generator().manual_seed(1)).cuda()

    def passes() -> list[Forward]:
        made: list[Forward] = []
        cache = PagedCache(BlockPool(size))
        model.forward(ids, cache, counts=[30, 7, 15])
        for column in range(3):
            made.append(model.forward(tokens[:3, column : column + 1], cache))
        cache.select_rows([2, 0, 2])
        made.append(model.forward(tokens[:3, :1], cache))
        tried = model.forward(tokens[:3], cache, counts=[3, 2, 1], want=Want(logits="all"))
        tried.logits = torch.cat([tried.logits[row, :count] for row, count in enumerate((3, 2, 1))])
        made.append(tried)
        cache.truncate([length - 1 for length in cache.lengths])
        made.append(model.forward(tokens[:3, :1], cache))
        made.append(model.forward(tokens[:, :1], cache.fork(range(3)), want=Want(last_states=True)))
        cache.keep_fork(torch.tensor([2, 0, 1], device="cuda"))
        other = cache.clone()
        for one in (cache, other, cache, other):
            made.append(model.forward(tokens[3:6, :1], one))
        return made

    captured = passes()
    with monkeypatch.context() as patch:
        patch.setattr(model, "paths", [])
        eager = passes()
    assert {made.path for made in captured} == {"captured"} and {made.path for made in eager} == {"eager"}
    for mine, theirs in zip(captured, eager, strict=True):
        assert float((mine.logits - theirs.logits).abs().max()) <= 2e-5 * max(1.0, float(theirs.logits.abs().max()))


@needs_gpu
@pytest.mark.parametrize("case", RUNNING, ids=str)
def test_goldens_hold_in_blocks(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    real = unspool.generate
    told = {"cache_implementation": "paged", "cache_config": {"block_size": 16}}
    monkeypatch.setattr(cases, "load_model", load)
    monkeypatch.setattr(unspool, "generate", lambda *a, **k: real(*a, **k, **told))
    output = run_case(case)
    assert output.sequences.tolist() == case.sequences


@needs_gpu
@pytest.mark.parametrize(
    "way",
    [
        {},
        {"num_beams": 3},
        {"penalty_alpha": 0.6, "top_k": 4},
        {"prompt_lookup_num_tokens": 3},
        {"guidance_scale": 1.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("config", [{}, {"block_size": 16, "max_cache_len": 200}], ids=str)
def test_strategies_run_on_captured_passes(way: dict[str, Any], config: dict[str, Any]) -> None:
    """Long enough for pools and tables to grow under steps that are launched ahead; rows leave one by one."""
    model = load("llama").model
    ids = torch.randint(3, 90, (3, 9), generator=torch.Generator().manual_seed(5)).cuda()
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    for ends in ({"eos_token_id": None}, {"eos_token_id": list(range(0, 160, 9)), "pad_token_id": 0}):
        asked = {"attention_mask": mask, "max_new_tokens": 90, **ends, **way}
        expected = unspool.generate(model, ids, **asked)
        told = {"cache_implementation": "paged", "cache_config": config or None}
        assert unspool.generate(model, ids, **asked, **told).tolist() == expected.tolist()
        found = unspool.generate(model, ids, **asked, **told, return_dict_in_generate=True)
        assert found.sequences.tolist() == expected.tolist()
        # With drafts rows end one after the other, and a last pass in which some read nothing is not captured.
        assert found.stats.path == "captured" or "prompt_lookup_num_tokens" in way


@needs_gpu
@pytest.mark.parametrize("num_blocks", [None, 80])
def test_calls_on_several_streams_share_a_prefix(num_blocks: int | None) -> None:
    """The pool moves when it grows, and blocks go from one stream to another; no call may notice."""
    lm = load("llama")
    ids = torch.randint(3, 90, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    told = {"block_size": 16} | ({} if num_blocks is None else {"num_blocks": num_blocks})
    prefix = lm.prefix(ids, cache_implementation="paged", cache_config=told)
    prompts = [[5 + n, 6 + n] for n in range(6)]
    asked = {"max_new_tokens": 60, "eos_token_id": None}
    expected = [lm.generate(ids + row, **asked).token_ids for row in prompts]
    found: dict[int, Any] = {}

    def call(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            found[number] = prefix.generate(prompts[number], **asked).token_ids
            torch.cuda.current_stream().synchronize()

    torch.cuda.synchronize()
    for _ in range(2):
        threads = [threading.Thread(target=call, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [found[number] for number in range(6)] == expected
    gc.collect()
    assert isinstance(prefix.cache, PagedCache)
    pool = prefix.cache.pool
    assert pool.num_blocks - pool.num_free == 3  # the prefix's own
