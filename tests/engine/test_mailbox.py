"""From the driving thread to tasks of an event loop."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import Any

from unspool.engine.mailbox import Mailbox


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
