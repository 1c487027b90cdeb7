"""Replicas, a router and a clock."""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Sequence

from simulator.arrivals import Arrival, make_arrivals
from simulator.book import Book, Result, find_part
from simulator.replica import Machine, Replica


class Simulation:
    """Replicas, a router and a clock."""

    def __init__(
        self,
        machine: Machine,
        requests: Sequence[Arrival],
        *,
        replicas: int = 1,
        router: str = "two",
        failure_hours: float = 0.0,
        repair_seconds: float = 60.0,
        max_waiting: int = 4096,
        seed: int = 0,
    ) -> None:
        span = requests[-1].at if requests else 1.0
        self.book = Book(requests, max(span / 200, 1e-3))
        self.replicas = [Replica(machine, self.book, max_waiting) for _ in range(replicas)]
        self._requests, self._router = requests, router
        self._rng, self._chance = random.Random(seed + 3), random.Random(seed + 4)
        self._mean_life, self._repair = failure_hours * 3600, repair_seconds
        self._events: list[tuple[float, int, str, int]] = []  # when, a number, what, and which replica
        self._count, self._turn = 0, 0
        self._up = list(range(replicas))
        self._homeless: list[int] = []  # requests that came while no replica was up
        self._generation = [0] * replicas  # of a replica: what was to end before it failed does not
        self._up_seconds, self._up_since = 0.0, [0.0] * replicas

    def run(self) -> Result:
        """Let all requests come and end."""
        started, now, place = time.process_time(), 0.0, 0
        if self._mean_life:
            for which in range(len(self.replicas)):
                self._push(self._chance.expovariate(1 / self._mean_life), "fail", which)
        requests, events = self._requests, self._events
        while len(self.book.latencies) + self.book.refused < len(requests):
            if place < len(requests) and (not events or requests[place].at <= events[0][0]):
                now = requests[place].at
                self._route(place, now)
                place += 1
                continue
            now, _, what, which = heapq.heappop(events)
            self._handle(now, what, which)
        return self._sum_up(now, time.process_time() - started)

    def _push(self, at: float, what: str, which: int) -> None:
        self._count += 1
        heapq.heappush(self._events, (at, self._count, what, which))

    def _handle(self, now: float, what: str, which: int) -> None:
        replica = self.replicas[which]
        if what == "fail":
            self._fail(now, which)
        elif what == "repair":
            replica.is_up, self._up_since[which] = True, now
            self._up = sorted([*self._up, which])
            self._push(now + self._chance.expovariate(1 / self._mean_life), "fail", which)
            homeless, self._homeless = self._homeless, []
            for number in homeless:
                self._route(number, now)
        elif what == f"pass {self._generation[which]}":
            replica.end(now)
            self._begin(which, now)

    def _fail(self, now: float, which: int) -> None:
        self.book.failures += 1
        self._generation[which] += 1
        self._up_seconds += now - self._up_since[which]
        self._up.remove(which)
        had = self.replicas[which].fail(now)
        self.book.retried += len(had)
        for number in had:
            self.book.firsts.pop(number, None)  # the client gets an error, or nothing yet: it asks again
            self._route(number, now)
        self._push(now + self._repair, "repair", which)

    def _route(self, number: int, now: float) -> None:
        """Hand a request to a replica: the emptier of two, of all, or the next."""
        up = self._up
        if not up:
            self._homeless.append(number)
            return
        if self._router == "next":
            which = up[self._turn % len(up)]
            self._turn += 1
        elif self._router == "two" and len(up) > 2:
            which = min(self._rng.sample(up, 2), key=lambda place: len(self.replicas[place]))
        else:
            which = min(up, key=lambda place: len(self.replicas[place]))
        if not self.replicas[which].add(number, self._requests[number], now):
            self.book.refused += 1
        elif not self.replicas[which].is_busy:
            self._begin(which, now)

    def _begin(self, which: int, now: float) -> None:
        ends = self.replicas[which].begin(now)
        if ends is not None:
            self._push(ends, f"pass {self._generation[which]}", which)

    def _sum_up(self, now: float, took: float) -> Result:
        book = self.book
        up = self._up_seconds + sum(
            now - since for since, one in zip(self._up_since, self.replicas, strict=True) if one.is_up
        )
        busy = sum(one.count_busy_seconds(now) for one in self.replicas)
        latencies, waits, between = sorted(book.latencies), sorted(book.waits), sorted(book.between)
        return Result(
            requests=len(self._requests),
            done=len(latencies),
            refused=book.refused,
            replicas=len(self.replicas),
            seconds=now,
            utilisation=busy / max(up, 1e-9),
            rows=book.row_passes / max(1, book.passes),
            tokens_per_second=book.new_tokens / max(now, 1e-9),
            latency_p50=find_part(latencies, 0.5),
            latency_p99=find_part(latencies, 0.99),
            latency_mean=sum(latencies) / max(1, len(latencies)),
            first_p50=find_part(waits, 0.5),
            first_p99=find_part(waits, 0.99),
            between_p50=find_part(between, 0.5),
            between_p99=find_part(between, 0.99),
            preemptions=book.preemptions,
            failures=book.failures,
            retried=book.retried,
            passes=book.passes,
            took=took,
        )


def find_capacity(machine: Machine, prompt: str, new: str, seed: int = 0) -> float:
    """Requests a second that one replica answers if there are always more: what a load of 1 is."""
    lengths = make_arrivals(max(400, 16 * machine.max_rows), 1e9, prompt, new, seed)
    simulation = Simulation(machine, lengths, max_waiting=1 << 20, seed=seed)
    simulation.run()
    ends = sorted(simulation.book.latencies)  # all came at once; beginning and end, with rows to spare, are left out
    return len(ends) // 2 / (ends[len(ends) * 3 // 4] - ends[len(ends) // 4])
