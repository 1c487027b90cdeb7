"""The results that code for TensorFlow and Flax names; their fields are the specification's, in its order."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Self

from unspool.outputs import Output


@dataclass
class TFGreedySearchDecoderOnlyOutput(Output):
    """What a decoder wrote by greedy search."""

    sequences: Any = None
    scores: Any = None
    attentions: Any = None
    hidden_states: Any = None


@dataclass
class TFGreedySearchEncoderDecoderOutput(Output):
    """What an encoder-decoder wrote by greedy search."""

    sequences: Any = None
    scores: Any = None
    encoder_attentions: Any = None
    encoder_hidden_states: Any = None
    decoder_attentions: Any = None
    cross_attentions: Any = None
    decoder_hidden_states: Any = None


@dataclass
class TFSampleDecoderOnlyOutput(TFGreedySearchDecoderOnlyOutput):
    """What a decoder wrote by sampling."""


@dataclass
class TFSampleEncoderDecoderOutput(TFGreedySearchEncoderDecoderOutput):
    """What an encoder-decoder wrote by sampling."""


@dataclass
class TFContrastiveSearchDecoderOnlyOutput(TFGreedySearchDecoderOnlyOutput):
    """What a decoder wrote by contrastive search."""


@dataclass
class TFContrastiveSearchEncoderDecoderOutput(TFGreedySearchEncoderDecoderOutput):
    """What an encoder-decoder wrote by contrastive search."""


@dataclass
class TFBeamSearchDecoderOnlyOutput(Output):
    """What a decoder wrote by beam search."""

    sequences: Any = None
    sequences_scores: Any = None
    scores: Any = None
    beam_indices: Any = None
    attentions: Any = None
    hidden_states: Any = None


@dataclass
class TFBeamSearchEncoderDecoderOutput(Output):
    """What an encoder-decoder wrote by beam search."""

    sequences: Any = None
    sequences_scores: Any = None
    scores: Any = None
    beam_indices: Any = None
    encoder_attentions: Any = None
    encoder_hidden_states: Any = None
    decoder_attentions: Any = None
    cross_attentions: Any = None
    decoder_hidden_states: Any = None


@dataclass
class TFBeamSampleDecoderOnlyOutput(TFBeamSearchDecoderOnlyOutput):
    """What a decoder wrote by beam search that samples."""


@dataclass
class TFBeamSampleEncoderDecoderOutput(TFBeamSearchEncoderDecoderOutput):
    """What an encoder-decoder wrote by beam search that samples."""


@cache
def _register(kind: type[Output], trees: Any) -> None:
    """Let JAX know the parts of an output, once."""

    def take_apart(output: Output) -> tuple[tuple[Any, ...], None]:
        return tuple(getattr(output, field.name) for field in fields(output)), None

    def put_together(_: None, parts: tuple[Any, ...]) -> Output:
        return kind(*parts)

    trees.register_pytree_node(kind, take_apart, put_together)


@dataclass
class FlaxGreedySearchOutput(Output):
    """What was written by greedy search."""

    sequences: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (jax := sys.modules.get("jax")) is not None:  # so that functions that it compiles may return one
            _register(type(self), jax.tree_util)

    def replace(self, **changes: Any) -> Self:
        """Another output, with some fields changed."""
        return replace(self, **changes)


@dataclass
class FlaxSampleOutput(FlaxGreedySearchOutput):
    """What was written by sampling."""


@dataclass
class FlaxBeamSearchOutput(FlaxGreedySearchOutput):
    """What was written by beam search, and the log-probability of each sequence."""

    scores: Any = None
