"""Classifier-free guidance as a processor (Sanchez et al. 2023, arXiv 2306.17806)."""

from __future__ import annotations

from typing import Any

import torch

from unspool.errors import InputError, SettingError
from unspool.logits.base import LogitsProcessor
from unspool.logits.rows import as_finite_float
from unspool.wording import about


class ClassifierFreeGuidanceLogitsProcessor(LogitsProcessor):
    """Joins the two halves of a batch, with and without the condition, into guided scores."""

    counts_columns = False

    def __init__(self, guidance_scale: float) -> None:
        self.guidance_scale = as_finite_float("guidance_scale", guidance_scale)
        if self.guidance_scale <= 1:
            raise SettingError(about("guidance_scale", f"has to be above 1 for guidance, but is {guidance_scale!r}."))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The guided scores (rows, vocab) of scores (2 * rows, vocab), the conditional rows first."""
        if scores.shape[0] != 2 * input_ids.shape[0]:
            raise InputError(
                "Logits should have twice the batch size of the input ids, the first half for the conditional and "
                f"the second for the unconditional inputs, but have {scores.shape[0]} rows for {input_ids.shape[0]}."
            )
        conditional, unconditional = scores.chunk(2, dim=0)
        return unconditional + (conditional - unconditional) * self.guidance_scale


class UnbatchedClassifierFreeGuidanceLogitsProcessor(LogitsProcessor):
    """Moves scores away from those of another prompt, for which it calls a model itself at every step.

    The model is called the reference's way (`model(ids, attention_mask=…, use_cache=…, past_key_values=…).logits`).
    It remembers the other text between calls, so one is made for each generation.
    """

    counts_columns = False

    def __init__(
        self,
        guidance_scale: float,
        model: Any,
        unconditional_ids: torch.Tensor | None = None,
        unconditional_attention_mask: torch.Tensor | None = None,
        use_cache: bool | None = True,
    ) -> None:
        self.guidance_scale = as_finite_float("guidance_scale", guidance_scale)
        self.model = model
        self.unconditional_context: dict[str, Any] = {
            "input_ids": unconditional_ids,
            "attention_mask": unconditional_attention_mask,
            "use_cache": True if use_cache is None else use_cache,
            "past_key_values": None,
            "first_pass": True,
        }

    def get_unconditional_logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The model's logits (rows, length, vocab) for the other text, one token longer at every call."""
        context = self.unconditional_context
        newest = input_ids[:, -1:]
        if context["first_pass"]:
            ids = newest if context["input_ids"] is None else context["input_ids"]
            mask = context["attention_mask"]
            mask = torch.ones_like(ids, dtype=torch.long) if mask is None else mask
        else:
            mask = torch.cat((context["attention_mask"], torch.ones_like(newest)), dim=1)
            ids = newest if context["use_cache"] else torch.cat((context["input_ids"], newest), dim=1)
        context |= {"first_pass": False, "input_ids": ids, "attention_mask": mask}
        output = self.model(
            ids, attention_mask=mask, use_cache=context["use_cache"], past_key_values=context["past_key_values"]
        )
        context["past_key_values"] = getattr(output, "past_key_values", None)
        logits: torch.Tensor = output.logits
        return logits

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Guided log-probabilities."""
        scores = scores.log_softmax(dim=-1)
        if self.guidance_scale == 1:
            return scores
        other = self.get_unconditional_logits(input_ids)[:, -1].log_softmax(dim=-1)
        return self.guidance_scale * (scores - other) + other
