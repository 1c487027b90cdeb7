"""An encoder's pass in one call of the CPU library: all layers over sources of different lengths, without padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Protocol

import torch

from unspool.kernels.cpu import Library, find_library
from unspool.kernels.cpu.library import CHUNK
from unspool.kernels.cpu.structures import CLayer, CModel
from unspool.kernels.cpu.tiles import TILE
from unspool.kernels.torch_threads import one_thread
from unspool.models.decoder.layers import Layer
from unspool.models.encoder_decoder.layers import Stack
from unspool.models.encoder_decoder.positions import DistanceBiases
from unspool.models.encoder_decoder.spec import StackSpec
from unspool.models.paths.library_encoder import EncoderProducts
from unspool.models.paths.library_model import ACTIVATIONS, describe_norm, describe_product
from unspool.models.paths.library_narrow import NarrowCopies
from unspool.models.weights import AnyLinear, Linear, PackedLinear, find_addresses, iterate_tensors

_MOST_TOGETHER: Final = 4096  # tokens of sources in one call, whose working memory is up to 100 KB for each


class EncoderShape(Protocol):
    """What an encoder's layers are, beside their weights."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def encoder(self) -> StackSpec: ...
    @property
    def activation(self) -> str: ...
    @property
    def is_gated(self) -> bool: ...
    @property
    def is_norm_first(self) -> bool: ...


class LibraryEncoder:
    """Runs an encoder's layers, described again whenever its tensors have moved or their copies have changed."""

    def __init__(
        self, spec: EncoderShape, stack: Stack, biases: DistanceBiases | None, products: EncoderProducts
    ) -> None:
        self._spec, self._stack, self._biases, self._products = spec, stack, biases, products
        self._kept = list(iterate_tensors(stack.layers))
        self._made: tuple[object, CModel] | None = None  # the structs, and what they were made for
        self._kinds = {type(linear) for linear in _list_linears(stack)}

    def run(self, x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor | None:
        """Final states (tokens, hidden) of embeddings (tokens, hidden) of sources that lie one behind the other; None
        if torch's operators are as fast, or must do it."""
        library, copies = find_library(), self._products.find_copies()
        if library is None or not self._is_read(library, copies, len(x)):
            return None
        with one_thread(0):  # small operators
            model = self._describe(copies, max(lengths))
        states, first = x.contiguous().clone(), 0
        for counts in _list_groups(lengths):
            library.encode(model, states[first : first + sum(counts)], counts)
            first += sum(counts)
        return states

    def _is_read(self, library: Library, copies: NarrowCopies | None, num_tokens: int) -> bool:
        """Whether the library has these layers, and reads every matrix as fast as torch does."""
        spec, stack = self._spec, self._spec.encoder
        if spec.activation not in ACTIVATIONS or not self._kinds <= {Linear, PackedLinear}:
            return False
        if spec.is_gated and stack.ffn_size % TILE and PackedLinear in self._kinds:
            return False  # gates and values would not begin at tiles of their own
        if self._kinds == {PackedLinear} or num_tokens <= _find_most_float(library):
            return True
        return copies is not None and all(
            isinstance(linear, Linear) and copies.find(linear.weight) is not None
            for linear in _list_linears(self._stack)
        )

    def _describe(self, copies: NarrowCopies | None, longest: int) -> CModel:
        tables = [] if self._biases is None else self._biases.reserve_around(longest)
        state = (find_addresses(self._kept), find_addresses(tables), copies)
        if self._made is not None and self._made[0] == state:
            return self._made[1]
        spec, stack = self._spec, self._stack
        self._tables, self._copies = tables, copies  # the structs point to them
        self._layers = (CLayer * len(stack.layers))()
        for index, layer in enumerate(stack.layers):
            self._layers[index] = self._describe_layer(layer, copies)
            if tables:
                self._layers[index].biases = tables[min(index, len(tables) - 1)].data_ptr()
        model = CModel(
            num_layers=len(stack.layers),
            hidden=spec.hidden_size,
            num_heads=spec.encoder.num_heads,
            num_kv_heads=spec.encoder.num_heads,
            head_dim=spec.encoder.head_dim,
            ffn=spec.encoder.ffn_size,
            is_gated=spec.is_gated,
            activation=ACTIVATIONS[spec.activation],
            is_post=not spec.is_norm_first,
            num_distances=tables[0].shape[1] // 2 + 1 if tables else 0,
            final_norm=describe_norm(stack.final_norm),
            layers=self._layers,
        )
        self._made = (state, model)
        return model

    def _describe_layer(self, layer: Layer, copies: NarrowCopies | None) -> CLayer:
        made = CLayer(
            attn_norm=describe_norm(layer.attn_norm),
            ffn_norm=describe_norm(layer.ffn_norm),
            has_ffn_norm=True,
            scale=self._spec.encoder.attention_scale,
        )
        made.qkv, made.out, made.up, made.down = (
            describe_product(linear, copies) for linear in (layer.qkv, layer.out, layer.up, layer.down)
        )
        return made


def _list_groups(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Sources side by side that are read in one call."""
    group: list[int] = []
    for length in lengths:
        if group and sum(group) + length > _MOST_TOGETHER:
            yield group
            group = []
        group.append(length)
    yield group


def _list_linears(stack: Stack) -> list[AnyLinear]:
    return [linear for layer in stack.layers for linear in (layer.qkv, layer.out, layer.up, layer.down)]


def _find_most_float(library: Library) -> int:
    """Tokens of sources; for many more of them torch's products of plain floats are as fast."""
    return 8 * CHUNK if library.instructions == "avx512" else CHUNK
