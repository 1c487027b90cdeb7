"""The few operations that processors need and that array libraries name differently; the rest are operators."""

from __future__ import annotations

from typing import Any, Protocol

Array = Any  # a torch.Tensor, a tf.Tensor or a jax.Array, which may be traced


class Arrays(Protocol):
    """One library's operations. Ids and places are 32-bit integers; axes are the last one, shapes (rows, …)."""

    def ids(self, values: Any, like: Array) -> Array:
        """Whole numbers as an array, where `like` is."""
        ...

    def places(self, like: Array) -> Array:
        """0, 1, 2 … for every place of the last axis."""
        ...

    def full(self, scores: Array, value: float) -> Array:
        """A number in the scores' shape and dtype."""
        ...

    def where(self, condition: Array, yes: Any, no: Array) -> Array:
        """`yes`, a number or an array, where the condition holds."""
        ...

    def lowest(self, scores: Array) -> float:
        """The lowest finite number of the scores' dtype."""
        ...

    def all(self, condition: Array) -> Array:
        """Whether a condition holds along the last axis."""
        ...

    def sort_down(self, scores: Array) -> tuple[Array, Array]:
        """The scores from the highest down, and where each stood; of equal ones the first comes first."""
        ...

    def unsort(self, values: Array, order: Array) -> Array:
        """What was sorted, back where it stood."""
        ...

    def sum_up(self, scores: Array) -> Array:
        """The probabilities of scores, each with those before it."""
        ...

    def logsumexp(self, scores: Array) -> Array:
        """The logarithm of the sum of exponentials, (rows, 1)."""
        ...

    def max(self, scores: Array) -> Array:
        """The highest score, (rows, 1)."""
        ...

    def columns(self, ids: Array, at: Array) -> Array:
        """The columns at places (n,), which are inside."""
        ...

    def mark(self, ids: Array, is_on: Array, vocab: int) -> Array:
        """For each row which tokens of the vocabulary stand among its ids (rows, n) where `is_on`."""
        ...
