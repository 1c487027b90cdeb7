"""The processors of code for TensorFlow: `(input_ids, scores, cur_len) -> scores`, inside `tf.function` too."""

from __future__ import annotations

from unspool.frameworks import rules
from unspool.frameworks.arrays import Arrays
from unspool.frameworks.processor import Abstract, ProcessorList
from unspool.frameworks.tensorflow_arrays import open_tensorflow


class TFLogitsProcessor(Abstract):
    """A base to derive processors from: `__call__(input_ids, scores, cur_len)` returns new scores."""

    @staticmethod
    def open_arrays() -> Arrays:
        """TensorFlow's operations."""
        return open_tensorflow()


class TFLogitsWarper(Abstract):
    """A base to derive processors from that shape what is drawn from."""

    @staticmethod
    def open_arrays() -> Arrays:
        """TensorFlow's operations."""
        return open_tensorflow()


class TFLogitsProcessorList(ProcessorList):
    """Processors of TensorFlow's tensors, run in turn."""


class TFTemperatureLogitsWarper(rules.Temperature, TFLogitsWarper):
    """Divides scores by a temperature."""


class TFTopKLogitsWarper(rules.TopK, TFLogitsWarper):
    """Keeps the highest scores, and those that equal the last of them."""


class TFTopPLogitsWarper(rules.TopP, TFLogitsWarper):
    """Keeps the fewest likely tokens whose probabilities reach a sum."""


class TFMinLengthLogitsProcessor(rules.MinLength, TFLogitsProcessor):
    """Forbids the end while the text is shorter than a length."""


class TFRepetitionPenaltyLogitsProcessor(rules.RepetitionPenalty, TFLogitsProcessor):
    """Makes tokens that were written less likely."""


class TFNoBadWordsLogitsProcessor(rules.NoBadWords, TFLogitsProcessor):
    """Forbids sequences of tokens."""


class TFNoRepeatNGramLogitsProcessor(rules.NoRepeatNGram, TFLogitsProcessor):
    """Forbids every token that would end an n-gram the text already has."""


class TFForcedBOSTokenLogitsProcessor(rules.ForcedBOS, TFLogitsProcessor):
    """Forces a token right after the one that the text starts with."""


class TFForcedEOSTokenLogitsProcessor(rules.ForcedEOS, TFLogitsProcessor):
    """Forces an end token as the last one before a length is reached."""


class TFSuppressTokensAtBeginLogitsProcessor(rules.SuppressTokensAtBegin, TFLogitsProcessor):
    """Forbids tokens at the first place that is written."""


class TFSuppressTokensLogitsProcessor(rules.SuppressTokens, TFLogitsProcessor):
    """Forbids tokens everywhere."""


class TFForceTokensLogitsProcessor(rules.ForceTokens, TFLogitsProcessor):
    """Forces tokens at certain places; the others get the lowest finite score."""

    fills_lowest = True
