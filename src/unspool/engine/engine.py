"""`unspool.Engine`: continuous batching, in which every strategy lives."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral
from os import PathLike
from pathlib import Path
from typing import Any, Final, Self, cast

import torch

from unspool.api import LanguageModel, load
from unspool.api.calls import feed
from unspool.api.core import as_model
from unspool.api.prompt import OMITTED
from unspool.api.pruned_prompts import PRUNED
from unspool.callbacks import check_streamer
from unspool.config import GenerationConfig
from unspool.decoding.among import Needs, find_kind_of_steps, find_needs
from unspool.engine.drafts import can_page
from unspool.engine.driver import Driver
from unspool.engine.joined import JoinedTask
from unspool.engine.memory import BlockLayout, EngineMemory
from unspool.engine.request import Request
from unspool.engine.results import results_as_they_finish, results_in_order
from unspool.engine.scheduler import HIGHEST, LOWEST, Entry, Limits
from unspool.engine.stats import EngineStats
from unspool.engine.suspended import import_greenlet
from unspool.engine.tasks import PlainTask, SpecialTask
from unspool.errors import EngineError, ResourceError, SettingError, UnsupportedError
from unspool.kernels.presence import refuse_forked
from unspool.loading.model import LoadedParts
from unspool.models.adapters import ColumnModel
from unspool.numeric import is_number
from unspool.outputs import Generation

BLOCK_SIZE: Final = 64
_MOST_ROWS: Final = 4096
_ROWS_ON_GPU: Final = 256  # the most that steps are captured for
_ROWS_ON_CPU: Final = 32
_TOKENS_ON_GPU: Final = 16_384
_TOKENS_ON_CPU: Final = 512
_MOST_TOKENS: Final = 1 << 20
_WAITING: Final = 4096
_MOST_WAITING: Final = 1 << 20
_LONGEST_DEADLINE: Final = 1e9


@dataclass(slots=True)
class BatchOutput:
    """One request's answer as `generate_batch` returns it."""

    request_id: str
    prompt_ids: list[int] = field(default_factory=list)
    generated_tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    error: str | None = None
    status: str = "finished"  # or "failed"

    def is_finished(self) -> bool:
        """Always: it is returned when the request has ended."""
        return True


class Engine:
    """Decodes many requests at once, each with its own settings, and returns what each would get alone.

    `max_rows` rows are decoded at once. `memory` is the number of bytes for their keys and values; without it a part of
    what is free. A pass reads at most `tokens_per_pass` tokens of prompts beside one token of each row that decodes. At
    most `max_waiting` requests wait. Prompts that begin alike share blocks of keys (`share_prefixes`).

    Blocks of `cache_implementation` "paged" keep every key, those of "paged_hybrid" let keys go that no window sees,
    and those of "paged_quantized" pack old ones as `cache_config` says.
    """

    def __init__(
        self,
        lm: Any,
        *,
        max_rows: int | None = None,
        memory: int | None = None,
        tokens_per_pass: int | None = None,
        max_waiting: int = _WAITING,
        share_prefixes: bool | None = None,
        block_size: int = BLOCK_SIZE,
        cache_implementation: str = "paged",
        cache_config: Any = None,
        batch_invariant: bool = False,
    ) -> None:
        self._lm = lm if isinstance(lm, LanguageModel) else _as_language_model(lm)
        model = self._lm.model
        refuse_forked(model.device)
        is_gpu = model.device.type == "cuda"
        most = _ROWS_ON_GPU if is_gpu else _MOST_ROWS
        rows = _read_count("max_rows", max_rows, _ROWS_ON_GPU if is_gpu else _ROWS_ON_CPU, most)
        tokens = _read_count(
            "tokens_per_pass", tokens_per_pass, _TOKENS_ON_GPU if is_gpu else _TOKENS_ON_CPU, _MOST_TOKENS
        )
        waiting = _read_count("max_waiting", max_waiting, _WAITING, _MOST_WAITING)
        if batch_invariant:
            _check_invariance(model)
        layout = BlockLayout(model, cache_implementation, cache_config, block_size)
        num_blocks = layout.count_blocks(memory, rows, tokens)
        self._memory = EngineMemory(
            layout, num_blocks, rows, has_blocks=can_page(model), shares_prefixes=share_prefixes
        )
        limits = Limits(rows, num_blocks, tokens, waiting)
        self._driver = Driver(model, limits, self._memory)
        self._numbers = itertools.count()
        self._stream = torch.cuda.Stream(model.device) if is_gpu else None

    # --- requests ------------------------------------------------------------------------------------------
    def submit(
        self,
        prompt: Any = OMITTED,
        *,
        priority: int = 0,
        deadline: float | None = None,
        tenant: str = "",
        streamer: Any = None,
        **settings: Any,
    ) -> Request:
        """Begin a request with what `lm.generate` takes; everything that can't be is refused here.

        A level of `priority` counts as ten seconds of waiting. After `deadline` seconds it ends with what it has, and
        the finish reason "deadline". Requests share what they have read with those of the same `tenant` alone.
        """
        if isinstance(priority, bool) or not isinstance(priority, int) or not LOWEST <= priority <= HIGHEST:
            raise SettingError(f"`priority` is a whole number from {LOWEST} to {HIGHEST}, not {priority!r:.40}")
        if deadline is not None and (not is_number(deadline) or not 0 < deadline <= _LONGEST_DEADLINE):
            raise SettingError(f"`deadline` is a number of seconds from now, not {deadline!r:.40}")
        if not isinstance(tenant, str) or len(tenant) > 256:
            raise SettingError("`tenant` is a name of at most 256 characters")
        if self._driver.is_closed:
            raise self._driver.death or EngineError("the engine is closed and takes no more requests; make another")
        check_streamer(streamer)
        with self._driver.inbox.asking(), self._beside():
            return self._submit(prompt, priority, deadline, tenant, streamer, settings)

    def expecting(self) -> AbstractContextManager[None]:
        """Around what prepares a request and submits it: an engine that is idle waits for it, for up to 30 ms, so that
        prompts which come together are read together."""
        return self._driver.inbox.expecting()

    def _beside(self) -> AbstractContextManager[Any]:
        """What a caller's thread does on a GPU must not wait for the passes that are under way there."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _submit(
        self,
        prompt: Any,
        priority: int,
        deadline: float | None,
        tenant: str,
        streamer: Any,
        settings: dict[str, Any],
    ) -> Request:
        memory = self._memory
        if settings.get("cache_implementation") == PRUNED:
            raise UnsupportedError(
                "keys are let go after a pass of their own, which an engine does not share: use lm.generate() with "
                "cache_implementation='pruned', or give the request a prefix: lm.prefix(…).compress()"
            )
        answer = self._lm.start(prompt, **self._choose_cache(settings))
        if isinstance(answer.run.parts.model, ColumnModel):
            raise UnsupportedError(
                f"pictures of {self._lm.name} are read by an object of transformers, whose passes no engine shares; "
                "use lm.generate(), or a model with a native language part (docs/pictures.md)"
            )
        needs = find_needs(answer.run.parts, memory.kind, memory.config)
        number, now = next(self._numbers), time.monotonic()
        request = Request(answer, number, priority=priority, deadline=deadline)
        is_plain = needs.is_plain and self._memory.pool is not None
        joins = needs.joins and self._memory.pool is None and answer.run.parts.model is self._lm.model
        entry = self._make_entry(number, needs, is_plain)
        entry.priority, entry.arrived = priority, now
        entry.deadline = None if deadline is None else now + deadline
        refusal = self._driver.scheduler.explain_refusal(entry)
        if refusal is not None:
            raise ResourceError(
                f"this request can't be: {refusal}. Make the engine larger, or ask for fewer rows or new tokens"
            )
        if not is_plain and not joins:
            import_greenlet()
        feeding = None if streamer is None else _make_feeder(streamer, request)
        task: PlainTask | SpecialTask
        if is_plain:
            task = PlainTask(request, needs, entry, tenant)
            task.prepare(self._memory)
        elif joins:
            task = JoinedTask(request, needs, entry, tenant)
        else:
            task = SpecialTask(request, needs, entry, tenant)
            if entry.can_move and memory.kind == "paged":
                task.kind = find_kind_of_steps(answer.run.parts)
            task.stepped = self._make_stepped(request, entry, tenant)
        if self._stream is not None:
            self._stream.synchronize()  # what was made is there when the driving thread reads it
        self._driver.submit(task)
        if feeding is not None:
            feeding.start()
        return request

    def _make_stepped(self, request: Request, entry: Entry, tenant: str) -> PlainTask | None:
        """How a request that drafts without having been asked to is stepped with others; None if that can't be."""
        parts, memory = request.answer.run.parts, self._memory
        if not parts.drafts_unasked or memory.pool is None:
            return None
        parts = parts.without_drafts()
        needs = find_needs(parts, memory.kind, memory.config)
        if not needs.is_plain:
            return None
        own = self._make_entry(entry.number, needs, is_plain=True)
        own.priority, own.arrived, own.deadline = entry.priority, entry.arrived, entry.deadline
        if self._driver.scheduler.explain_refusal(own) is not None:
            return None
        task = PlainTask(request, needs, own, tenant, parts)
        task.prepare(memory)
        return task

    def _choose_cache(self, settings: dict[str, Any]) -> dict[str, Any]:
        """The settings of a request that says nothing of its cache, if the engine's blocks are not the usual ones."""
        memory, config = self._memory, settings.get("generation_config")
        if memory.kind == "paged":
            return settings
        given = set(settings) | set(config.explicit if isinstance(config, GenerationConfig) else ())
        if given & {"cache_implementation", "cache_config", "past_key_values", "use_cache"}:
            return settings
        chosen: dict[str, Any] = {"cache_implementation": memory.kind}
        return {**settings, **chosen, **({"cache_config": dict(memory.config)} if memory.config else {})}

    def _make_entry(self, number: int, needs: Needs, is_plain: bool) -> Entry:
        memory, size = self._memory, self._memory.block_size
        takes_blocks = is_plain or memory.pool is None or not needs.own_cache
        can_move = takes_blocks and not is_plain and memory.pool is not None
        rows = needs.num_rows if is_plain else needs.num_cache_rows
        num_read = needs.longest_prompt
        if is_plain and not memory.is_packed:
            num_read = min(num_read, self._driver.scheduler.limits.tokens_per_pass)
        return Entry(
            number,
            needs.num_rows,
            needs.num_prompts,
            unread=needs.longest_prompt,
            length=needs.longest_prompt if takes_blocks else 0,
            is_plain=is_plain,
            reserve=rows * memory.use.count(needs.longest, num_read, size) if takes_blocks else 0,
            can_move=can_move,
            is_whole=is_plain and memory.is_packed,
            wanted=needs.num_read_rows * memory.use.num_tables * (2 + needs.longest_prompt // size) if can_move else 0,
        )

    # --- many prompts --------------------------------------------------------------------------------------
    def generate(
        self, prompts: Iterable[Any], *, in_order: bool = True, return_errors: bool = False, **settings: Any
    ) -> Iterator[Any]:
        """Continue prompts, of a list or of an iterable without end, a request each, and yield their results.

        Results come in the order of the prompts or, with `in_order=False`, as `(place, result)` when each is done. A
        request that fails raises its error, or, with `return_errors`, its error is the result.
        """
        if isinstance(prompts, str | bytes) or _is_one_prompt(prompts):
            raise SettingError("generate() takes prompts, a list or any iterable of them; for one prompt use submit()")
        submit = partial(self._try_submit, returns=return_errors, settings=settings)
        results = results_in_order if in_order else results_as_they_finish
        return results(iter(prompts), submit, self.most_ahead, return_errors)

    @property
    def most_ahead(self) -> int:
        """Requests to submit before results are waited for, if there are many: more would only wait."""
        limits = self._driver.scheduler.limits
        return min(2 * limits.max_rows, limits.max_waiting)

    def _try_submit(self, prompt: Any, returns: bool, settings: dict[str, Any]) -> Request | Exception:
        while True:
            try:
                return self.submit(prompt, **settings)
            except ResourceError as error:
                if self._driver.num_waiting < self._driver.scheduler.limits.max_waiting:
                    if returns:
                        return error
                    raise
                time.sleep(0.005)  # the queue is full of others' requests
            except EngineError:
                raise
            except Exception as error:
                if returns:
                    return error
                raise

    def generate_batch(
        self, inputs: Sequence[Sequence[int]], generation_config: GenerationConfig | None = None, **settings: Any
    ) -> dict[str, BatchOutput]:
        """Rows of token ids in the manner of transformers: an answer for each, by the name of its request."""
        if generation_config is not None:
            settings["generation_config"] = generation_config
        outputs: dict[str, BatchOutput] = {}
        rows = [list(row) for row in inputs]
        for place, result in enumerate(self.generate(rows, return_errors=True, **settings)):
            copies = result.token_ids if isinstance(result, Generation) else [[]]
            for number, tokens in enumerate(copies):
                name = f"req_{place}" if len(copies) == 1 else f"req_{place}_{number}"
                output = outputs[name] = BatchOutput(name, rows[place], list(tokens))
                if not isinstance(result, Generation):
                    output.error, output.status = str(result), "failed"
                elif result.logprobs is not None:
                    output.logprobs = [one.logprob for one in result.logprobs[number]]
        return outputs

    # --- its life ------------------------------------------------------------------------------------------
    @property
    def stats(self) -> EngineStats:
        """What it has done and is doing."""
        return self._driver.look()

    @property
    def is_closed(self) -> bool:
        """Whether it takes no more requests."""
        return self._driver.is_closed

    def close(self) -> None:
        """End the requests that are at work, as cancelled, and give the memory back."""
        self._driver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_driver"):
            with suppress(Exception):
                self._driver.close()

    def __repr__(self) -> str:
        limits = self._driver.scheduler.limits
        return f"Engine({self._lm.name!r}, max_rows={limits.max_rows}, {limits.max_blocks} blocks)"


def _as_language_model(model: Any) -> LanguageModel:
    """A bare model as one without a tokenizer; what a name or a path stands for."""
    if isinstance(model, str | PathLike):
        return load(model if isinstance(model, str) else Path(model))
    core = cast(Any, as_model(model))
    config = getattr(core, "generation_config", None) or GenerationConfig()
    return LanguageModel(LoadedParts(core.info.family, Path(), core, getattr(model, "tokenizer", None), config))


def _check_invariance(model: Any) -> None:
    """Raise if a row's numbers depend on how many rows there are."""
    if not getattr(model, "is_batch_invariant", False):
        where = "on a GPU" if model.device.type == "cuda" else "with these weights"
        raise UnsupportedError(
            f"`batch_invariant` promises the same bits for a request alone and among others, and {where} sums depend "
            "on how many rows a pass has: results are equal up to rounding. Leave it out, or load the model on a CPU "
            "with quantize='int8', where every pass is the C library's"
        )


def _read_count(name: str, value: int | None, usual: int, most: int) -> int:
    if value is None:
        return usual
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise SettingError(f"`{name}` is a whole number from 1 to {most}, not {value!r:.40}")
    return int(value)


def _is_one_prompt(prompts: Any) -> bool:
    return isinstance(prompts, Sequence) and len(prompts) > 0 and isinstance(prompts[0], Integral | dict)


def _make_feeder(streamer: Any, request: Request) -> threading.Thread:
    """A thread that feeds a streamer: one that is slow holds up nobody, one that raises ends its request."""
    emitted = request.open_feed()

    def run() -> None:
        try:
            feed(streamer, request.answer.run, emitted)
        except Exception as error:
            request.fail(error)

    return threading.Thread(target=run, name=f"unspool streamer {request.number}", daemon=True)
