"""Changing the rate of a sound: a polyphase low-pass filter (a sinc under a Kaiser window), block by block."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F

LOBES = 24  # zero crossings of the sinc on either side, in samples of the lower rate
ROLL_OFF = 0.945  # of the lower rate's half: what lies above is damped
BETA = 10.0  # of the Kaiser window: 100 dB
_MOST_PHASES = 1024  # beyond, a table of all phases is larger than the work that it saves


class Resampler:
    """Mono samples at one rate in, at another rate out: blocks may be cut anywhere, the result is the same."""

    def __init__(self, rate_in: int, rate_out: int) -> None:
        shared = math.gcd(rate_in, rate_out)
        self._up, self._down = rate_out // shared, rate_in // shared
        slowest = min(1.0, rate_out / rate_in)
        self._cutoff = slowest * ROLL_OFF
        self._half = math.ceil(LOBES / slowest)  # input samples on either side of an output
        self._kernel = 2 * self._half + self._down  # what the outputs of one period read
        self._table = self._make_table() if self._up <= _MOST_PHASES else None
        self._held = np.zeros(self._half, np.float32)  # input from sample `self._period * down - half` on
        self._period = 0  # periods that were written: `up` outputs and `down` inputs each
        self._num_in = 0

    def push(self, block: np.ndarray) -> np.ndarray:
        """The outputs that this block completes."""
        if self._up == self._down:
            return block
        self._num_in += len(block)
        self._held = np.concatenate((self._held, block))
        return self._write((len(self._held) - self._kernel) // self._down + 1)

    def finish(self) -> np.ndarray:
        """The rest, with silence after the end."""
        if self._up == self._down:
            return np.zeros(0, np.float32)
        total = -(-self._num_in * self._up // self._down)
        left = total - self._period * self._up
        num_periods = max(0, -(-left // self._up))
        room = (num_periods - 1) * self._down + self._kernel - len(self._held)
        self._held = np.concatenate((self._held, np.zeros(max(0, room), np.float32)))
        return self._write(num_periods)[:left]

    def _write(self, num_periods: int) -> np.ndarray:
        if num_periods <= 0:
            return np.zeros(0, np.float32)
        used = self._held[: (num_periods - 1) * self._down + self._kernel]
        made = self._write_rarely(used, num_periods) if self._table is None else self._write_by_table(used)
        self._held = self._held[num_periods * self._down :]
        self._period += num_periods
        return made

    def _write_by_table(self, used: np.ndarray) -> np.ndarray:
        assert self._table is not None
        made = F.conv1d(torch.from_numpy(used)[None, None], self._table, stride=self._down)  # (1, up, periods)
        return made[0].t().reshape(-1).numpy()

    def _write_rarely(self, used: np.ndarray, num_periods: int) -> np.ndarray:
        """The same without a table, for rates that share no large divisor."""
        out = np.arange(num_periods * self._up)
        made = np.empty(len(out), np.float32)
        for first in range(0, len(out), 4096):
            place = out[first : first + 4096] * self._down
            base, offset = place // self._up, (place % self._up) / self._up
            reach = np.arange(2 * self._half)
            weights = self._shape(reach - self._half - offset[:, None])
            made[first : first + 4096] = (used[base[:, None] + reach] * weights).sum(-1)
        return made

    def _make_table(self) -> torch.Tensor:
        offset = np.arange(self._up)[:, None] * self._down / self._up
        table = self._shape(np.arange(self._kernel)[None] - self._half - offset)
        return torch.from_numpy(table.astype(np.float32))[:, None]  # (up, 1, kernel)

    def _shape(self, distance: np.ndarray) -> np.ndarray:
        """The filter's response at a distance in input samples."""
        share = np.clip(1 - (distance / self._half) ** 2, 0, None)
        window = np.i0(BETA * np.sqrt(share)) / np.i0(BETA) * (share > 0)
        response: np.ndarray = self._cutoff * np.sinc(self._cutoff * distance) * window
        return response
