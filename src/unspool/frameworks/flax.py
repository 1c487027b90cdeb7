"""The processors of code for Flax: `(input_ids, scores, cur_len) -> scores` over JAX's arrays, inside `jax.jit` too."""

from __future__ import annotations

from unspool.frameworks import rules
from unspool.frameworks.arrays import Arrays
from unspool.frameworks.jax_arrays import open_jax
from unspool.frameworks.processor import Abstract, ProcessorList


class FlaxLogitsProcessor(Abstract):
    """A base to derive processors from: `__call__(input_ids, scores, cur_len)` returns new scores."""

    @staticmethod
    def open_arrays() -> Arrays:
        """JAX's operations."""
        return open_jax()


class FlaxLogitsWarper(Abstract):
    """A base to derive processors from that shape what is drawn from."""

    @staticmethod
    def open_arrays() -> Arrays:
        """JAX's operations."""
        return open_jax()


class FlaxLogitsProcessorList(ProcessorList):
    """Processors of JAX's arrays, run in turn."""


class FlaxTemperatureLogitsWarper(rules.Temperature, FlaxLogitsWarper):
    """Divides scores by a temperature."""


class FlaxTopKLogitsWarper(rules.TopK, FlaxLogitsWarper):
    """Keeps so many of the highest scores; of equal ones the first."""

    keeps_ties = False


class FlaxTopPLogitsWarper(rules.TopP, FlaxLogitsWarper):
    """Keeps the fewest likely tokens whose probabilities reach a sum."""


class FlaxMinLengthLogitsProcessor(rules.MinLength, FlaxLogitsProcessor):
    """Forbids the end until the text is longer than a length."""

    is_inclusive = True


class FlaxForcedBOSTokenLogitsProcessor(rules.ForcedBOS, FlaxLogitsProcessor):
    """Forces a token right after the one that the text starts with."""


class FlaxForcedEOSTokenLogitsProcessor(rules.ForcedEOS, FlaxLogitsProcessor):
    """Forces an end token as the last one before a length is reached."""


class FlaxSuppressTokensAtBeginLogitsProcessor(rules.SuppressTokensAtBegin, FlaxLogitsProcessor):
    """Forbids tokens at the first place that is written."""


class FlaxSuppressTokensLogitsProcessor(rules.SuppressTokens, FlaxLogitsProcessor):
    """Forbids tokens everywhere."""


class FlaxForceTokensLogitsProcessor(rules.ForceTokens, FlaxLogitsProcessor):
    """Forces tokens at certain places."""


class FlaxWhisperTimeStampLogitsProcessor(rules.WhisperTimestamps, FlaxLogitsProcessor):
    """Keeps timestamps in pairs, and prefers them where they are likelier than text."""
