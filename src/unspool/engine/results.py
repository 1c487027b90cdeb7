"""Results of many prompts: as many are submitted ahead as are worth it, and those left are cancelled when nobody reads
on."""

from __future__ import annotations

import itertools
import queue
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from unspool.engine.request import Request
from unspool.errors import EngineError

Submit = Callable[[Any], Request | Exception]
"""Submits a prompt; an error where errors are results."""


def results_in_order(prompts: Iterator[Any], submit: Submit, most_ahead: int, returns: bool) -> Iterator[Any]:
    """Results in the order of the prompts."""
    waiting: deque[Request | Exception] = deque()
    try:
        while True:
            while len(waiting) < most_ahead:
                try:
                    prompt = next(prompts)
                except StopIteration:
                    break
                waiting.append(submit(prompt))
            if not waiting:
                return
            yield _find_result(waiting.popleft(), returns)
    finally:
        for left in waiting:
            if isinstance(left, Request):
                left.cancel()


def results_as_they_finish(prompts: Iterator[Any], submit: Submit, most_ahead: int, returns: bool) -> Iterator[Any]:
    """Pairs of a prompt's number and its result, in the order in which they are done."""
    done: queue.SimpleQueue[tuple[int, Request | Exception]] = queue.SimpleQueue()
    running: dict[int, Request | Exception] = {}
    places, has_more = itertools.count(), True
    try:
        while has_more or running:
            while has_more and len(running) < most_ahead:
                try:
                    prompt = next(prompts)
                except StopIteration:
                    has_more = False
                    break
                place, made = next(places), submit(prompt)
                running[place] = made
                if isinstance(made, Request):
                    made.when_done(partial(_put, done, place))
                else:
                    done.put((place, made))
            if running:
                place, made = done.get()
                del running[place]
                yield place, _find_result(made, returns)
    finally:
        for left in running.values():
            if isinstance(left, Request):
                left.cancel()


def _put(done: queue.SimpleQueue[tuple[int, Request | Exception]], place: int, request: Request) -> None:
    done.put((place, request))


def _find_result(made: Request | Exception, returns: bool) -> Any:
    if isinstance(made, Exception):
        return made
    try:
        return made.result()
    except EngineError:
        raise
    except Exception as error:
        if returns:
            return error
        raise
