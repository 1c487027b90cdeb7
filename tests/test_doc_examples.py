"""The examples of README.md and docs/*.md are run as they stand, and their commands are read by the program.

Each python block of a page is executed after those above it, in one namespace. What a page leaves to its reader (`ids`,
`prompts`, a folder of a model) is given here; so are the names of models: a tiny one, or the default model with short
answers. A block that can't be run is named in NOT_RUN with the reason, and still compiled, its `unspool.…` looked up.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
import sys
import wave
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import unspool
from tests.cli.conftest import TEMPLATE, TINY, build_tokenizer
from unspool.cli.main import COMMANDS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FOR_A_GPU = ('quantize="fp8"',)  # parts of statements that need one
SHORT = 12  # tokens of an answer whose length an example leaves open

# (page, a part of the block): why it is not run.
NOT_RUN = {
    ("adapters.md", ">>> config = transformers.PhimoeConfig"): "a session: tests/models/adapters/test_adapters_page.py",
    ("compiling.md", "CompileConfig"): "compiles for minutes: tests/engine and tests/decoding have it on tiny models",
    ("pictures.md", "lm.generate(chat"): "needs a trained model that reads pictures: tests/api/test_pictured.py",
    ("pictures.md", "unspool.pipeline("): "needs a trained model that reads pictures: tests/api/test_pictured.py",
    ("frameworks.md", "tf.function"): "needs TensorFlow: tests/frameworks, where it is installed",
    ("frameworks.md", "jax.jit"): "needs JAX: tests/frameworks, where it is installed",
    ("scale.md", "ray.data.read_parquet"): "needs a cluster and a bucket: tests/ray",
    ("scale.md", "ds.map_batches"): "needs a cluster: tests/ray",
    ("serving.md", "unspool.serve("): "runs until a signal: tests/server",
    ("voices.md", "unspool.pipeline("): "needs a trained MusicGen: tests/pretrained/test_voices.py",
    ("voices.md", "AutoModelForTextToWaveform"): "needs a trained MusicGen: tests/pretrained/test_voices.py",
    ("transcription.md", 'unspool.load("whisper-tiny.en")'): "needs a trained Whisper: tests/real, tests/speech",
    ("transcription.md", "a smaller or distilled Whisper"): "needs a trained Whisper: tests/speech/test_drafts.py",
}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def reason(self) -> str | None:
        """Why it is not run, if it is not."""
        found = [why for (page, part), why in NOT_RUN.items() if page == self.page and part in self.text]
        return found[0] if found else None


def list_blocks() -> list[Block]:
    blocks = []
    for page in PAGES:
        text = page.read_text("utf-8")
        for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S):
            blocks.append(Block(page.name, text.count("\n", 0, found.start()) + 1, found[1], found[2]))
    return blocks


BLOCKS = list_blocks()
PYTHON = [one for one in BLOCKS if one.kind == "python"]


def test_every_exception_is_still_there() -> None:
    assert len(PYTHON) > 45
    for page, part in NOT_RUN:
        assert [one for one in PYTHON if one.page == page and part in one.text], (page, part)


@pytest.mark.parametrize("block", [one for one in PYTHON if one.reason], ids=str)
def test_what_is_not_run_is_python_with_names_that_exist(block: Block) -> None:
    if ">>>" in block.text:
        return  # doctest reads it elsewhere
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "unspool":
            assert hasattr(unspool, node.attr), node.attr
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "unspool":
            module = import_module(node.module)
            assert all(hasattr(module, one.name) for one in node.names)


# --- what a page leaves to its reader ---------------------------------------------------------------------------------
@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Folders of tiny models by kind, each with a tokenizer and a chat template."""
    made = {}
    for kind in ("llama", "mamba", "marian"):
        folder = tmp_path_factory.mktemp("models") / kind
        shutil.copytree(TINY.parent / kind, folder)
        folder.chmod(0o755)
        build_tokenizer().save(str(folder / "tokenizer.json"))
        config = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "chat_template": TEMPLATE}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        made[kind] = str(folder)
    return made


@pytest.fixture(scope="session")
def default_lm(default_model_file: Path) -> unspool.LanguageModel:
    """The default model, whose answers are short unless an example says otherwise."""
    return unspool.load(default_model_file)


class SmoothedScores(unspool.LogitsProcessor):
    """The processor of docs/plugins.md."""

    def __init__(self, smoothing_factor: float) -> None:
        self.smoothing_factor = smoothing_factor

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores - self.smoothing_factor * (scores - scores.amax(-1, keepdim=True)) ** 2


def give(page: str, block: Block, names: dict[str, Any], lm: unspool.LanguageModel, folders: Mapping[str, str]) -> None:
    """Put in what the page leaves to its reader."""
    import transformers

    tiny = unspool.load(folders["mamba" if page == "mamba.md" else "llama"])
    ids = torch.tensor([[5, 6, 7, 8]])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders["llama"], padding_side="left")
    usual: dict[str, Any] = {
        "unspool": unspool, "torch": torch, "lm": lm, "folder": folders["llama"], "tokenizer": tokenizer,
        "model": tiny.model, "ids": ids, "input_ids": ids, "new_ids": ids,
        "inputs": {"input_ids": ids}, "prompts": ["One, two,", "The sun is"],
    }  # fmt: skip
    special: dict[str, dict[str, Any]] = {
        "engine.md": {"rows_of_ids": [[5, 6, 7], [8, 9]], "config": unspool.GenerationConfig(max_new_tokens=4)},
        "mamba.md": {"lm": tiny},
        "plugins.md": {"QuadraticSmoothing": SmoothedScores},
        "recipes.md": {"my_function": lambda model, input_ids, **kwargs: unspool.generate(model, input_ids, **kwargs)},
        "speculation.md": {"draft": tiny.model, "draft_tokenizer": tokenizer},
        "transformers.md": {name: getattr(unspool, name) for name in ("GenerationConfig", "pipeline")},
        "watermarking.md": {"key": 15485863, "keys": [654, 400, 836, 123, 340, 443, 597, 160, 57]},
    }
    for name, value in {**usual, **special.get(page, {})}.items():
        names.setdefault(name, value)
    if page == "caches.md" and "running.join" in block.text:  # after some rows were read
        pool = unspool.BlockPool(num_blocks=64)
        names["unspool"] = _PagedCaches(tiny.model, pool)
        names["pool"] = pool
    if page == "engine.md" and "with unspool.Engine" not in block.text:
        names["engine"] = unspool.Engine(lm, max_rows=4, memory=200 << 20)


class _PagedCaches:
    """`unspool`, whose first paged cache has read three rows and whose second has read one."""

    def __init__(self, model: Any, pool: unspool.BlockPool) -> None:
        self._sizes = iter((3, 1))
        self._model, self._pool = model, pool

    def PagedCache(self, pool: unspool.BlockPool) -> unspool.PagedCache:  # noqa: N802 - the name in the example
        cache = unspool.PagedCache(pool)
        self._model(torch.full((next(self._sizes), 4), 7), past_key_values=cache, use_cache=True)
        return cache


def make_reader_s_files(folder: Path) -> None:
    """The files that examples read."""
    (folder / "benchmarks").symlink_to(ROOT / "benchmarks")
    with wave.open(str(folder / "talk.wav"), "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(16_000)
        sound.writeframes((np.sin(np.arange(16_000)) * 8_000).astype("<i2").tobytes())


def make_loader(lm: unspool.LanguageModel, folders: Mapping[str, str]) -> Callable[..., unspool.LanguageModel]:
    """`unspool.load` of the machine of an example: its names and folders lead to models that are here."""
    load = unspool.load

    def find(name: Any = None, **options: Any) -> unspool.LanguageModel:
        if name is None or (name == "smollm2-135m" and not options):
            return lm
        kind = next((kind for kind, word in (("mamba", "mamba"), ("marian", "opus-mt")) if word in str(name)), "llama")
        made = load(folders[kind], **options)
        made.model.generation_config.max_new_tokens = SHORT
        return made

    return find


def prepare(text: str, folders: Mapping[str, str]) -> str:
    """The text with addresses and names of the hub replaced by what is here."""
    text = text.replace('custom_generate="owner/name", revision="<commit>"', 'custom_generate="./my-recipe"')
    return text.replace('"owner/name"', repr(folders["llama"]))


@pytest.fixture
def undo() -> Iterator[None]:
    yield
    unspool.detach()
    with suppress(Exception):
        unspool.unregister("smoothing_factor")


@pytest.mark.filterwarnings("ignore")  # of transformers
@pytest.mark.parametrize("page", sorted({one.page for one in PYTHON if not one.reason}))
def test_the_examples_of_a_page(
    page: str, default_lm: unspool.LanguageModel, folders: Mapping[str, str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, undo: None,
) -> None:  # fmt: skip
    from unspool.cli.main import main

    length = 64 if page == "structured_output.md" else SHORT  # JSON has to be whole
    monkeypatch.setattr(default_lm.model.generation_config, "max_new_tokens", length)
    monkeypatch.chdir(tmp_path)
    make_reader_s_files(tmp_path)
    if page == "recipes.md":
        assert main(["recipe", "new", "my-recipe"]) == 0
    module = ModuleType("example")  # classes of examples look for theirs
    monkeypatch.setitem(sys.modules, "example", module)
    names = module.__dict__
    monkeypatch.setattr(unspool, "load", make_loader(default_lm, folders))
    with ServedDefault(page, default_lm) as address:
        for block in [one for one in PYTHON if one.page == page and not one.reason]:
            give(page, block, names, default_lm, folders)
            text = prepare(block.text, folders).replace("http://127.0.0.1:8000", address)
            run_block(block, text, names)
            if isinstance(engine := names.pop("engine", None), unspool.Engine):
                engine.close()
            names["unspool"] = unspool


def run_block(block: Block, text: str, names: dict[str, Any]) -> None:
    """Execute a block statement by statement; where a comment begins with a value, the statement has that value."""
    source = "\n" * block.line + text
    lines = source.splitlines()
    for node in ast.parse(source).body:
        place = f"{block}, line {node.lineno}"
        if not torch.cuda.is_available() and any(one in ast.get_source_segment(source, node) for one in FOR_A_GPU):
            continue
        try:
            if not isinstance(node, ast.Expr):
                exec(compile(ast.Module([node], []), place, "exec"), names)
                continue
            value = eval(compile(ast.Expression(node.value), place, "eval"), names)  # noqa: S307 - our own pages
        except Exception as error:
            raise AssertionError(f"{place}: {lines[node.lineno - 1]}\n{type(error).__name__}: {error}") from error
        check_value(place, value, read_comment(lines, node.end_lineno or 0))


def read_comment(lines: list[str], last: int) -> Any:
    """The value that a comment behind a statement, or on the line below it, begins with; None if it has none."""
    below = lines[last] if last < len(lines) else ""
    behind = lines[last - 1].partition("  # ")[2]
    text = behind or (below[2:] if below.startswith("# ") else "")
    with suppress(SyntaxError, ValueError):
        return ast.literal_eval(text.strip())
    found = re.match(r"([A-Z]\w+)\(", text)  # the class of an object
    return found and found[1]


def check_value(place: str, value: Any, shown: Any) -> None:
    """A shown text begins as the answer does (kernels of other machines round otherwise); a class is the value's."""
    if isinstance(shown, list) and isinstance(value, list):
        assert len(value) == len(shown), (place, value)
        for one, other in zip(value, shown, strict=True):
            check_value(place, one, other)
    elif isinstance(shown, str) and isinstance(value, str):
        assert value.split()[:2] == shown.split()[:2], (place, value, shown)
    elif isinstance(shown, str):
        assert type(value).__name__ == shown, (place, value)
    elif shown is not None:
        assert type(value) is type(shown), (place, value, shown)


class ServedDefault:
    """A server with the default model for pages whose examples ask one; its address."""

    def __init__(self, page: str, lm: unspool.LanguageModel) -> None:
        self._running: Any = None
        self._wanted = page in ("README.md", "serving.md")
        self._lm = lm

    def __enter__(self) -> str:
        if not self._wanted:
            return ""
        pytest.importorskip("openai")
        from tests.server.running import RunningServer

        self._running = RunningServer({"smollm2-135m": self._lm}, max_rows=8, memory=200 << 20, block_size=64)
        return str(self._running.__enter__().address)

    def __exit__(self, *error: Any) -> None:
        if self._running is not None:
            self._running.__exit__(*error)


# --- commands ---------------------------------------------------------------------------------------------------------
def list_commands() -> list[tuple[str, list[str], bool]]:
    """Each `unspool …` of a block without a language, or of a shell, as words; `$ ` before it and comments left out."""
    found = []
    for block in BLOCKS:
        if block.kind not in ("", "sh", "bash", "console"):
            continue
        for line in block.text.splitlines():
            for part in re.split(r"&&|\|(?!\|)", line.removeprefix("$ ")):
                if re.match(r"\s*unspool [a-z]", part):
                    part = re.sub(r"\$\((?:[^()]*)\)", "text", part)
                    words = shlex.split(re.sub(r"\s{3,}[a-z].*$", "", part), comments=True)
                    found.append((f"{block}", words[1:], True))
    for page in PAGES:  # within sentences
        text = page.read_text("utf-8")
        for code in re.findall(r"`unspool ([a-z][^`…]*)`", text):
            with suppress(ValueError):
                words = shlex.split(code)
                if words[0] in COMMANDS:
                    found.append((page.name, words, False))
    return found


COMMAND_LINES = list_commands()


def test_commands_are_found() -> None:
    assert len(COMMAND_LINES) > 40 and {words[0] for _, words, _ in COMMAND_LINES} >= set(COMMANDS) - {"train-detector"}


@pytest.mark.parametrize(("place", "words", "is_whole"), COMMAND_LINES)
def test_a_command_of_a_page_can_be_read(place: str, words: list[str], is_whole: bool) -> None:
    """The program knows the command and each of its options, and can read a whole line of an example."""
    name, *rest = words
    assert name in COMMANDS, place
    parser = import_module(f"unspool.cli.{name.replace('-', '_')}").build_parser()
    if is_whole and name != "recipe":  # which has commands of its own
        parser.read([word for word in rest if word != "--help"])
    known = parser._option_string_actions
    for word in rest:
        if word.startswith("--") and name != "recipe":
            assert word.partition("=")[0] in known, (place, word)
