"""Loading a model from its files: weights, tokenizer and generation settings."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from unspool.config import GenerationConfig, keep_unknown
from unspool.errors import LoadError, ResourceError, SettingError, UnsupportedError
from unspool.kernels.cpu import find_library
from unspool.kernels.cpu.library import MOST_THREADS
from unspool.kernels.presence import has_triton, refuse_forked
from unspool.kernels.torch_threads import one_thread, set_torch_threads
from unspool.loading.digests import digest_model, sample_weights
from unspool.loading.hub import NO_OPTIONS, HubOptions
from unspool.loading.pickled import find_pickles
from unspool.loading.quantised import QuantisedTensors
from unspool.loading.source import OpenedModel, open_source
from unspool.models.adapters import Adapted
from unspool.models.adapters.folder import load_adapted
from unspool.models.adapters.pictures import PictureReader, read_whole_config
from unspool.models.adapters.whole import WholeObject
from unspool.models.assembly import QUANTISED_TABLES, Packing
from unspool.models.native import NativeModel
from unspool.models.paths.captured_ahead import await_triton, start_triton
from unspool.models.placement import DeviceRequest, check_present
from unspool.models.registry import build_model, can_pack, find_family, name_architecture, reads_pictures
from unspool.shortage import is_out_of_memory
from unspool.text import Tokenizer, open_tokenizer, tokenizer_from_gguf

Progress = Callable[[str, int, int], None]
_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "auto": None,
}
_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model", "spiece.model")
_NO_TOKENIZER = ("none", "no_vocab")  # what tokenizer.ggml.model says of a file without one
_STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class LoadedParts:
    """Everything `load()` found under a name."""

    name: str
    location: Path
    model: NativeModel | Adapted | WholeObject
    tokenizer: Tokenizer | None
    generation_config: GenerationConfig
    pictures: PictureReader | None = None  # what reads pictures, if the model does


@dataclass(frozen=True, slots=True)
class FileOrigin:
    """The files that a model was loaded from, and how: sent to another process instead of its weights."""

    location: Path
    asked: torch.dtype | None  # the dtype that load() was given
    dtype: torch.dtype  # and the one that the weights were read into
    quantize: str | None
    threads: int | None
    native: bool | None
    devices: DeviceRequest | None = None  # that its layers are laid over

    def reload(self, device: str, dtype: torch.dtype | None) -> NativeModel | Adapted | WholeObject:
        """The model again, on a device, and in another dtype if one is given."""
        return load_parts(
            self.location,
            device=device,
            dtype=dtype or self.asked,
            quantize=self.quantize,
            threads=self.threads,
            native=self.native,
            devices=self.devices,
        ).model

    def digest(self) -> str:
        """A digest of samples of the files' content; empty if they are gone."""
        try:
            return sample_weights(self.location)
        except LoadError:
            return ""

    def describe(self, device: torch.device, dtype: torch.dtype, settings: GenerationConfig) -> dict[str, Any]:
        """What answers depend on: the content of the files, how they are held, and the model's own settings."""
        computed = str(dtype).removeprefix("torch.")
        return {
            "weights": digest_model(self.location),
            "device": device.type,
            "dtype": f"auto ({computed})" if self.asked is None else computed,
            "quantize": self.quantize or "none",
            "native": self.native,
            "defaults": {name: repr(value) for name, value in sorted(settings.to_diff_dict().items())},
        }


def describe_files(
    name: str | Path,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    quantize: str | None = "auto",
    threads: int | None = None,
    revision: str | None = None,
    offline: bool | None = None,
    native: bool | None = None,
    hub: HubOptions = NO_OPTIONS,
) -> dict[str, Any]:
    """What `FileOrigin.describe` says of the model that `load_parts` makes of the same arguments, without making it."""
    where, asked = choose_device(device), _read_dtype(dtype)
    source = open_source(name, revision=revision, offline=offline, hub=hub)
    kept = asked or _choose_dtype(source, where)
    origin = FileOrigin(source.location.absolute(), asked, kept, quantize, threads, native)
    return origin.describe(where, kept, _read_settings(source))


def load_parts(
    name: str | Path,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    quantize: str | None = "auto",
    threads: int | None = None,
    revision: str | None = None,
    offline: bool | None = None,
    progress: Progress | None = None,
    native: bool | None = None,
    hub: HubOptions = NO_OPTIONS,
    devices: DeviceRequest | None = None,
) -> LoadedParts:
    """Open a model's files and read its weights once, into the form they are kept in; laid over `devices` if given."""
    where = choose_device(device) if devices is None else devices.lead
    asked = _read_dtype(dtype)
    start_triton(where)
    try:
        parts = _load_parts(name, where, asked, quantize, threads, revision, offline, progress, native, hub, devices)
        await_triton()  # a caller may import parts of it next
        return parts
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)  # they hold the weights that were loaded so far
        raise ResourceError(
            f"{str(name)!r:.200} needs more memory than {where} has free. Close other programs, use a smaller model or "
            "one with fewer bits (quantize='int4', a GGUF file), or another device"
        ) from error


def _load_parts(
    name: str | Path,
    where: torch.device,
    asked: torch.dtype | None,
    quantize: str | None,
    threads: int | None,
    revision: str | None,
    offline: bool | None,
    progress: Progress | None,
    native: bool | None,
    hub: HubOptions,
    devices: DeviceRequest | None,
) -> LoadedParts:
    report = None if progress is None else partial(progress, "safetensors")
    source = open_source(name, revision=revision, offline=offline, hub=hub, report=report)
    is_gguf = source.kind == "gguf"
    is_adapted = _choose_adapter(native, source, quantize)
    if is_adapted and find_pickles(source.location):
        raise LoadError(
            f"{source.location} has pickles alone, and transformers reads safetensors here; rewrite it first: "
            f"unspool convert {source.location} OUT"
        )
    if is_adapted and devices is not None:
        raise UnsupportedError(
            f"{name_architecture(source.config)} runs through transformers, on one device; only native decoders are "
            "laid over several: name one device"
        )
    packing = None if is_adapted else _choose_packing(quantize, source, where, asked)
    _use_threads(threads)
    kept = asked or _choose_dtype(source, where)
    config = source.config
    if not is_gguf and not is_adapted and reads_pictures(config):
        config = read_whole_config(source.location)
    model: NativeModel | Adapted | WholeObject
    with ThreadPoolExecutor(1) as beside:  # a fifth of the time: the tokenizer is built while weights are read
        reading = beside.submit(_read_tokenizer, source)
        if is_adapted:
            architecture = name_architecture(source.config)
            await_triton()  # transformers imports parts of it
            with one_thread(0) if where.type == "cpu" else nullcontext():
                model = load_adapted(
                    source.location,
                    source.config,
                    source.tensors,
                    device=where,
                    dtype=kept,
                    name=architecture,
                    by_choice=native is False,
                )
        else:
            model = build_model(
                config,
                source.tensors,
                is_gguf=is_gguf,
                device=where,
                dtype=kept,
                progress=None if progress is None else lambda done, total: progress("weights", done, total),
                packing=packing,
                devices=devices,
            )
        tokenizer = reading.result()
    model.origin = FileOrigin(source.location.absolute(), asked, kept, quantize, threads, native, devices)
    pictures = None
    if not is_gguf and (reads_pictures(config) or (is_adapted and "vision_config" in config)):
        pictures = PictureReader(source.location, config, source.tensors, getattr(model, "inner", None))
    return LoadedParts(str(name), source.location, model, tokenizer, _read_settings(source), pictures)


def _read_settings(source: OpenedModel) -> GenerationConfig:
    if source.kind != "gguf" and not source.generation_config:
        return GenerationConfig.from_model_config(source.config)
    return GenerationConfig.from_dict(keep_unknown(source.generation_config))


def _choose_adapter(native: bool | None, source: OpenedModel, quantize: str | None) -> bool:
    """Whether transformers reads and runs the model: if there is no native one, or if it is asked for."""
    if native not in (None, True, False):
        raise SettingError(
            f"native={native!r:.40} is neither True nor False, nor None for a native model if there is one"
        )
    if source.kind == "gguf":
        if native is False:
            raise UnsupportedError("native=False has transformers read a folder, and this is a GGUF file; leave it out")
        return False
    is_adapted = find_family(source.config) is None if native is None else not native
    if is_adapted and isinstance(source.tensors, QuantisedTensors):
        raise UnsupportedError(
            f"its weights are quantised by {source.tensors.method}, which is read for native models, and "
            f"{name_architecture(source.config)} runs through transformers; use the unquantised checkpoint"
        )
    if is_adapted and quantize not in ("auto", None):
        raise UnsupportedError(
            f"quantize={quantize!r} packs the weights of native models, and {name_architecture(source.config)} runs "
            "through transformers; leave it out"
        )
    return is_adapted


def _choose_packing(
    quantize: str | None, source: OpenedModel, device: torch.device, dtype: torch.dtype | None
) -> Packing | None:
    """How the matrices are quantised: as asked; else a GGUF's own blocks, if there are products for them."""
    if quantize not in ("auto", "int8", "int4", "fp8", *QUANTISED_TABLES, None):
        raise SettingError(
            f"quantize={quantize!r:.40} is not known; use 'int8', 'int4', 'fp8', "
            f"{', '.join(map(repr, QUANTISED_TABLES))}, or None for plain numbers"
        )
    if quantize is None:
        return None
    if quantize != "auto":
        if device.type not in ("cpu", "cuda"):
            raise UnsupportedError(
                f"quantize={quantize!r} is built for CPUs and CUDA GPUs; load with quantize=None on {device}"
            )
        if quantize == "fp8":
            if device.type == "cpu":
                raise UnsupportedError("quantize='fp8' is built for CUDA GPUs; use quantize='int8' on a CPU")
            return "fp8"
        if device.type == "cpu" and dtype not in (None, torch.float32):
            raise SettingError(f"quantize={quantize!r} computes in float32 beside its blocks; leave dtype={dtype} out")
        return cast("Packing", quantize)
    has_products = find_library() is not None if device.type == "cpu" else device.type == "cuda" and has_triton()
    if isinstance(source.tensors, QuantisedTensors) and source.tensors.has_codes:
        can_use = has_products and (device.type == "cuda" or dtype in (None, torch.float32))
        return "tables" if can_use and can_pack(source.config, is_gguf=False) else None
    is_quantised = _has_integers(source)
    can_use = has_products and dtype is None
    return "file" if is_quantised and can_use and can_pack(source.config, is_gguf=source.kind == "gguf") else None


def _has_integers(source: OpenedModel) -> bool:
    """Whether the files have matrices as whole numbers of few bits."""
    tensors = source.tensors
    if isinstance(tensors, QuantisedTensors):
        return tensors.has_integers
    return source.kind == "gguf" and any(tensors.info(name).stored not in _STORED for name in tensors.names())


def _use_threads(threads: int | None) -> None:
    """Set the number of threads of the CPU library in this process."""
    if threads is None:
        return
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= MOST_THREADS:
        raise SettingError(f"threads={threads!r:.40} is no number from 1 to {MOST_THREADS}")
    library = find_library()
    if library is not None:
        library.threads = threads
    set_torch_threads(threads)


def _read_tokenizer(source: OpenedModel) -> Tokenizer | None:
    """A folder or a GGUF need not have a tokenizer: its model is then prompted by token ids."""
    if source.kind == "gguf":
        has_one = source.config.get("tokenizer.ggml.model", "none") not in _NO_TOKENIZER
        return tokenizer_from_gguf(source.config) if has_one else None
    has_one = any((source.location / name).is_file() for name in _TOKENIZER_FILES)
    return open_tokenizer(source.location) if has_one else None


def choose_device(device: str | torch.device | None) -> torch.device:
    if device is None:
        found = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        refuse_forked(found)
        return found
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise SettingError(
            f"device={device!r} is not a device that torch knows; use 'cpu', 'cuda' or 'cuda:N'"
        ) from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise SettingError(f"device={device!r} was asked for, and torch finds no CUDA device here; use device='cpu'")
    check_present(chosen)
    refuse_forked(chosen)
    return chosen


def _read_dtype(dtype: Any) -> torch.dtype | None:
    if isinstance(dtype, str):
        if dtype not in _DTYPES:
            raise SettingError(f"dtype={dtype!r} is not one of {', '.join(_DTYPES)}")
        return _DTYPES[dtype]
    found = next((known for known in _DTYPES.values() if known == dtype), None)
    if dtype is not None and found is None:
        raise SettingError(f"dtype={dtype!r} can't be computed in; use one of {', '.join(_DTYPES)}")
    return found


def _choose_dtype(source: OpenedModel, device: torch.device) -> torch.dtype:
    """float32 on a CPU, where half precision is slow; on a GPU the dtype of most stored weights."""
    if device.type == "cpu":
        return torch.float32
    tensors = source.tensors
    names = tensors.plain_names if isinstance(tensors, QuantisedTensors) else tensors.names()
    stored = [tensors.info(name) for name in names]
    largest = max(stored, key=lambda tensor: tensor.nbytes)
    return _STORED.get(largest.stored, torch.bfloat16)
