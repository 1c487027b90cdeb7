"""TensorFlow's operations, imported when the first processor is made."""

from __future__ import annotations

from functools import cache
from typing import Any

from unspool.errors import MissingExtraError
from unspool.frameworks.arrays import Array, Arrays


class _TensorFlowArrays:
    def __init__(self, library: Any) -> None:
        self._tf = library

    def ids(self, values: Any, like: Array) -> Array:
        return self._tf.cast(values, self._tf.int32)

    def places(self, like: Array) -> Array:
        return self._tf.range(self._tf.shape(like)[-1])

    def full(self, scores: Array, value: float) -> Array:
        return self._tf.fill(self._tf.shape(scores), self._tf.cast(value, scores.dtype))

    def where(self, condition: Array, yes: Any, no: Array) -> Array:
        return self._tf.where(condition, self._tf.cast(yes, no.dtype), no)

    def lowest(self, scores: Array) -> float:
        return float(scores.dtype.min)

    def all(self, condition: Array) -> Array:
        return self._tf.reduce_all(condition, axis=-1)

    def sort_down(self, scores: Array) -> tuple[Array, Array]:
        values, order = self._tf.math.top_k(scores, k=self._tf.shape(scores)[-1])
        return values, order

    def unsort(self, values: Array, order: Array) -> Array:
        return self._tf.gather(values, self._tf.argsort(order, axis=-1), axis=-1, batch_dims=len(values.shape) - 1)

    def sum_up(self, scores: Array) -> Array:
        return self._tf.cumsum(self._tf.nn.softmax(scores, axis=-1), axis=-1)

    def logsumexp(self, scores: Array) -> Array:
        return self._tf.reduce_logsumexp(scores, axis=-1, keepdims=True)

    def max(self, scores: Array) -> Array:
        return self._tf.reduce_max(scores, axis=-1, keepdims=True)

    def columns(self, ids: Array, at: Array) -> Array:
        return self._tf.gather(ids, at, axis=-1)

    def mark(self, ids: Array, is_on: Array, vocab: int) -> Array:
        rows = self._tf.range(self._tf.shape(ids)[0])[:, None] + self._tf.zeros_like(ids)
        counted = self._tf.zeros((self._tf.shape(ids)[0], vocab), self._tf.int32)
        places = self._tf.stack((rows, ids), axis=-1)
        return self._tf.tensor_scatter_nd_max(counted, places, self._tf.cast(is_on, self._tf.int32)) > 0


@cache
def open_tensorflow() -> Arrays:
    """TensorFlow's operations; raises where it is not installed."""
    try:
        import tensorflow
    except ImportError as error:
        raise MissingExtraError("tensorflow", "tensorflow", "A processor of TensorFlow's tensors") from error
    return _TensorFlowArrays(tensorflow)
