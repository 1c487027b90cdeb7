"""Folders of recipes: found, read, listed and checked as `unspool recipe check` does; their code is never run."""

from __future__ import annotations

from pathlib import Path
from random import Random

from tests.fuzz.findings import Difference
from tests.fuzz.mutate import hostile_string, mutate_bytes, mutate_string
from unspool.errors import SettingError
from unspool.recipes.finding import describe_code, find_recipe, list_code
from unspool.recipes.requirements import check_requirements
from unspool.recipes.running import check_source, load_recipe

NAME = "recipes"
SHORT = 60
RAN = "ran"  # the file that a recipe's code would write

_SCRIPT = f"""\
from pathlib import Path
from .helper import choose

Path({RAN!r}).touch()

def generate(model, input_ids, **settings):
    return choose(model, input_ids)
"""
_FILES = {
    "custom_generate/generate.py": _SCRIPT,
    "custom_generate/helper.py": "def choose(model, ids):\n    return ids\n",
    "custom_generate/requirements.txt": "torch>=2.0\nnumpy>=1.26,<99\nnothing-of-this-name\n# a comment\n",
    "README.md": "# A recipe\n",
    "config.json": '{"model_type": "llama"}',
}
_NAMES = (
    *("custom_generate/generate.py", "generate.py", "custom_generate/__init__.py", "custom_generate/x/y.py"),
    *("custom_generate/__pycache__/helper.cpython-311.pyc", "custom_generate/helper.so", "a.pyd", "x.so.1"),
    *("custom_generate/requirements.txt", "requirements.txt", "custom_generate/tokens.txt", "weights.bin"),
)
_VERSIONS = (">=1", "==1.*", "~=2", "===x", "<0.0.0.0", "!=1!2.3+l", ">= 1 , < 2", "[extra]>=1", ";python_version>'3'")
_ROWS = (">=1", ">=1,", "=1", "0" * 60, "a" * 900, "=" * 900, " " * 900 + ">=1", ",".join([">=1"] * 300), "1!" * 300)


def _draw_requirements(rng: Random) -> str:
    lines = []
    for _ in range(rng.choice((1, 2, 5, 501))):
        name = rng.choice(("torch", "numpy", "a", "a.b-c_d", "-r x", "git+https://x", hostile_string(rng)))
        lines.append(name + rng.choice((*_VERSIONS, *_ROWS, hostile_string(rng))))
    return "\n".join(lines)


def _draw_code(rng: Random) -> str:
    return rng.choice(
        (
            "(" * rng.choice((50, 5_000, 100_000)),
            "x = " + "-" * rng.choice((50, 5_000, 100_000)) + "1",
            "generate = " + "lambda: " * rng.choice((50, 5_000)) + "1",
            "# coding: rot13\n" + _SCRIPT,
            "import os as generate",
            "def generate(model): pass\n" * 5_000,
            "generate = " + "9" * 5_000,
            "if 1:\n" + "".join(" " * depth + "if 1:\n" for depth in range(1, 200)),
            "\x00" + _SCRIPT,
            _SCRIPT.replace("generate", hostile_string(rng)),
        )
    )


def make(rng: Random) -> dict[str, bytes | str]:
    """Files by their names; a text that begins with -> is a link's goal."""
    files: dict[str, bytes | str] = {name: text.encode() for name, text in _FILES.items()}
    for _ in range(rng.choice((1, 1, 2, 4))):
        name = rng.choice([*files])
        roll = rng.randrange(6)
        held = files[name]
        data = held if isinstance(held, bytes) else held.encode()
        if roll == 0:
            del files[name]
        elif roll == 1:
            files[name] = mutate_bytes(rng, data, rng.choice((1, 3)))
        elif roll == 2:
            files[name] = mutate_string(rng, data.decode(errors="replace")).encode(errors="surrogatepass")
        elif roll == 3:
            files["custom_generate/requirements.txt"] = _draw_requirements(rng).encode(errors="surrogatepass")
        elif roll == 4:
            goal = rng.choice(("->/etc/passwd", "->../..", "->.", "->helper.py", "->/dev/zero", "->nowhere"))
            files[rng.choice(_NAMES)] = rng.choice((goal, rng.randbytes(20)))
        else:
            files["custom_generate/generate.py"] = _draw_code(rng).encode(errors="surrogatepass")
        if not files:
            break
    return files


def run(given: dict[str, bytes | str], folder: Path) -> None:
    """Check it, and try to load it without trust: nothing may run."""
    root = folder / "recipe"
    root.mkdir()
    for name, content in given.items():
        path = root / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                path.write_bytes(content)
            else:
                path.symlink_to(content.removeprefix("->"))
        except OSError:  # a file and a folder of one name
            continue
    recipe = find_recipe(root)
    check_source(recipe)
    listed = list_code(recipe)
    if "generate.py" not in listed or "\x1b" in listed + describe_code(recipe):
        raise Difference(f"the list of code lacks a file, or holds controls: {listed!r:.300}")
    try:
        load_recipe(recipe)
    except SettingError:
        pass
    else:
        raise Difference("a recipe that nobody trusts was loaded")
    if Path(RAN).exists():
        Path(RAN).unlink()
        raise Difference("a recipe's code has run")
    check_requirements(recipe.requirements, recipe.name)
