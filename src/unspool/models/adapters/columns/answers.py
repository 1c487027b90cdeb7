"""What passes over columns returned, brought into the form that strategies read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from unspool.errors import UnsupportedError
from unspool.models.adapters.adapted import AdaptedModel
from unspool.models.adapters.columns.state import Columns
from unspool.protocols import Forward, Want


def choose_logits(logits: torch.Tensor, columns: Columns, last: torch.Tensor, num_new: int, want: Want) -> torch.Tensor:
    """The logits that are wanted: those of the new columns, right-filled, or of each row's last one."""
    if want.logits == "all":
        return pack_columns(logits[:, -num_new:], columns.mask[:, -num_new:])
    if logits.shape[1] == 1:
        return logits[:, -1]
    place = last - (columns.width - logits.shape[1])
    return logits[torch.arange(len(place), device=logits.device), place.clamp(min=0).to(logits.device)]


def read_states(
    forward: Forward,
    states: tuple[torch.Tensor, ...],  # the layers'
    columns: Columns,
    last: torch.Tensor,
    num_new: int,
    want: Want,
    model: AdaptedModel,
) -> None:
    """Give an answer the hidden states that are wanted, and what the model's head makes of early ones."""
    asked = [states[-1]] * (want.last_states or bool(want.early)) + [states[layer] for layer in want.early]
    for one in asked:
        if one.dim() != 3 or one.shape[1] < num_new or one.shape[2] != states[-1].shape[2]:
            raise UnsupportedError(
                f"{type(model.inner).__name__} returns hidden states {tuple(one.shape)} for {num_new} tokens, a "
                "layout of its own; contrastive search and DoLa need one state per token"
            )
    if want.hidden_states:
        forward.hidden_states = states
    if want.last_states:
        forward.last_states = pack_columns(states[-1][:, -num_new:], columns.mask[:, -num_new:])
    if want.early:
        head, row = model.get_output_embeddings(), torch.arange(len(last), device=model.device)
        place = last - (columns.width - states[0].shape[1])
        forward.early_logits = tuple(head(states[layer][row, place]) for layer in want.early)


def join_passes(made: list[Forward], want: Want) -> Forward:
    """Passes over one column each as one pass over all of them."""
    forward = made[-1]
    logits = [one.logits for one in made]
    forward.logits = logits[-1][:, -1] if want.logits == "last" else torch.cat(logits, dim=1)
    if forward.hidden_states is not None:
        layers = zip(*(one.hidden_states or () for one in made), strict=True)
        forward.hidden_states = tuple(torch.cat(layer, dim=-2 if forward.state_rows else 1) for layer in layers)
    for name in ("attentions", "cross_attentions"):
        if getattr(forward, name) is not None:
            layers = zip(*(getattr(one, name) for one in made), strict=True)
            setattr(forward, name, tuple(map(_join_weights, layers)))
    if forward.last_states is not None:
        forward.last_states = torch.cat([one.last_states for one in made if one.last_states is not None], dim=1)
    return forward


def _join_weights(weights: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Weights of single columns (rows, heads, 1, keys) as those of one pass: keys that came later have none."""
    if weights[-1] is None:
        return None
    width = weights[-1].shape[-1]
    padded = [torch.nn.functional.pad(part, (0, width - part.shape[-1])) for part in weights if part is not None]
    return torch.cat(padded, dim=2)


def pack_columns(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Columns (rows, new, …) right-filled: the real ones first."""
    if bool(mask.all()):
        return values
    order = (~mask).long().argsort(dim=-1, stable=True).to(values.device)
    return values[torch.arange(values.shape[0], device=values.device)[:, None], order]


def lighten(made: Any) -> Any:
    """A pass's output without what is large and no later pass needs."""
    for name in ("logits", "hidden_states", "decoder_hidden_states", "attentions", "decoder_attentions"):
        if getattr(made, name, None) is not None:
            setattr(made, name, None)
    return made
