"""What a pass over columns gives to a transformers model, by the model's own rules."""

from __future__ import annotations

import inspect
from typing import Any, Final

import torch

from unspool.models.adapters.adapted import name_failures
from unspool.models.adapters.columns.state import ColumnCache
from unspool.models.adapters.description import Description

_TYPES: Final = ("token_type_ids", "mm_token_type_ids")  # inputs with a number per column


class PassInputs:
    """The inputs of a model's passes."""

    def __init__(self, model: Any, description: Description, *, is_pair: bool) -> None:
        self._model, self._description, self._is_pair = model, description, is_pair
        prefix = "decoder_" if is_pair else ""
        self.managed = (f"{prefix}attention_mask", f"{prefix}position_ids")  # they follow from the columns
        # From 5.20 on, generate() gives a model no mask of ones, and attention asks whether it is causal instead.
        self._leaves_out_ones = "_mask_length" in inspect.unwrap(_find_base(model).generate).__code__.co_names

    def make(self, cache: ColumnCache, num_asked: int, *, is_first: bool) -> dict[str, Any]:
        """The arguments of a pass over the last `num_asked` columns."""
        columns = cache.columns
        assert columns is not None
        prepare, inputs = self._model.prepare_inputs_for_generation, dict(cache.inputs)
        mask_name, position_name = self.managed
        takes_mask = "attention_mask" in self._description.arguments
        if self._is_pair:
            takes_mask = mask_name in cache.first_inputs or not bool(columns.mask.all())
        if takes_mask:
            is_left_out = not self._is_pair and self._leaves_out_ones and bool(columns.mask.all())
            inputs[mask_name] = None if is_left_out else columns.mask.long()
        if columns.positions is not None:
            inputs[position_name] = columns.positions
        known = inspect.signature(_find_base(self._model).prepare_inputs_for_generation).parameters
        if "next_sequence_length" in known:
            is_part = cache.keeps_past and num_asked < columns.width
            inputs["next_sequence_length"] = num_asked if is_part else None
        else:
            first = columns.width - num_asked
            inputs["cache_position"] = torch.arange(first, columns.width, device=columns.ids.device)
        ids, embeds = columns.ids, None
        if is_first and not self._is_pair and inputs.get("inputs_embeds") is not None:
            embeds = inputs["inputs_embeds"] = self._fit_embeds(inputs["inputs_embeds"], ids, cache.prompt.width)
        # Behind states embeddings are read as a step's token is: Mamba would spread one over a mask of all columns.
        is_behind = embeds is not None and columns.num_read > 0 and cache.keeps_states
        if "is_first_iteration" in known:
            inputs["is_first_iteration"] = is_first and not is_behind
        with name_failures(self._model):
            made = dict(prepare(ids, **inputs))
        if embeds is not None and is_behind:
            made |= {"input_ids": None, "inputs_embeds": embeds[:, -num_asked:].contiguous()}
        return made

    def _fit_embeds(self, embeds: torch.Tensor, ids: torch.Tensor, prompt_width: int) -> torch.Tensor:
        """The prompt's embeddings up to the last of the columns; what follows them is embedded here."""
        width = ids.shape[1]
        if width <= prompt_width:  # they may be those of its last columns alone, behind what a cache holds
            return embeds[:, : embeds.shape[1] - (prompt_width - width)]
        more = self._model.get_input_embeddings()(ids[:, prompt_width:])
        return torch.cat((embeds, more.to(self._model.dtype)), dim=1)

    def follow(self, cache: ColumnCache, num_new: int) -> dict[str, Any]:
        """A cache's inputs for columns that were added."""
        if cache.output is None:  # they are read together with the prompt
            return {name: _extend(name, value, num_new) for name, value in cache.inputs.items()}
        update = self._model._update_model_kwargs_for_generation
        arguments: dict[str, Any] = {"is_encoder_decoder": self._is_pair, "num_new_tokens": 1}
        types = {name: value for name, value in cache.inputs.items() if name in _TYPES}
        managed = (*self.managed, *_TYPES)
        followed = {name: value for name, value in cache.inputs.items() if name not in managed}
        for _ in range(num_new):  # some models add one column, however many are new
            followed = dict(update(cache.output, followed, **arguments))
        return followed | {name: _extend(name, value, num_new) for name, value in types.items()}


def _extend(name: str, value: Any, num_new: int) -> Any:
    """An input with a number per column, for columns that were added; any other as it is."""
    if name not in _TYPES or not isinstance(value, torch.Tensor):
        return value
    last = value[:, -1:] if name == "token_type_ids" else torch.zeros_like(value[:, -1:])
    return torch.cat((value, last.expand(-1, num_new)), dim=1)


def _find_base(model: Any) -> Any:
    """transformers' own mixin, whose signature says which arguments its release has."""
    return next(kind for kind in type(model).__mro__ if kind.__name__ == "GenerationMixin")
