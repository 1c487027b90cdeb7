"""JAX's operations, imported when the first processor is made."""

from __future__ import annotations

from functools import cache
from typing import Any

from unspool.errors import MissingExtraError
from unspool.frameworks.arrays import Array, Arrays


class _JaxArrays:
    def __init__(self, library: Any) -> None:
        self._jax = library
        self._jnp = library.numpy

    def ids(self, values: Any, like: Array) -> Array:
        return self._jnp.asarray(values).astype(self._jnp.int32)

    def places(self, like: Array) -> Array:
        return self._jnp.arange(like.shape[-1], dtype=self._jnp.int32)

    def full(self, scores: Array, value: float) -> Array:
        return self._jnp.full_like(scores, value)

    def where(self, condition: Array, yes: Any, no: Array) -> Array:
        return self._jnp.where(condition, self._jnp.asarray(yes, no.dtype), no)

    def lowest(self, scores: Array) -> float:
        return float(self._jnp.finfo(scores.dtype).min)

    def all(self, condition: Array) -> Array:
        return self._jnp.all(condition, axis=-1)

    def sort_down(self, scores: Array) -> tuple[Array, Array]:
        values, order = self._jax.lax.top_k(scores, scores.shape[-1])
        return values, order

    def unsort(self, values: Array, order: Array) -> Array:
        return self._jax.lax.sort_key_val(order, values)[1]

    def sum_up(self, scores: Array) -> Array:
        return self._jax.nn.softmax(scores, axis=-1).cumsum(axis=-1)

    def logsumexp(self, scores: Array) -> Array:
        return self._jax.nn.logsumexp(scores, axis=-1, keepdims=True)

    def max(self, scores: Array) -> Array:
        return self._jnp.max(scores, axis=-1, keepdims=True)

    def columns(self, ids: Array, at: Array) -> Array:
        return self._jnp.take(ids, at, axis=-1)

    def mark(self, ids: Array, is_on: Array, vocab: int) -> Array:
        rows = self._jnp.arange(ids.shape[0])[:, None]
        return self._jnp.zeros((ids.shape[0], vocab), bool).at[rows, ids].max(is_on)


@cache
def open_jax() -> Arrays:
    """JAX's operations; raises where it is not installed."""
    try:
        import jax
    except ImportError as error:
        raise MissingExtraError("jax", "jax", "A processor of JAX's arrays") from error
    return _JaxArrays(jax)
