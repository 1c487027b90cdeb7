"""A look at an engine: what it has counted, its queue and its blocks."""

from __future__ import annotations

from unspool.engine.memory import EngineMemory
from unspool.engine.scheduler import Scheduler
from unspool.engine.stats import Counters, EngineStats, find_median


def take_look(
    counters: Counters, memory: EngineMemory, scheduler: Scheduler, num_waiting: int, num_passes: int
) -> EngineStats:
    """What an engine has done and is doing."""
    pool, prefixes = memory.counted, memory.prefixes
    used = shared = kept = 0
    if pool is not None:
        with pool.lock:
            users = [pool.count_users(block) for block in range(1, pool.num_blocks + 1)]
        kept = 0 if prefixes is None else prefixes.count_idle()
        indexed = set() if prefixes is None else prefixes.list_blocks()
        used = sum(count > 0 for count in users) - kept
        shared = sum(count - (place + 1 in indexed) > 1 for place, count in enumerate(users))
    asked = 0 if prefixes is None else prefixes.num_asked
    return EngineStats(
        rows_running=scheduler.num_rows,
        requests_running=len(scheduler) - scheduler.num_waiting,
        requests_waiting=num_waiting,
        requests_done=counters.done,
        requests_failed=counters.failed,
        requests_cancelled=counters.cancelled,
        new_tokens=counters.new_tokens,
        prompt_tokens=counters.prompt_tokens,
        passes=num_passes,
        preemptions=scheduler.num_preemptions,
        tokens_per_second=counters.find_rate(),
        blocks=memory.num_blocks,
        blocks_used=used,
        blocks_shared=shared,
        blocks_kept=kept,
        blocks_moved=scheduler.num_moved,
        prefix_hit_rate=prefixes.num_found / asked if prefixes is not None and asked else 0.0,
        first_token_seconds=find_median(list(counters.firsts)),
        token_seconds=find_median(list(counters.between)),
    )
