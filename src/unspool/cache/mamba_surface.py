"""The states of a MambaCache as releases of transformers from 5.0 on read and write them.

A pass over several tokens calls `update_conv_state` and `update_recurrent_state` in every layer. A step of one token
writes into the tensors that `get_conv_state` and `get_recurrent_state` return, or `layers[i]` holds, and says nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from unspool.cache.stores.states import StateStore
from unspool.errors import UnsupportedError


class StateSurface:
    """What transformers' Mamba models ask of a cache."""

    lengths: list[int]
    num_layers: int
    has_heads: bool  # the recurrence has them, as Mamba-2's does
    _store: StateStore
    _num_assumed = 0  # positions that were counted when states were read, as if a step followed

    @property
    def layers(self) -> Any:
        """The layers, with their states."""
        return [StateLayer(self, layer) for layer in range(self.num_layers)]

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether anything was read."""
        return any(self.lengths)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:  # it has one
        """A layer's window (rows, channels, conv_kernel_size), to be written in place; None before the first pass."""
        if self.has_heads:
            raise UnsupportedError(
                "the states of Mamba-2 lie in another order in unspool's MambaCache than its transformers model writes "
                "them in; leave `cache_params` out, or call unspool.generate(model, …)"
            )
        if not any(self.lengths):
            return None
        if layer_idx == 0:
            self._count(1)
            self._num_assumed = 1
        return self._store.conv[layer_idx].transpose(1, 2)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """A layer's state (rows, channels, state_size), to be written in place."""
        return self._store.ssm[layer_idx].transpose(1, 2) if any(self.lengths) else None

    def _extend_window(self, inputs: torch.Tensor, layer: int) -> torch.Tensor:
        """Append inputs (rows, channels, new) to a layer's window; return the window and all of them after it."""
        if layer == 0:
            if not any(self.lengths):
                self.lengths, self._num_assumed = [0] * inputs.shape[0], 0
            self._count(inputs.shape[2] - self._num_assumed)
            self._num_assumed = 0
        held = self._store.conv[layer]
        whole = torch.cat((held.transpose(1, 2).to(inputs.dtype), inputs), dim=2)
        held.copy_(whole[:, :, -held.shape[1] :].transpose(1, 2))
        return whole

    def update_recurrent_state(
        self,
        recurrent_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,  # a layer has one
        **__: Any,
    ) -> torch.Tensor:
        """Replace a layer's state (rows, channels, state_size); return it."""
        self._store.ssm[layer_idx].copy_(recurrent_states.transpose(1, 2))
        return recurrent_states

    def activate_past_recording(self) -> None:
        """Refused: transformers' drafts are taken back by its own caches."""
        raise UnsupportedError(
            "a MambaCache of unspool's can't take back what a drafter of transformers guessed wrong; leave the cache "
            "out, or call unspool.generate(model, …)"
        )

    def is_recording_past(self, layer_idx: int = 0) -> bool:  # layers are alike
        """Whether more than the last states is kept."""
        return False

    def _count(self, num_new: int) -> None:
        self._store.can_undo = False  # what follows is written over the states
        self.lengths = [length + num_new for length in self.lengths]


class StateLayer:
    """One layer's states, by the names that transformers' layers have."""

    record_past = False

    def __init__(self, cache: StateSurface, layer: int) -> None:
        self._cache = cache
        self._layer = layer

    @property
    def conv_states(self) -> dict[int, torch.Tensor | None]:
        """Its one window."""
        return {0: self._cache.get_conv_state(self._layer)}

    @property
    def recurrent_states(self) -> dict[int, torch.Tensor | None]:
        """Its one state."""
        return {0: self._cache.get_recurrent_state(self._layer)}

    @property
    def has_previous_state(self) -> dict[int, bool]:
        """Whether they were written."""
        return {0: self._cache.has_previous_state()}
