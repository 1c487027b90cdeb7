"""From the driving thread to tasks of an event loop."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import Any

from unspool.engine.mailbox import Mailbox, Usher


def test_a_step_wakes_the_loop_once_for_all_streams() -> None:
    """Every reader gets its item, and the loop is called once while it has not looked."""
    calls: list[Any] = []

    async def read() -> list[int | None]:
        loop = asyncio.get_running_loop()
        call = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *given, **named: (calls.append(given), call(*given, **named))[1]
        boxes = [Mailbox[int]() for _ in range(8)]
        readers = [asyncio.create_task(box.get_async()) for box in boxes]
        await asyncio.sleep(0)

        def deliver() -> None:
            for number, box in enumerate(boxes):
                box.put(number)

        thread = threading.Thread(target=deliver)
        thread.start()
        thread.join()  # the loop can't look before all are delivered
        return await asyncio.gather(*readers)

    assert asyncio.run(read()) == list(range(8))
    assert len(calls) == 1


def test_no_item_is_missed_between_threads() -> None:
    """Items that come while the loop looks wake it again; each stream has all of its own, in order."""
    boxes = [Mailbox[int]() for _ in range(5)]

    def deliver() -> None:
        for number in range(400):
            for box in boxes:
                box.put(number)
        for box in boxes:
            box.close()

    async def read(box: Mailbox[int]) -> list[int]:
        made = []
        while (one := await box.get_async()) is not None:
            made.append(one)
        return made

    async def read_all() -> list[list[int]]:
        thread = threading.Thread(target=deliver)
        thread.start()
        made = await asyncio.wait_for(asyncio.gather(*map(read, boxes)), 60)
        thread.join()
        return made

    assert asyncio.run(read_all()) == [list(range(400))] * 5


def test_a_loop_that_has_ended_is_let_go() -> None:
    box, loops = Mailbox[int](), list[Any]()

    async def leave() -> None:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        reader = asyncio.create_task(box.get_async())
        await asyncio.sleep(0)
        reader.cancel()

    asyncio.run(leave())
    box.put(1)  # the one who waited is no longer there
    box.close()
    gc.collect()
    assert loops[0]() is None
    assert box.get() == 1


def test_threads_are_woken_in_turn_and_take_what_has_gathered() -> None:
    """Of many readers a step wakes some, those that have waited longest first; nothing is lost, nobody forgotten."""
    boxes, usher = [Mailbox[int]() for _ in range(40)], Usher()
    made: list[list[int]] = [[] for _ in boxes]
    wakes = [0] * len(boxes)

    def read(number: int) -> None:
        while (one := boxes[number].get()) is not None:
            made[number].append(one)

    for number, box in enumerate(boxes):
        wake = box.wake

        def count(number: int = number, wake: Any = wake) -> None:
            wakes[number] += 1
            wake()

        box.wake = count  # type: ignore[method-assign]
    threads = [threading.Thread(target=read, args=(number,)) for number in range(len(boxes))]
    for thread in threads:
        thread.start()
    steps = 60
    for step in range(steps):
        for box in boxes:
            if box.push(step):
                usher.add(box)
        usher.wake()
    usher.wake(everybody=True)
    for box in boxes:
        box.close()
    for thread in threads:
        thread.join(30)
    assert made == [list(range(steps))] * len(boxes)
    assert max(wakes) < steps // 2  # and not once for each item


def test_a_loop_lets_others_run_between_the_tasks_that_it_wakes() -> None:
    """What a step wrote for many tasks wakes them in rounds of the loop, not all in one."""
    boxes, rounds = [Mailbox[int]() for _ in range(100)], []

    async def read(box: Mailbox[int]) -> None:
        assert await box.get_async() == 7
        rounds.append(number)

    number = 0

    async def count() -> None:
        nonlocal number
        while len(rounds) < len(boxes):
            number += 1
            await asyncio.sleep(0)

    async def read_all() -> None:
        tasks = [asyncio.create_task(read(box)) for box in boxes]
        await asyncio.sleep(0)
        thread = threading.Thread(target=lambda: [box.push(7) for box in boxes])
        thread.start()
        thread.join()
        await asyncio.gather(*tasks, count())

    asyncio.run(asyncio.wait_for(read_all(), 30))
    assert len(rounds) == len(boxes) and len(set(rounds)) >= 100 // 16
