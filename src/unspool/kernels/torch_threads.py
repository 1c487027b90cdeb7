"""How many threads torch's operators take beside the CPU library, which has a team of threads of its own.

After an operator that ran on several threads, OpenMP's threads wait for the next one by spinning, for some ten
milliseconds: the next pass of the library would share its cores with them. Between passes the operators are small
(a row of scores per text), so they run on the calling thread alone, and nothing spins.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Final

import torch

from unspool.forks import after_fork

MOST_ELEMENTS: Final = 1 << 20  # of an operator's tensor; with more, threads gain more than their spinning costs


@lru_cache(maxsize=1)
def _find_setter() -> Callable[[int], object] | None:
    """Sets how many threads torch's operators take if the calling thread runs them; None if nothing can.

    `torch.set_num_threads` would set it for threads to come as well.
    """
    before = torch.get_num_threads()
    try:
        setter: Callable[[int], object] = ctypes.PyDLL(None).omp_set_num_threads
        setter(before + 1)
        is_torchs = torch.get_num_threads() == before + 1
        setter(before)
    except (AttributeError, OSError, TypeError):
        return None
    return setter if is_torchs else None


class _Inside(threading.local):
    """Of a thread: how many threads its operators had before `one_thread`; None outside."""

    all: int | None = None


_inside = _Inside()


_is_child = False  # of a fork


def _stay_alone(_module: object) -> None:
    """In a forked child: OpenMP's threads are not there, and an operator that ran on several would wait for them."""
    global _is_child
    _is_child = True
    torch.set_num_threads(1)


after_fork(sys.modules[__name__], _stay_alone)


def set_torch_threads(number: int) -> None:
    """Let torch's operators take so many threads; in a forked child they have one."""
    if not _is_child:
        torch.set_num_threads(number)


@contextmanager
def one_thread(num_elements: int) -> Iterator[None]:
    """Inside, operators over tensors of so many elements run on this thread alone, except in `all_threads`."""
    set_threads = _find_setter()
    before = torch.get_num_threads()  # first of all: in a new thread, torch sets its number when it is asked for
    if set_threads is None or num_elements > MOST_ELEMENTS or _inside.all is not None or before == 1:
        yield
        return
    set_threads(1)
    _inside.all = before
    try:
        yield
    finally:
        _inside.all = None
        set_threads(1 if _is_child else before)


@contextmanager
def all_threads() -> Iterator[None]:
    """Inside, operators have as many threads as outside `one_thread`: for passes, which the library may refuse."""
    set_threads, number = _find_setter(), _inside.all
    if set_threads is None or number is None:
        yield
        return
    set_threads(1 if _is_child else number)
    _inside.all = None
    try:
        yield
    finally:
        _inside.all = number
        set_threads(1)
