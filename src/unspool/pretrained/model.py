"""The model that `from_pretrained` returns: a native one with the methods that transformers' have."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Self

import torch

from unspool.api.calls import generate
from unspool.api.core import Holder, as_model, find_object
from unspool.api.language_model import LanguageModel
from unspool.config import GenerationConfig
from unspool.decoding.transitions import compute_transition_scores
from unspool.errors import UnsupportedError
from unspool.loading.model import LoadedParts
from unspool.models.adapters import read_settings
from unspool.models.adapters.pictures import PictureReader
from unspool.models.adapters.whole import WholeObject
from unspool.pretrained.calling import call_decoder, call_pair


class PretrainedModel(Holder):
    """A model with `generate`, `forward`, `config`, `generation_config`, `device`, `to`, `eval`, as in transformers."""

    def __init__(self, parts: LoadedParts) -> None:
        # A folder without a native model was loaded by transformers: its object answers for itself.
        self.core: Any = getattr(parts.model, "inner", parts.model)
        self.name_or_path = parts.name
        self._parts = parts
        if find_object(self) is None:
            self.core.generation_config = parts.generation_config

    def __copy__(self) -> Self:
        """A model with settings of its own and the same weights."""
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        made.core = copy.copy(self.core)
        made.core.generation_config = copy.deepcopy(self.core.generation_config)
        made._parts = replace(self._parts, model=as_model(made))  # type: ignore[arg-type]  # of the same kind
        return made

    @property
    def pictures(self) -> PictureReader | None:
        """What reads pictures, if the model does."""
        return self._parts.pictures

    @property
    def generation_config(self) -> Any:
        """The model's own settings; change them to change every later call."""
        own = getattr(self.core, "generation_config", None)
        return self._parts.generation_config if own is None else own  # an object that writes in one pass has none

    @generation_config.setter
    def generation_config(self, config: Any) -> None:
        self.core.generation_config = config

    @property
    def config(self) -> Any:
        """The model's config, with the attributes of its file."""
        return self.core.config

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        device: torch.device = self.core.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights; of quantised ones, that of the numbers computed with."""
        dtype: torch.dtype = self.core.dtype
        return dtype

    @property
    def hf_device_map(self) -> dict[str, str]:
        """The device of every part."""
        placement = getattr(self.core, "placement", None)
        if placement is not None:
            parts: dict[str, str] = placement.name_parts()
            return parts
        return {"": str(self.device)}

    @property
    def main_input_name(self) -> str:
        """The name of what the model reads."""
        if isinstance(self._parts.model, WholeObject):
            return str(self.core.main_input_name)
        return "input_ids" if as_model(self).info.features is None else "input_features"

    def __repr__(self) -> str:
        whole = isinstance(self._parts.model, WholeObject)
        kind = type(self.core).__name__ if whole else as_model(self).info.family
        return f"{type(self).__name__}({self.name_or_path!r}, {kind}, {self.dtype}, {self.device})"

    def generate(self, inputs: Any = None, generation_config: Any = None, **kwargs: Any) -> Any:
        """Generate token ids; see `unspool.generate`."""
        return generate(self, inputs, generation_config, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """One pass in the reference's form: ids and mask in, an output with logits and cache out."""
        if find_object(self) is not None:
            with torch.no_grad():
                return self.core(*args, **kwargs)
        if kwargs.get("labels") is not None:
            raise UnsupportedError("labels are for training, and native models only infer; leave them out")
        kwargs.pop("labels", None)
        call = call_pair if self.core.info.is_encoder_decoder else call_decoder
        return call(self.core, *args, **kwargs)

    __call__ = forward

    def compute_transition_scores(self, sequences: Any, scores: Any, beam_indices: Any = None, **kwargs: Any) -> Any:
        """The score of every chosen token; see `unspool.compute_transition_scores`."""
        return compute_transition_scores(sequences, scores, beam_indices, **kwargs)

    # --- where the weights are ---------------------------------------------------------------------------
    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move the weights to another device, another dtype, or both."""
        self.core.to(*args, **kwargs)
        return self

    def cuda(self, device: int | str | None = None) -> Self:
        """Move the weights to a GPU."""
        return self.to(torch.device("cuda", device) if isinstance(device, int) else device or "cuda")

    def cpu(self) -> Self:
        """Move the weights to the CPU."""
        return self.to("cpu")

    def half(self) -> Self:
        """The weights in float16."""
        return self.to(dtype=torch.float16)

    def bfloat16(self) -> Self:
        """The weights in bfloat16."""
        return self.to(dtype=torch.bfloat16)

    def float(self) -> Self:
        """The weights in float32."""
        return self.to(dtype=torch.float32)

    def eval(self) -> Self:
        """Nothing to switch: it only infers."""
        self.core.eval()
        return self

    def train(self, mode: bool = True) -> Self:
        """Refused: native models only infer."""
        if mode:
            raise UnsupportedError("this model only infers; train a transformers object, then unspool.attach(model)")
        return self

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Nothing to switch off: no gradients are kept."""
        if requires_grad:
            raise UnsupportedError("this model keeps no gradients; train a transformers object")
        return self

    # --- what it is --------------------------------------------------------------------------------------
    def can_generate(self) -> bool:
        """It can: other models are not loaded."""
        return True

    @property
    def training(self) -> bool:
        """Whether dropout and the like are at work: they never are."""
        return False

    def parameters(self) -> Iterator[torch.Tensor]:
        """The weights as they are laid out here, a tied one once: some are several matrices of the checkpoint."""
        return iter(self.core.parameters())

    def num_parameters(self) -> int:
        """The number of parameters; a tied head is counted once."""
        return self._parts.model.num_parameters()

    def get_memory_footprint(self) -> int:
        """The memory of the weights, in bytes."""
        return self._parts.model.weights_bytes

    def get_input_embeddings(self) -> Any:
        """The table of token embeddings: callable on ids."""
        return self.core.get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        """The head: callable on final hidden states."""
        return self.core.get_output_embeddings()

    def save_pretrained(self, *_: Any, **__: Any) -> None:
        """Refused: weights are laid out for inference."""
        raise UnsupportedError(
            f"weights are laid out for inference and are not written back; copy the files of {self.name_or_path!r}. "
            "Settings are saved with model.generation_config.save_pretrained(folder)"
        )

    def as_language_model(self, tokenizer: Any = None) -> LanguageModel:
        """The short way over the same weights: text in and text out."""
        settings = read_settings(self.core) or GenerationConfig()
        own = self._parts.tokenizer if tokenizer is None else tokenizer
        return LanguageModel(replace(self._parts, tokenizer=own, generation_config=settings))
