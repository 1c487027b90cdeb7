"""The work of a captured step: on fused kernels if they know the model's blocks, else on torch's operators."""

from __future__ import annotations

from functools import partial

import torch

from unspool.kernels.activations import find_activation
from unspool.models.decoder.layers import DecoderWeights, Layer
from unspool.models.decoder.plain_block import embed, finish, run_block
from unspool.models.decoder.spec import DecoderSpec
from unspool.models.paths.captured_body import Body, StepInputs, find_positions
from unspool.models.paths.captured_fused import FusedBody, can_fuse
from unspool.models.paths.captured_parted import PartedBody
from unspool.models.paths.captured_shape import PassShape


def make_body(
    spec: DecoderSpec, weights: DecoderWeights, device: torch.device, dtype: torch.dtype, shape: PassShape
) -> Body:
    """The fastest body that a model's blocks allow."""
    kind = PartedBody if shape.most_keys else FusedBody if can_fuse(spec) else PlainBody
    return kind(spec, weights, device, dtype, shape)


class PlainBody(Body):
    """Any block of the configurable decoder, operator by operator, as `Decoder` runs it."""

    def __init__(
        self, spec: DecoderSpec, weights: DecoderWeights, device: torch.device, dtype: torch.dtype, shape: PassShape
    ) -> None:
        super().__init__(spec, weights, device, dtype, shape)
        self._activate = find_activation(spec.activation)

    def run(self, inputs: StepInputs, logits: torch.Tensor) -> None:
        shape, weights = self._shape, self._weights
        self._begin(inputs)
        places = find_positions(shape, inputs)
        x = embed(self._spec, weights, inputs.tokens.clamp(min=0), places, self._dtype)
        for index, layer in enumerate(self._layers):
            self._keep_early(index, x)
            attend = partial(self._attend, index, layer, inputs=inputs)
            feed = partial(self._feed_mixture, layer, inputs) if layer.mixture is not None else None
            x = run_block(self._spec, layer, x, attend, self._activate, feed)
        self.states[: shape.num_tokens].copy_(finish(weights, x))
        logits.copy_(weights.head(self.states))

    def _feed_mixture(self, layer: Layer, inputs: StepInputs, x: torch.Tensor) -> torch.Tensor:
        """The experts' output for normalised states."""
        assert self._mixture is not None
        made = torch.zeros_like(x)
        self._mixture.feed(layer, x, made, inputs.lengths)
        return made
