"""Requests of every strategy at once, beside what their passes cost: part of benchmarks/engine.py."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from engine_setting import COMMON, Setting, free, run_all  # benchmarks/engine_setting.py

from unspool.api import LanguageModel
from unspool.cache import BlockPool, PagedCache
from unspool.decoding.reader import answer_at_once
from unspool.protocols import Ask

STRATEGIES: tuple[dict[str, Any], ...] = (
    {},
    {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "seed": 1},
    {"do_sample": True, "top_k": 0, "top_p": 0.9, "seed": 2, "repetition_penalty": 1.2},
    {"num_beams": 4},
    {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    {"num_beams": 2, "do_sample": True, "seed": 3},
    {"penalty_alpha": 0.6, "top_k": 4},
    {"dola_layers": "high"},
    {"guidance_scale": 1.5},
    {"prompt_lookup_num_tokens": 4},
    {"do_sample": True, "seed": 4, "watermarking_config": {"bias": 2.0}},
    {"num_return_sequences": 4, "do_sample": True, "seed": 5},
    {"no_repeat_ngram_size": 3},
    {"logprobs": 2},
    {"min_new_tokens": 8, "presence_penalty": 0.5},
    {"do_sample": True, "min_p": 0.05, "seed": 6},
)


def measure_strategies(setting: Setting) -> dict[str, float]:
    if find_spec("greenlet") is None:
        return {}
    prompts = [prompt[:256] for prompt in setting.prompts[: len(STRATEGIES)]]
    asked = [{"max_new_tokens": min(64, setting.options.num_new), **one, **COMMON} for one in STRATEGIES]
    given = list(zip(prompts, asked, strict=True))
    alone = setting.time(lambda: [setting.lm.generate(prompt, **one) for prompt, one in given])
    with setting.make_engine(share_prefixes=False) as engine:
        together = setting.time(lambda: run_all(engine, prompts, asked))
    free(setting)
    merged = merge_passes([list_passes(setting.lm, prompt, one) for prompt, one in given])
    costs = {shape: time_pass(setting, *shape) for shape in set(merged)}
    passes = sum(costs[shape] for shape in merged)
    free(setting)
    return {
        "one after the other s": alone,
        "engine s": together,
        "merged passes": len(merged),
        "merged passes s": passes,
        "engine, of merged passes": passes / together,
    }


def list_passes(lm: LanguageModel, prompt: list[int], asked: dict[str, Any]) -> list[tuple[Any, int, int, int]]:
    """What a request asks for: of every pass what it wants, its rows, its tokens per row and the keys before them."""
    passes: list[tuple[Any, int, int, int]] = []
    run = lm.start(prompt, **asked).run
    pool = BlockPool()

    def answer(ask: Ask) -> Any:
        want = replace(ask.want, epilogue=None, is_brief=False)
        rows, columns = ask.tokens.shape
        passes.append((want, rows, columns, max(ask.cache.lengths, default=0)))
        return answer_at_once(ask)

    run.answer, run.open_cache = answer, lambda: PagedCache(pool)
    with torch.no_grad():
        for _ in run:
            pass
    return passes


def merge_passes(requests: list[list[tuple[Any, int, int, int]]]) -> list[tuple[Any, int, int, int]]:
    """Passes that come at the same time and want the same as one: steps of one token, and others by themselves."""
    merged: list[tuple[Any, int, int, int]] = []
    for number in range(max(map(len, requests))):
        steps: dict[Any, list[tuple[int, int]]] = {}
        reads: dict[Any, list[tuple[int, int, int]]] = {}
        for want, rows, columns, held in (passes[number] for passes in requests if number < len(passes)):
            if columns == 1:
                steps.setdefault(want, []).append((rows, held))
            else:
                reads.setdefault(want, []).append((rows, columns, held))
        for want, parts in steps.items():
            merged.append((want, sum(rows for rows, _ in parts), 1, _round(max(held for _, held in parts))))
        for want, longer in reads.items():  # as one row after the other: their lengths differ
            tokens = sum(rows * columns for rows, columns, _ in longer)
            rows = sum(rows for rows, _, _ in longer)
            merged.append((want, rows, -(-tokens // rows), _round(max(held for _, _, held in longer))))
    return merged


def _round(count: int) -> int:
    return -(-count // 64) * 64


def time_pass(setting: Setting, want: Any, rows: int, columns: int, held: int) -> float:
    """Seconds of a pass of a shape over blocks: the fastest of several."""
    model, size = setting.lm.model, 64
    cache = PagedCache(BlockPool(size, rows * (2 + (held + columns) // size)))
    tokens = torch.randint(3, setting.vocab, (rows, max(held, columns)), device=setting.device)
    seconds = []
    with torch.no_grad():
        if held:
            answer_at_once(Ask(model, cache, tokens[:, :held]))
        for _ in range(5):
            setting.synchronize()
            started = setting.clock()
            answer_at_once(Ask(model, cache, tokens[:, :columns], None, want))
            setting.synchronize()
            seconds.append(setting.clock() - started)
            cache.truncate([held] * rows)
    return min(seconds)
