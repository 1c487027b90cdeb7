"""Models that have no native form, out of a folder in the Hugging Face layout: transformers reads them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from unspool.errors import LoadError, MissingExtraError
from unspool.models.adapters.door import Adapted, adapt

EXTRA = "transformers"

logger = logging.getLogger("unspool.models")


def load_adapted(
    folder: Path, config: Mapping[str, Any], *, device: torch.device, dtype: torch.dtype, name: str
) -> Adapted:
    """The model of a folder, read by transformers from safetensors alone; code from the folder is never run."""
    try:
        import transformers
    except ImportError as error:
        raise MissingExtraError("transformers", EXTRA, f"{name}, which unspool has no native form of,") from error
    is_pair = bool(config.get("is_encoder_decoder"))
    auto: Any = transformers.AutoModelForSeq2SeqLM if is_pair else transformers.AutoModelForCausalLM
    word = "dtype" if int(transformers.__version__.split(".")[0]) >= 5 else "torch_dtype"
    try:
        with _silence(transformers):
            model, told = auto.from_pretrained(
                folder,
                trust_remote_code=False,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
                **{word: dtype},
            )
    except (ValueError, OSError, KeyError, ImportError, RuntimeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise LoadError(
            f"{folder} has the architecture {name}, which has no native form, and transformers "
            f"{transformers.__version__} can't load it: {reason}"
        ) from error
    missing = sorted(told["missing_keys"])
    if missing:
        raise LoadError(
            f"{folder} has the architecture {name} and lacks {len(missing)} of the tensors that {type(model).__name__} "
            f"needs ({', '.join(missing[:3])}): its weights are not those of a model that writes text"
        )
    adapted = adapt(model.eval().to(device=device))
    logger.warning("%s has no native form: it runs through transformers %s", name, transformers.__version__)
    return adapted


@contextmanager
def _silence(transformers: Any) -> Iterator[None]:
    """No bar of transformers' own while weights are read."""
    logs = transformers.utils.logging
    was_on = logs.is_progress_bar_enabled()
    logs.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logs.enable_progress_bar()
