"""Waiting for kernels that are about to be compiled."""

from __future__ import annotations

import sys
import threading
import time

from unspool.kernels.preparations import (
    announce_preparation,
    begin_short_turns,
    end_preparation,
    end_short_turns,
    wait_for_preparations,
)


def test_those_who_wait_go_on_once_all_that_was_announced_has_begun() -> None:
    wait_for_preparations()  # nothing was announced
    first, second = announce_preparation(), announce_preparation()
    log: list[str] = []

    def begin() -> None:
        for event in (first, second):
            time.sleep(0.02)
            log.append("begun")
            end_preparation(event)

    thread = threading.Thread(target=begin)
    thread.start()
    wait_for_preparations()
    assert log == ["begun", "begun"]
    thread.join()
    end_preparation(first)  # again, as an error's clean-up does
    wait_for_preparations()


def test_turns_are_short_while_somebody_wants_them() -> None:
    usual = sys.getswitchinterval()
    begin_short_turns()
    begin_short_turns()
    assert sys.getswitchinterval() < usual
    end_short_turns()
    assert sys.getswitchinterval() < usual
    end_short_turns()
    assert sys.getswitchinterval() == usual
