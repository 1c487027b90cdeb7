"""Loading models that have no native form from a folder in the Hugging Face layout, by transformers."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from unspool.errors import LoadError, MissingExtraError, UnspoolError, UnsupportedError
from unspool.models.adapters.door import Adapted, adapt
from unspool.models.adapters.sizes import check_built, check_claims
from unspool.models.adapters.whole import WholeObject
from unspool.models.weights import WeightSource
from unspool.shortage import is_out_of_memory

EXTRA = "transformers"

logger = logging.getLogger("unspool.models")


def load_adapted(
    folder: Path,
    config: Mapping[str, Any],
    tensors: WeightSource,
    *,
    device: torch.device,
    dtype: torch.dtype,
    name: str,
    by_choice: bool = False,
) -> Adapted | WholeObject:
    """The model of a folder, read by transformers from safetensors only; code from the folder is never run.

    `by_choice` says that the caller asked for transformers, whether or not there is a native form.
    """
    reason = "is to be run by transformers" if by_choice else "has no native form"
    try:
        import transformers
    except ImportError as error:
        raise MissingExtraError("transformers", EXTRA, f"{name}, which {reason},") from error
    try:
        check_claims(config, tensors, f"the config.json of {folder}")
        model, missing = _read(transformers, folder, config, tensors, dtype)
        if not missing:
            adapted = _adapt(model.eval().to(device=device))
    except UnspoolError:
        raise
    except Exception as error:  # a config can make transformers' code fail in any way
        if is_out_of_memory(error):
            raise
        message = " ".join(str(error).split())[:300]
        raise LoadError(
            f"{folder} has the architecture {name}, which {reason}, and transformers "
            f"{transformers.__version__} can't load it: {type(error).__name__}: {message}"
        ) from error
    if missing:
        raise LoadError(
            f"{folder} has the architecture {name} and lacks {len(missing)} of the tensors that {type(model).__name__} "
            f"needs ({', '.join(missing[:3])}): its weights are not those of a model that writes text"
        )
    if by_choice:
        logger.info("%s runs through transformers %s, as asked", name, transformers.__version__)
    else:
        logger.warning("%s has no native form: it runs through transformers %s", name, transformers.__version__)
    return adapted


def _read(
    transformers: Any, folder: Path, config: Mapping[str, Any], tensors: WeightSource, dtype: torch.dtype
) -> tuple[Any, list[str]]:
    """The transformers model, and the names of missing tensors."""
    auto = _choose_auto(transformers, config)
    word = "dtype" if int(transformers.__version__.split(".")[0]) >= 5 else "torch_dtype"
    with silence(transformers):
        settings = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        with torch.device("meta"):
            check_built(_build(auto, settings), tensors, f"the config.json of {folder}")
        model, report = auto.from_pretrained(
            folder,
            trust_remote_code=False,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            **{word: dtype},
        )
    return model, sorted(report["missing_keys"])


def _adapt(model: Any) -> Adapted | WholeObject:
    """The adapter of a model, or the model as it is where it is more than a decoder with its prompt."""
    if type(model).__name__ in _list_voices():
        return WholeObject(model, f"a {type(model).__name__} writes sound")
    try:
        return adapt(model)
    except UnsupportedError as error:
        if not hasattr(model.config, "vision_config"):
            raise
        return WholeObject(model, str(error).split(";")[0])


def _list_voices() -> set[str]:
    """The classes that write sound."""
    from transformers.models.auto import modeling_auto as auto

    kinds = ("TEXT_TO_WAVEFORM", "TEXT_TO_SPECTROGRAM")
    tables = [getattr(auto, f"MODEL_FOR_{kind}_MAPPING_NAMES", {}) for kind in kinds]
    return {name for table in tables for name in {**table}.values()} | {"DiaForConditionalGeneration"}


def _build(auto: Any, settings: Any) -> Any:
    if hasattr(auto, "_model_mapping"):
        return auto.from_config(settings, trust_remote_code=False)
    return auto(settings)  # a class of models


def _choose_auto(transformers: Any, config: Mapping[str, Any]) -> Any:
    """The class of transformers that loads a folder's model."""
    architectures = config.get("architectures")
    listed = [name for name in architectures if isinstance(name, str)] if isinstance(architectures, list) else []
    voice = next((name for name in listed if name in _list_voices()), None)
    if voice is not None and hasattr(transformers, voice):
        return getattr(transformers, voice)
    if _is_pictured(transformers, config):
        return transformers.AutoModelForImageTextToText
    if config.get("is_encoder_decoder"):
        reads_sound = "num_mel_bins" in config
        return transformers.AutoModelForSpeechSeq2Seq if reads_sound else transformers.AutoModelForSeq2SeqLM
    return transformers.AutoModelForCausalLM


def _is_pictured(transformers: Any, config: Mapping[str, Any]) -> bool:
    """Whether a config is of a class that reads pictures and is no decoder of texts to transformers."""
    auto = transformers.models.auto.modeling_auto
    names = [getattr(auto, f"MODEL_FOR_{kind}_MAPPING_NAMES", {}) for kind in ("IMAGE_TEXT_TO_TEXT", "CAUSAL_LM")]
    pictured, text = ({**named}.get(config.get("model_type")) for named in names)
    architectures = config.get("architectures")
    listed = architectures if isinstance(architectures, list) else []
    return pictured is not None and (pictured in listed or text is None)


def read_object(
    transformers: Any, folder: Path, config: Mapping[str, Any], tensors: WeightSource, dtype: torch.dtype
) -> Any:
    """The transformers model of a folder; raises where tensors are missing."""
    try:
        check_claims(config, tensors, f"the config.json of {folder}")
        model, missing = _read(transformers, folder, config, tensors, dtype)
    except UnspoolError:
        raise
    except Exception as error:  # a config can make transformers' code fail in any way
        if is_out_of_memory(error):
            raise
        message = " ".join(str(error).split())[:300]
        raise LoadError(f"transformers can't load the model of {folder}: {type(error).__name__}: {message}") from error
    if missing:
        raise LoadError(f"{folder} lacks {len(missing)} tensors of its model ({', '.join(missing[:3])})")
    return model.eval()


@contextmanager
def silence(transformers: Any) -> Iterator[None]:
    """Disable transformers' progress bar while weights are read."""
    logs = transformers.utils.logging
    was_on = logs.is_progress_bar_enabled()
    logs.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logs.enable_progress_bar()
