"""A token classifier: a plain encoder, and what it makes of every token of a text."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unspool.errors import InputError
from unspool.kernels.activations import find_activation
from unspool.kernels.attention import attend
from unspool.models.decoder.layers import Layer
from unspool.models.encoder.spec import EncoderSpec
from unspool.models.encoder.weights import ClassifierWeights
from unspool.models.paths.library import PACKING_LIMIT
from unspool.models.paths.library_encoder import EncoderProducts
from unspool.models.paths.library_encoding import LibraryEncoder
from unspool.models.weights import Norm, iterate_tensors
from unspool.shortage import explain_shortage


class TokenClassifier:
    """Reads texts in both directions, and gives every token the probabilities of its labels."""

    def __init__(self, spec: EncoderSpec, weights: ClassifierWeights, device: torch.device, dtype: torch.dtype) -> None:
        self.spec, self.weights, self.device, self.dtype = spec, weights, device, dtype
        self._activate = find_activation(spec.activation)
        size = sum(tensor.numel() * tensor.element_size() for tensor in iterate_tensors(weights))
        products = [
            (linear, 1) for layer in weights.stack.layers for linear in (layer.qkv, layer.out, layer.up, layer.down)
        ]
        narrows = device.type == "cpu" and size <= PACKING_LIMIT
        made = EncoderProducts(products, narrows=narrows)
        self._library = LibraryEncoder(spec, weights.stack, None, made)

    @property
    def longest(self) -> int:
        """Tokens of the longest text."""
        return self.spec.longest

    @explain_shortage("a classifier read a text")
    @torch.no_grad()
    def classify(
        self, rows: Sequence[Sequence[int]], seen: Sequence[Sequence[bool]] | None = None
    ) -> list[torch.Tensor]:
        """The probabilities (tokens, labels) in float32 of each text's tokens.

        `seen` says which tokens others may look at; without it they look at all.
        """
        self._check(rows)
        lengths, longest = [len(row) for row in rows], max(map(len, rows))
        filled = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=self.device)
        real = torch.arange(longest, device=self.device) < torch.tensor(lengths, device=self.device)[:, None]
        visible = real
        if seen is not None and not all(all(row) for row in seen):
            visible = torch.tensor([[*row, *[False] * (longest - len(row))] for row in seen], device=self.device)
        x = self._embed(filled)
        states = None
        if visible is real and self.device.type == "cpu" and self.dtype == torch.float32:
            states = self._library.run(x[real], lengths)  # (tokens, hidden)
        if states is None:
            states = self._read(x, visible)[real]
        found = self.weights.head(states).float().softmax(-1)
        return list(found.split(lengths))

    def _check(self, rows: Sequence[Sequence[int]]) -> None:
        if not rows or not all(rows):
            raise InputError("a text without tokens can't be classified; give at least one")
        if max(map(len, rows)) > self.longest:
            raise InputError(
                f"a text has {max(map(len, rows))} tokens and {self.spec.family} reads at most {self.longest}; cut it"
            )
        most = self.spec.encoder.vocab_size
        if any(not 0 <= token < most for row in rows for token in row):
            raise InputError(f"a text has ids outside the classifier's vocabulary of {most} tokens")

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embeddings (rows, tokens, hidden) of tokens and their positions."""
        stack, uncounted = self.weights.stack, self.spec.uncounted_id
        assert stack.embedding is not None
        assert stack.positions is not None
        assert stack.embedding_norm is not None
        if uncounted is None:
            places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        else:
            counted = tokens != uncounted
            places = (counted.cumsum(1) * counted + uncounted).clamp(max=self.spec.num_positions - 1)
        return stack.embedding_norm(stack.embedding(tokens) + stack.positions[places])

    def _read(self, x: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        """Final states (rows, tokens, hidden), by torch's operators."""
        mask = None if bool(visible.all()) else visible[:, None, None]
        for layer in self.weights.stack.layers:
            x = self._read_layer(layer, x, mask)
        return x

    def _read_layer(self, layer: Layer, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        heads, width = self.spec.encoder.num_heads, self.spec.encoder.head_dim
        q, k, v = layer.qkv(x).view(*x.shape[:2], 3, heads, width).permute(2, 0, 3, 1, 4)
        read, _ = attend(q, k, v, scale=self.spec.encoder.attention_scale, mask=mask)
        x = _find(layer.attn_norm)(x + layer.out(read.transpose(1, 2).flatten(2)))
        return _find(layer.ffn_norm)(x + layer.down(self._activate(layer.up(x))))


def _find(norm: Norm | None) -> Norm:
    assert norm is not None
    return norm
