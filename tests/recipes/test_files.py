"""What runs is what was read, shown and hashed; nothing else of a recipe's folder runs, and nothing in it hangs."""

from __future__ import annotations

import os
import py_compile
import subprocess
import sys
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from unspool.cli.main import main
from unspool.errors import LoadError, SettingError
from unspool.recipes.finding import find_recipe, list_code
from unspool.recipes.requirements import check_requirements
from unspool.recipes.running import load_recipe

GOOD = "def generate(model):\n    return 'good'\n"
EVIL = "def generate(model):\n    return 'evil'\n"


def write(folder: Path, **files: str) -> Path:
    """A recipe's folder: `helper__deep` is helper/deep.py."""
    for name, text in files.items():
        path = folder / "custom_generate" / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def plant(script: Path, source: str) -> Path:
    """A compiled file for a script that Python takes without looking at the script."""
    other = script.with_name("other.py")
    other.write_text(source)
    place = script.parent / "__pycache__" / f"{script.stem}.{sys.implementation.cache_tag}.pyc"
    py_compile.compile(
        str(other), cfile=str(place), dfile=str(script), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH
    )
    other.unlink()
    return place


@pytest.mark.parametrize("layout", ["custom_generate", "."])
@pytest.mark.parametrize("name", ["generate", "helper"])
def test_a_compiled_file_never_runs_in_place_of_its_source(tmp_path: Path, layout: str, name: str) -> None:
    package = tmp_path / "recipe" / layout
    package.mkdir(parents=True)
    (package / "generate.py").write_text("from .helper import generate\n" if name == "helper" else GOOD)
    (package / "helper.py").write_text(GOOD)
    held = find_recipe(tmp_path / "recipe")
    plant(package / f"{name}.py", EVIL)  # after it was hashed
    assert load_recipe(held, trusts=True)(None) == "good"
    with pytest.raises(LoadError, match=r"__pycache__.*compiled code.*delete it"):
        load_recipe(tmp_path / "recipe", trusts=True)


@pytest.mark.parametrize(
    "name",
    [
        *("helper.pyc", "deep/helper.PYC", "helper.so", "helper.pyd", "libhelper.so.1", "helper.dylib", "helper.dll"),
        *(f"helper.{sys.implementation.cache_tag}-x86_64-linux-gnu.so", "x.whl", "x.pth", "__pycache__/data.json"),
        *("model.bin", "weights.dat"),  # with a program's first bytes
    ],
)
def test_compiled_files_are_refused(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    place = write(tmp_path, generate=GOOD) / "custom_generate" / name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(b"\x7fELF\x02\x01\x01" + bytes(50))
    with pytest.raises(LoadError, match="compiled code"):
        load_recipe(tmp_path, trusts=True)
    assert main(["recipe", "check", str(tmp_path)]) == 2 and "compiled code" in capsys.readouterr().err


def test_every_file_is_listed_with_its_hash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, generate="from .helper import generate", helper=GOOD, deep__one="x = 1")
    (tmp_path / "custom_generate" / "words.json").write_text("[1]")
    (tmp_path / "custom_generate" / "a\nname\x1b[2J").write_text("?")
    (tmp_path / "requirements.txt").write_text("torch\n")
    assert main(["recipe", "check", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    for path in tmp_path.rglob("*"):
        if path.is_file() and "\n" not in path.name:
            assert f"{path.relative_to(tmp_path).as_posix()}\n" in shown
            assert sha256(path.read_bytes()).hexdigest() in shown
    assert "custom_generate/a\\nname\\x1b[2J\n" in shown and "\x1b" not in shown
    with pytest.raises(SettingError, match=r"with it come .*helper\.py \([0-9a-f]{16}…\)"):
        load_recipe(tmp_path)


def test_modules_come_from_what_was_read(tmp_path: Path) -> None:
    write(
        tmp_path,
        generate="from . import helper\nfrom .deep.one import x\nfrom .plain import inner\n"
        "def generate(model):\n    return helper.x, x, inner.x, inner.__file__\n",
        helper="x = 'read'",
        deep____init__="from .one import x",
        deep__one="x = 'read'",
        plain__inner="from ..helper import x",  # a folder without an __init__.py
    )
    held = find_recipe(tmp_path)
    for path in tmp_path.rglob("*.py"):
        path.write_text("x = 'changed'")
    assert load_recipe(held, trusts=True)(None) == (*["read"] * 3, str(tmp_path / "custom_generate/plain/inner.py"))
    write(tmp_path, generate="from .helper import x\ndef generate(model):\n    return x\n")
    assert load_recipe(tmp_path, trusts=True)(None) == "changed"
    write(tmp_path, helper="x = 'changed again'")  # the script is the same
    assert load_recipe(tmp_path, trusts=True)(None) == "changed again"
    held = find_recipe(write(tmp_path, generate="from .late import x\ndef generate(model):\n    return x\n"))
    write(tmp_path, late="x = 'not read'")
    with pytest.raises(LoadError, match="the recipe has no such file"):
        load_recipe(held, trusts=True)
    assert not list(tmp_path.rglob("*.pyc"))


def test_source_means_what_it_shows(tmp_path: Path) -> None:
    # In UTF-7, "+AAo-" is the end of a line.
    hidden = "# coding: utf-7\ndef generate(model):\n    return 'good'  # +AAo-    return 'evil'\nx = '+AAo-'\n"
    write(tmp_path, generate=f"\ufeff{hidden}y = 'a\x1b[2Kb\u202ec'  {'#' * 90} {'x' * 200}\n")
    assert load_recipe(tmp_path, trusts=True)(None) == "good"
    shown = list_code(find_recipe(tmp_path))
    assert "\x1b" not in shown and "\u202e" not in shown and "a\\x1b[2Kb\\u202ec" in shown and "##…\n" in shown


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda f: os.mkfifo(f / "custom_generate" / "pipe.py"), "a pipe"),
        (lambda f: (f / "custom_generate" / "out").symlink_to("/etc"), "a link to a folder"),
        (lambda f: (f / "custom_generate" / "out.py").symlink_to("/etc/hostname"), "leads out"),
        (lambda f: write(f, big="#" * (1 << 20) + "\n"), "too large"),
        (lambda f: write(f, **{f"n{n}": "" for n in range(1001)}), "more than 1000 files"),
        (lambda f: (f / "custom_generate" / "bad.py").write_bytes(b"\xff"), "not UTF-8"),
        (lambda f: write(f, generate="-" * 100_000 + "1\ndef generate(model): pass"), "is not Python"),
        (lambda f: write(f, generate=f"x{'.a' * 100_000}\ndef generate(model): pass"), r"is not Python|was loaded"),
        (lambda f: write(f, generate=f"x = {'9' * 9999}\ndef generate(model): pass"), "is not Python"),
        (lambda f: write(f, generate=f"raise SystemExit(0)\n{GOOD}"), "failed when it was loaded: SystemExit"),
        (lambda f: write(f, generate=f"def deep(): deep()\ndeep()\n{GOOD}"), "loaded: RecursionError"),
    ],
)
def test_hostile_folders_end_in_a_clear_error(tmp_path: Path, make: Callable[[Path], object], words: str) -> None:
    make(write(tmp_path, generate=GOOD))
    with pytest.raises(LoadError, match=words):
        load_recipe(tmp_path, trusts=True)


def test_a_folder_named_snapshots_opens_no_other(tmp_path: Path) -> None:
    folder = write(tmp_path / "snapshots" / "one", generate=GOOD)
    (tmp_path / "secret.py").write_text("x = 1")
    (folder / "custom_generate" / "secret.py").symlink_to(tmp_path / "secret.py")
    with pytest.raises(LoadError, match="leads out"):
        find_recipe(folder)


def test_a_recipe_of_the_hubs_cache_is_read_through_its_links(tmp_path: Path) -> None:
    folder = write(tmp_path / "snapshots" / "one", helper="x = 1")
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "abc").write_text(GOOD)
    (folder / "custom_generate" / "generate.py").symlink_to("../../../blobs/abc")
    assert load_recipe(folder, trusts=True)(None) == "good"


@pytest.mark.parametrize(
    "line",
    [
        f"numpy{'>=1' * 13}!",
        "torch" + ">=1 " * 500 + "!",
        "a" * 100_000,
        "a." * 50_000,
        "numpy" + " " * 50_000 + "x",
        "numpy[" * 30_000,
        "numpy[a]" + ",>=1" * 200 + "?",
        "numpy>=1.*",
        "numpy==" + "1" * 5_000,
        "numpy>=1<2",
        "\n".join(["numpy"] * 501),
    ],
)
def test_hostile_requirements_are_refused_at_once(tmp_path: Path, line: str) -> None:
    (tmp_path / "requirements.txt").write_text(line[:60_000])
    began = time.process_time()
    with pytest.raises(LoadError):
        check_requirements(tmp_path / "requirements.txt", "x")
    assert time.process_time() - began < 1


def test_the_program_ends_on_47_bytes(tmp_path: Path) -> None:
    write(tmp_path, generate=GOOD)
    (tmp_path / "requirements.txt").write_text(f"numpy{'>=1' * 13}!!!")
    made = subprocess.run(
        [sys.executable, "-m", "unspool", "recipe", "check", str(tmp_path)],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert made.returncode == 2 and b"not a package with versions" in made.stderr
