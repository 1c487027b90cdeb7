"""Finding marks: how far a text's tokens are from what chance gives, with an exact p value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from unspool.config import BaseWatermarkingConfig
from unspool.config.watermarking import read_watermarking_config
from unspool.errors import InputError, SettingError
from unspool.watermark.scoring import Array, Evidence, make_scorer

LARGEST_CACHE = 1 << 24


@dataclass
class WatermarkDetectorOutput:
    """What a detector says, one number per text."""

    num_tokens_scored: Any = None
    num_green_tokens: Any = None
    green_fraction: Any = None
    z_score: Any = None
    p_value: Any = None
    prediction: Any = None
    confidence: Any = None


class WatermarkDetector:
    """Finds any of the three watermarks in token ids, with the settings that they were generated with.

    The z score counts repeated n-grams as `ignore_repeated_ngrams` says. The p value never does: it rests on each token
    of a green list (of SynthID-Text and Gumbel, each context) once, and is exact for text that knows no key.
    """

    def __init__(
        self,
        model_config: Any,
        device: Any,  # the reference's argument; marks are the same on all devices
        watermarking_config: BaseWatermarkingConfig | Mapping[str, Any],
        ignore_repeated_ngrams: bool = False,
        max_cache_size: int = 128,
    ) -> None:
        config = read_watermarking_config(watermarking_config) if isinstance(watermarking_config, Mapping) else None
        self.config = watermarking_config if config is None else config
        if not isinstance(self.config, BaseWatermarkingConfig):
            raise SettingError(f"`watermarking_config` holds a watermark's settings, not {type(self.config).__name__}")
        if not 0 <= max_cache_size <= LARGEST_CACHE:
            raise SettingError(f"`max_cache_size` has to be from 0 to {LARGEST_CACHE}, but is {max_cache_size!r}")
        self.ignore_repeated_ngrams = ignore_repeated_ngrams
        self.vocab_size = int(_get(model_config, "vocab_size"))
        is_pair = bool(_get(model_config, "is_encoder_decoder", False))
        self.bos_token_id = _get(model_config, "decoder_start_token_id" if is_pair else "bos_token_id", None)
        self.scorer = make_scorer(self.config, self.vocab_size, max_cache_size)

    def __call__(
        self, input_ids: torch.Tensor, z_threshold: float = 3.0, return_dict: bool = False
    ) -> WatermarkDetectorOutput | Any:
        """Whether each text (rows, length) is marked, or all that is known of it with `return_dict`.

        The prompt should be cut off: it is not marked.
        """
        texts = self._check(input_ids)
        evidence = [self.scorer.read(text) for text in texts]
        is_counted = [one.is_new if self.ignore_repeated_ngrams else np.ones_like(one.is_new) for one in evidence]
        counts, totals = _sum_up(evidence, is_counted)
        z_score = self.scorer.standardise(totals, counts)
        prediction = z_score > z_threshold
        if not return_dict:
            return prediction
        num_green = np.array(
            [float((one.is_marked_side & kept).sum()) for one, kept in zip(evidence, is_counted, strict=True)]
        )
        p_value = self.find_p_values(evidence)
        return WatermarkDetectorOutput(
            num_tokens_scored=counts,
            num_green_tokens=num_green,
            green_fraction=num_green / counts,
            z_score=z_score,
            p_value=p_value,
            prediction=prediction,
            confidence=1 - p_value,
        )

    def find_p_values(self, evidence: Sequence[Evidence]) -> Array:
        """The probability that unmarked text looks at least as marked, by those of its tokens that are independent."""
        counts, totals = _sum_up(evidence, [one.is_independent for one in evidence])
        return self.scorer.tail(totals, counts)

    def _check(self, input_ids: torch.Tensor) -> list[list[int]]:
        if input_ids.dim() != 2 or input_ids.is_floating_point() or not input_ids.numel():
            raise InputError(
                f"texts have to be token ids of the shape (texts, length), but are {list(input_ids.shape)}"
            )
        if int(input_ids.min()) < 0 or int(input_ids.max()) >= self.vocab_size:
            raise InputError(
                f"a text has the token {int(input_ids.max())}, outside the vocabulary of {self.vocab_size} tokens; "
                "give the detector the settings of the model that wrote it"
            )
        has_bos = input_ids[:, 0] == (-1 if self.bos_token_id is None else self.bos_token_id)
        if bool(has_bos.any()) != bool(has_bos.all()):
            raise InputError("some texts begin with the begin token and some do not; tokenize them alike")
        if bool(has_bos[0]):
            input_ids = input_ids[:, 1:]
        if input_ids.shape[1] <= self.scorer.num_before:
            raise InputError(
                f"a text of {input_ids.shape[1]} tokens has none to score: the watermark looks at the "
                f"{self.scorer.num_before} tokens before each; give a longer text"
            )
        listed: list[list[int]] = input_ids.tolist()
        return listed


def find_differences(saved: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """How two watermarks' settings differ, by name; keys are compared and not shown."""
    differences = []
    for name in sorted({*saved, *given}):
        if saved.get(name) == given.get(name):
            continue
        if name in ("keys", "hashing_key"):
            differences.append(f"`{name}` is another one")
        else:
            differences.append(f"`{name}` is {saved.get(name)!r} there and {given.get(name)!r} here")
    return differences


def _sum_up(evidence: Sequence[Evidence], is_counted: Sequence[Any]) -> tuple[Array, Array]:
    counts = np.array([float(kept.sum()) for kept in is_counted])
    totals = np.array([float(one.values[kept].sum()) for one, kept in zip(evidence, is_counted, strict=True)])
    return counts, totals


_MISSING = object()


def _get(settings: Any, name: str, default: Any = _MISSING) -> Any:
    value = settings.get(name, default) if isinstance(settings, Mapping) else getattr(settings, name, default)
    if value is _MISSING:
        raise SettingError(f"`model_config` has no `{name}`; give a model's config, its `info`, or a dict with it")
    return value
