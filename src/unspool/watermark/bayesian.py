"""SynthID-Text's Bayesian detector: how likely g-values are in marked text, learnt from examples."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import torch
from torch import nn

from unspool.config import SynthIDTextWatermarkingConfig
from unspool.config.files import HUB_ID, HUB_OPTIONS, find_config_file, push_saved, read_push_options
from unspool.config.watermarking import MOST_KEYS
from unspool.errors import InputError, LoadError, SettingError, excerpt
from unspool.numeric import is_number, is_whole
from unspool.small_files import read_json_object, write_text
from unspool.watermark.detector import find_differences
from unspool.watermark.synthid import SynthIDTextWatermarkLogitsProcessor
from unspool.wording import suggest

CONFIG_NAME, WEIGHTS_NAME = "config.json", "model.safetensors"
MOST_BYTES = 64 << 20
FINGERPRINT = "keys_fingerprint"
_KNOWN = ("watermarking_depth", "base_rate", "model_name", "watermarking_config")


def _find(source: str | PathLike[str], name: str, options: dict[str, Any]) -> Path:
    """A detector's file: of a folder, or of a repository of the hub."""
    if unknown := [option for option in options if option not in HUB_OPTIONS]:
        raise SettingError(f"from_pretrained() does not know {excerpt(unknown[0])}{suggest(unknown[0], HUB_OPTIONS)}")
    path = Path(source)
    is_here = path.exists() or not HUB_ID.fullmatch(fspath(source))
    return path / (options.get("subfolder") or "") / name if is_here else find_config_file(source, name, options)


class BayesianDetectorConfig:
    """The settings of a Bayesian detector: its rounds, the prior, and what text it was made for."""

    def __init__(self, watermarking_depth: int | None = None, base_rate: float = 0.5, **kwargs: Any) -> None:
        if watermarking_depth is not None and (
            not is_whole(watermarking_depth) or not 1 <= watermarking_depth <= MOST_KEYS
        ):
            raise SettingError(
                f"`watermarking_depth` is the number of keys, from 1 to {MOST_KEYS}, and not {watermarking_depth!r}"
            )
        if not is_number(base_rate) or not 0 < base_rate < 1:
            raise SettingError(f"`base_rate` has to lie between 0 and 1, but is {base_rate!r}")
        self.watermarking_depth = watermarking_depth
        self.base_rate = float(base_rate)
        self.model_name: str | None = None
        self.watermarking_config: dict[str, Any] | None = None
        self._others: dict[str, Any] = {}  # of a file, which are written again and mean nothing here
        if unknown := sorted(kwargs.keys() - set(_KNOWN)):
            meant = suggest(unknown[0], _KNOWN)
            raise SettingError(f"a detector's settings are {', '.join(_KNOWN)}, not {excerpt(unknown[0])}{meant}")
        self._set_information(**kwargs)

    def _set_information(self, model_name: Any = None, watermarking_config: Any = None) -> None:
        if not isinstance(model_name, str | None):
            raise SettingError(f"`model_name` is a text, and not {excerpt(model_name)}")
        if not isinstance(watermarking_config, dict | None):
            raise SettingError(f"`watermarking_config` is a dict of settings, and not {excerpt(watermarking_config)}")
        self.model_name, self.watermarking_config = model_name, watermarking_config

    def set_detector_information(self, model_name: str | None, watermarking_config: Any) -> None:
        """Note the model whose text it knows and the watermark's settings."""
        self.model_name = model_name
        has_form = hasattr(watermarking_config, "to_dict")
        self.watermarking_config = watermarking_config.to_dict() if has_form else watermarking_config

    def to_dict(self) -> dict[str, Any]:
        """The settings as a dict."""
        return {**self._others, **{name: getattr(self, name) for name in _KNOWN}}

    def hide_keys(self) -> None:
        """Replace the watermark's keys by a fingerprint, by which the right ones are known again."""
        mark = self.watermarking_config
        if mark is not None and "keys" in mark:
            kept = {name: value for name, value in mark.items() if name != "keys"}
            self.watermarking_config = {**kept, FINGERPRINT: take_fingerprint(mark["keys"])}

    @classmethod
    def from_pretrained(cls, folder: str | PathLike[str], **options: Any) -> Self:
        """Read the settings from a folder, or from a hub's `owner/name`, whose client takes the options."""
        settings = read_json_object(_find(folder, CONFIG_NAME, options))
        made = cls(**{name: settings.pop(name) for name in _KNOWN if name in settings})
        made._others = settings
        return made

    def save_pretrained(self, folder: str | PathLike[str]) -> None:
        """Write the settings into a folder."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        write_text(Path(folder) / CONFIG_NAME, json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n")


@dataclass
class BayesianWatermarkDetectorModelOutput:
    """The loss, if labels were given, and the probability that each text is marked."""

    loss: torch.Tensor | None = None
    posterior_probabilities: torch.Tensor | None = None


class BayesianDetectorWatermarkedLikelihood(nn.Module):
    """The likelihood of g-values in marked text: a round with two different tokens favours 1, and how likely such a
    round is depends on the g-values of the rounds before."""

    def __init__(self, watermarking_depth: int) -> None:
        super().__init__()
        self.watermarking_depth = watermarking_depth
        self.beta = nn.Parameter(torch.full((1, 1, watermarking_depth), -2.5))
        self.delta = nn.Parameter(torch.zeros(1, 1, watermarking_depth, watermarking_depth))

    def forward(self, g_values: torch.Tensor) -> torch.Tensor:
        """P(g-value | marked) of g-values (texts, length, depth)."""
        g_values = g_values.to(self.beta.dtype)
        earlier = torch.tril(self.delta[0, 0], diagonal=-1)  # (round, the rounds before)
        has_two = torch.sigmoid(g_values @ earlier.T + self.beta)
        return 0.5 * ((g_values + 0.5) * has_two + (1 - has_two))


class BayesianDetectorModel(nn.Module):
    """The probability that a text is marked, from its g-values, by Bayes' rule."""

    config_class = BayesianDetectorConfig

    def __init__(self, config: BayesianDetectorConfig) -> None:
        super().__init__()
        if config.watermarking_depth is None:
            raise SettingError("a BayesianDetectorModel needs `watermarking_depth`, the number of keys")
        self.config = config
        self.watermarking_depth = config.watermarking_depth
        self.base_rate = config.base_rate
        self.likelihood_model_watermarked = BayesianDetectorWatermarkedLikelihood(config.watermarking_depth)
        self.prior = nn.Parameter(torch.tensor([config.base_rate]))

    def score(self, g_values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The log-odds (texts,) that texts are marked."""
        if g_values.dim() != 3 or g_values.shape[-1] != self.watermarking_depth:
            raise InputError(
                f"g-values have to be of the shape (texts, length, {self.watermarking_depth}), one for each round, but "
                f"are {list(g_values.shape)}: the detector was made for another number of keys"
            )
        likelihood: torch.Tensor = self.likelihood_model_watermarked(g_values).clamp(min=1e-30)
        evidence = ((likelihood / 0.5).log() * mask[..., None]).sum(dim=(1, 2))
        prior = self.prior.clamp(1e-5, 1 - 1e-5)
        odds: torch.Tensor = evidence + torch.log(prior) - torch.log1p(-prior)
        return odds

    def forward(
        self,
        g_values: torch.Tensor,
        mask: torch.Tensor,
        labels: torch.Tensor | None = None,
        loss_batch_weight: float = 1,
        return_dict: bool = False,
    ) -> Any:
        """P(marked | g-values) of texts (texts, length, depth), counting tokens whose `mask` (texts, length) is 1."""
        posterior = torch.sigmoid(self.score(g_values, mask))
        loss = None
        if labels is not None:
            penalty = loss_batch_weight * (self.likelihood_model_watermarked.delta**2).sum()
            loss = nn.functional.binary_cross_entropy(posterior.clamp(1e-5, 1 - 1e-5), labels) + penalty
        if return_dict:
            return BayesianWatermarkDetectorModelOutput(loss=loss, posterior_probabilities=posterior)
        return (posterior,) if loss is None else (posterior, loss)

    def save_pretrained(self, folder: str | PathLike[str], push_to_hub: bool = False, **options: Any) -> None:
        """Write the settings and the weights (safetensors) into a folder.

        `push_to_hub` uploads them too, to `repo_id` or the repository that the folder is called like; `token`,
        `private`, `commit_message`, `revision` and `create_pr` are for the hub.
        """
        from safetensors.torch import save_file

        given = read_push_options(options, is_pushed=push_to_hub, caller="save_pretrained()")
        self.config.save_pretrained(folder)
        save_file({name: value.contiguous() for name, value in self.state_dict().items()}, Path(folder) / WEIGHTS_NAME)
        if push_to_hub:
            push_saved(folder, [CONFIG_NAME, WEIGHTS_NAME], given)

    def push_to_hub(self, repo_id: str, **options: Any) -> Any:
        """Upload the settings and the weights to a repository of the hub, and return its client's answer."""
        given = {**read_push_options(options, is_pushed=True, caller="push_to_hub()"), "repo_id": repo_id}
        with TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            return push_saved(folder, [CONFIG_NAME, WEIGHTS_NAME], given)

    @classmethod
    def from_pretrained(cls, folder: str | PathLike[str], **options: Any) -> Self:
        """Read a detector from a folder, or from a hub's `owner/name`.

        The hub's client takes `revision`, `token`, `cache_dir`, `force_download` and `local_files_only`.
        """
        from safetensors.torch import load_file

        model = cls(BayesianDetectorConfig.from_pretrained(folder, **options))
        path = _find(folder, WEIGHTS_NAME, options)
        if not path.is_file() or path.stat().st_size > MOST_BYTES:
            raise LoadError(f"{path} is missing, or larger than a detector is")
        try:
            tensors = load_file(path)
        except Exception as error:  # safetensors raises its own kinds
            raise LoadError(f"{path} can't be read: {error}") from error
        expected = model.state_dict()
        if tensors.keys() != expected.keys() or any(tensors[name].shape != expected[name].shape for name in expected):
            raise LoadError(
                f"{path} does not hold a detector of {model.watermarking_depth} rounds, as {CONFIG_NAME} says"
            )
        if not all(bool(value.isfinite().all()) for value in tensors.values()):
            raise LoadError(f"{path} holds numbers that are not finite")
        model.load_state_dict(tensors)
        return model.eval()


class SynthIDTextWatermarkDetector:
    """A trained Bayesian detector, with the processor whose mark it knows and the tokenizer."""

    def __init__(
        self,
        detector_module: BayesianDetectorModel,
        logits_processor: SynthIDTextWatermarkLogitsProcessor,
        tokenizer: Any,
    ) -> None:
        self.detector_module = detector_module
        self.logits_processor = logits_processor
        self.tokenizer = tokenizer
        depth, rounds = logits_processor.depth, detector_module.watermarking_depth
        if depth != rounds:
            raise SettingError(f"the watermark has {depth} keys and the detector was trained for {rounds} rounds")
        saved = detector_module.config.watermarking_config
        if saved is not None:
            check_same(saved, logits_processor)

    @torch.no_grad()
    def __call__(self, tokenized_outputs: torch.Tensor) -> Any:
        """The probability that each text (texts, length) is marked, as the model returns it."""
        g_values, mask = read_g_values(self.logits_processor, tokenized_outputs, self.tokenizer.eos_token_id)
        return self.detector_module(g_values, mask)


def read_g_values(
    mark: SynthIDTextWatermarkLogitsProcessor, input_ids: torch.Tensor, eos_token_id: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The g-values (texts, length, depth) of texts, and which tokens count: before the end, after a new context."""
    mask = mark.compute_context_repetition_mask(input_ids)
    if eos_token_id is not None:
        mask = mask & mark.compute_eos_token_mask(input_ids, eos_token_id)[:, mark.ngram_len - 1 :].bool()
    return mark.compute_g_values(input_ids), mask


def check_same(saved: Mapping[str, Any], mark: SynthIDTextWatermarkLogitsProcessor) -> None:
    """Raise if a detector was made for other settings than a processor has, and say which."""
    keys = [int(key) for key in mark.keys.tolist()]
    given: dict[str, Any] = {
        "ngram_len": mark.ngram_len,
        "keys": keys,
        "sampling_table_size": len(mark.sampling_table),
        "sampling_table_seed": mark.sampling_table_seed,
        "context_history_size": mark.context_history_size,
    }
    if FINGERPRINT in saved and saved[FINGERPRINT] == take_fingerprint(keys):
        given["keys"] = None
    complete = {**SynthIDTextWatermarkingConfig(2, [1]).to_dict(), "keys": None, **saved}
    differ = find_differences({name: complete.get(name) for name in given}, given)
    if differ:
        raise SettingError(f"the detector was made for another watermark: {'; '.join(differ)}")


def take_fingerprint(keys: Any) -> str:
    """A number that keys have in common with nothing else, and from which they are not found by trying."""
    spoken = json.dumps([int(key) for key in keys]).encode()
    return hashlib.pbkdf2_hmac("sha256", spoken, b"unspool watermark", 200_000).hex()[:32]
