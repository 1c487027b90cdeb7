"""The work of a Mamba-2's captured step: four kernels a layer."""

from __future__ import annotations

import torch

from unspool.models.mamba.second_weights import Mamba2Layer, Mamba2Spec, Mamba2Weights
from unspool.models.paths.captured_states import StateWork

_Buffers = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class HeadWork(StateWork):
    """A Mamba-2's step for one number of rows."""

    _spec: Mamba2Spec

    def __init__(self, spec: Mamba2Spec, weights: Mamba2Weights, buffers: _Buffers, dtype: torch.dtype) -> None:
        super().__init__(spec, weights, buffers, dtype)
        self._projected = self._make(spec.inner_size + spec.conv_size + spec.num_heads)
        self._mixed = self._make(spec.conv_size, torch.float32)
        self._rounded, self._read = self._make(spec.conv_size), self._make(spec.inner_size)

    def _mix(self, layer: Mamba2Layer, states: _Buffers) -> None:
        from unspool.kernels.gpu.products.product import multiply
        from unspool.kernels.gpu.state_step import convolve_step, feed_heads_step

        spec, space, projected = self._spec, layer.space, self._projected
        conv, next_conv, ssm, next_ssm = states
        self._multiply_normed(layer.project_in, layer.norm, projected)
        inputs, times = projected[:, spec.inner_size :], projected[:, spec.inner_size + spec.conv_size :]
        convolve_step(inputs, conv, next_conv, space.conv, space.conv_bias, self._mixed, self._rounded)
        feed_heads_step(
            projected,
            times,
            self._mixed,
            ssm,
            next_ssm,
            space.decay,
            space.time_bias,
            space.skip,
            self._read,
            spec.num_groups,
            (spec.least_time, spec.most_time),
        )
        gated = layer.gated_norm
        multiply(
            layer.out.operand,
            self._read,
            self._x,
            norm=gated.weight,
            eps=gated.eps,
            bias=layer.out.bias,
            adds=True,
        )
