"""What sketches of a head have in common: which columns are divided by what, and when one is no longer of use."""

from __future__ import annotations

from typing import Final

import torch

from unspool.models.weights import Linear

_FEWEST: Final = 4096  # tokens from which on a sketch is faster than the head itself
_MOST_CLOSE: Final = 1 / 8  # of all tokens that it may leave, or it saves too little
_FIRST: Final = 64  # rows that are chosen before that is judged
_MEASURED: Final = 2048  # rows that show how large columns are
_LARGEST: Final = 60  # powers of two that columns are divided by
_BIAS_ROUNDING: Final = 2.0**-21  # of the largest


class SketchedHead:
    """A head of which a sketch was made: it must not outlive a change of the head, like other copies of weights."""

    def __init__(self, head: Linear) -> None:
        self._head = head
        self._state = self._find_state()
        self._num_close = self._num_chosen = 0

    def is_current(self) -> bool:
        """Whether the head has not moved or changed since."""
        return self._find_state() == self._state

    def note_close(self, num_close: int, num_rows: int) -> bool:
        """Count the tokens that were left in steps of so many rows; whether there are so few that it is worth it."""
        self._num_close += num_close
        self._num_chosen += num_rows
        all_tokens = self._num_chosen * self._head.weight.shape[0]
        return self._num_chosen < _FIRST or self._num_close <= _MOST_CLOSE * all_tokens

    def _find_state(self) -> list[tuple[int, int]]:
        weight, bias = self._head.weight, self._head.bias
        return [(part.data_ptr(), part._version) for part in (weight, bias) if part is not None]


def find_powers(weight: torch.Tensor) -> torch.Tensor:
    """The power of two nearest to the size of each column of a head (tokens, columns): rows whose columns are divided
    by them lose least by rounding."""
    step = -(-weight.shape[0] // _MEASURED)
    norms = torch.linalg.vector_norm(weight[::step].float(), dim=0) / _MEASURED**0.5
    exponents = torch.log2(norms).round().clamp(-_LARGEST, _LARGEST)
    return torch.where(norms > 0, torch.exp2(exponents), torch.ones_like(norms))


def find_margin(bias: torch.Tensor | None) -> float:
    """How far adding a bias may be off by rounding; infinite if that has no limit."""
    if bias is None:
        return 0.0
    finite = bias.detach()[bias.detach() > -torch.inf].float()  # of others the logit is -inf by either product
    return float(finite.abs().amax()) * _BIAS_ROUNDING if finite.numel() else 0.0


def find_rounding(columns: int) -> float:
    """What summing in floats may take from a product of so many columns, by a sketch and by the head: less than this
    for each unit of both norms. The CPU library has the same (csrc/sketches.c)."""
    return 4.0 * (columns + 64) * 2.0**-24


def can_sketch(head: object, dtypes: tuple[torch.dtype, ...]) -> bool:
    """Whether a head has many plain rows of one of these dtypes, and changes of them would be noticed."""
    if not isinstance(head, Linear):
        return False
    weight, bias = head.weight, head.bias
    is_plain = weight.dtype in dtypes and weight.is_contiguous() and not weight.is_inference()
    return is_plain and weight.shape[0] >= _FEWEST and (bias is None or not bias.is_inference())
