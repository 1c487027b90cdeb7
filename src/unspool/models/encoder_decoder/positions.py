"""Positions of an encoder-decoder: tables that are added to embeddings, and biases by distance."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from unspool.kernels.relative import distance_buckets
from unspool.kernels.sending import send
from unspool.models.encoder_decoder.spec import PositionSpec, RelativeSpec

_FIRST_TABLE = 512  # initial size of a table, in positions or distances


def make_sinusoids(num_positions: int, width: int, *, is_shifted: bool) -> torch.Tensor:
    """Sinusoidal embeddings (Vaswani et al., 2017), sines before cosines: (positions, width) float32."""
    num_sines, num_cosines = -(-width // 2), width // 2
    if is_shifted:  # computed in float32, as the models were trained
        step = math.log(10_000) / max(num_cosines - 1, 1)
        frequencies = torch.exp(torch.arange(num_cosines).float() * -step)
        angles = torch.arange(num_positions).float()[:, None] * frequencies
        table = torch.cat((angles.sin(), angles.cos()), dim=1)
        return F.pad(table, (0, width % 2))
    exponents = 2 * torch.arange(num_sines, dtype=torch.float64) / width
    angles = torch.arange(num_positions, dtype=torch.float64)[:, None] / torch.pow(10_000.0, exponents)
    return torch.cat((angles.sin(), angles[:, :num_cosines].cos()), dim=1).float()


class PositionTable:
    """One side's embeddings of positions; a sinusoidal table that no file has grows when it is too short."""

    def __init__(
        self,
        spec: PositionSpec | None,
        stored: torch.Tensor | None,  # (positions, hidden), where the model has one
        width: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._spec, self._table, self._width = spec, stored, width
        self._device, self._dtype = device, dtype
        self._is_stored = stored is not None

    def reserve(self, stop: int) -> torch.Tensor | None:
        """The table, with at least `stop` positions: row `p + offset` is position `p`'s."""
        spec = self._spec
        if spec is None or self._is_stored:
            return self._table
        needed = stop + spec.offset
        if self._table is None or self._table.shape[0] < needed:
            made = make_sinusoids(max(2 * needed, _FIRST_TABLE), self._width, is_shifted=spec.is_shifted)
            self._table = made.to(self._device, self._dtype)
        return self._table

    def find_counted(self, tokens: torch.Tensor | None, counts: Sequence[int] | None = None) -> torch.Tensor | None:
        """Which of a text's first tokens (rows, new), `counts` of each row, have positions; None if all have."""
        uncounted = None if self._spec is None else self._spec.uncounted_id
        if uncounted is None or tokens is None:
            return None
        counted = tokens.ne(uncounted)
        if counts is not None:
            counted |= torch.arange(tokens.shape[1], device=tokens.device) >= send(counts, tokens.device)[:, None]
        return None if bool(counted.all()) else counted

    def add(
        self, x: torch.Tensor, positions: torch.Tensor, stop: int, counted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Embeddings (rows, new, hidden) with those of their positions (rows or 1, new).

        Of a text's first tokens, those that are not `counted` (rows, new) have none.
        """
        table = self.reserve(stop)
        if table is None or self._spec is None:
            return x
        if counted is not None:
            positions = counted.cumsum(1) - 1
        # What is past a short row's end is never read, so it may have any position.
        found = table[(positions + self._spec.offset).clamp(max=table.shape[0] - 1)]
        return x + (found if counted is None else found * counted[..., None])


class DistanceBiases:
    """Additive biases of attention scores by the distance between query and key, one table per layer or for all."""

    def __init__(self, spec: RelativeSpec, encoder: list[torch.Tensor], decoder: list[torch.Tensor]) -> None:
        """The tables are (buckets, heads), in the order of the layers that have one."""
        self._spec, self._encoder, self._decoder = spec, encoder, decoder
        self._behind: list[torch.Tensor] = []  # (heads, distances): the decoder's
        self._around: list[torch.Tensor] = []  # (heads, 2 * places - 1): the encoder's

    def look_around(self, length: int) -> list[torch.Tensor]:
        """The encoder's biases (1, heads, source, source): one half of the buckets looks back, the other ahead."""
        half, device = self._spec.num_buckets // 2, self._encoder[0].device
        buckets = distance_buckets(length, half, self._spec.max_distance).to(device)
        places = torch.arange(length, device=device)
        ahead = places - places[:, None]  # key - query
        found = buckets[ahead.abs()] + half * (ahead > 0)
        return [table[found].permute(2, 0, 1)[None] for table in self._encoder]

    def tabulate_around(self) -> list[torch.Tensor]:
        """The encoder's biases (heads, 2 * far + 1) in float32: of keys `far` places before a query to `far` after it,
        the first and last for all that are farther."""
        far, half = self._spec.max_distance, self._spec.num_buckets // 2
        buckets = distance_buckets(far + 1, half, far)
        places = torch.cat((buckets.flip(0), half + buckets[1:]))
        return [table[places.to(table.device)].t().float().contiguous() for table in self._encoder]

    def reserve_around(self, length: int) -> list[torch.Tensor]:
        """The encoder's biases (heads, 2 * places - 1) for sources of `length` and more: by how far a key lies behind a
        query, from the farthest ahead on."""
        if not self._around or self._around[0].shape[1] < 2 * length - 1:
            room = max(length, _FIRST_TABLE)
            half = self._spec.num_buckets // 2
            behind = distance_buckets(room, half, self._spec.max_distance)
            places = torch.cat(((half + behind[1:]).flip(0), behind))
            self._around = [table[places.to(table.device)].t().contiguous() for table in self._encoder]
        return self._around

    def reserve(self, stop: int) -> list[torch.Tensor]:
        """The decoder's biases (heads, distances) for at least `stop` distances."""
        if not self._behind or self._behind[0].shape[1] < stop:
            room = max(stop, 2 * self._behind[0].shape[1] if self._behind else _FIRST_TABLE)
            buckets = distance_buckets(room, self._spec.num_buckets, self._spec.max_distance)
            self._behind = [table[buckets.to(table.device)].t().contiguous() for table in self._decoder]
        return self._behind

    def tabulate(self) -> list[torch.Tensor]:
        """The decoder's biases (heads, distances) in float32, the last of them for all greater distances."""
        spec = self._spec
        buckets = distance_buckets(spec.max_distance + 1, spec.num_buckets, spec.max_distance)
        return [table[buckets.to(table.device)].t().float().contiguous() for table in self._decoder]

    def look_back(self, back: torch.Tensor, stop: int) -> list[torch.Tensor]:
        """The decoder's biases (rows, heads, new, keys) for distances (rows, new, keys); those ahead get some value."""
        near = back.clamp(min=0)
        return [table[:, near].transpose(0, 1) for table in self.reserve(stop)]
