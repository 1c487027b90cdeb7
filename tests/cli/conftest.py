"""A tiny model with a tokenizer and a chat template, and the program run in this process."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

import unspool
from unspool.cli.main import main

TINY = Path(__file__).parents[1] / "conformance" / "goldens" / "models" / "llama"
TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def build_tokenizer() -> tokenizers.Tokenizer:
    """Byte-level BPE over printable ASCII: 160 tokens, as the tiny model has, every one with a text."""
    characters = ["Ġ", "Ċ", *(chr(code) for code in range(0x21, 0x7F))]
    tokens = ["<pad>", "<s>", "</s>", *characters]
    merges: list[tuple[str, str]] = []
    for left in "Ġaeio":
        for right in "abcdefghijklmnopqrstuvwxyz":
            if len(tokens) < 160:
                merges.append((left, right))
                tokens.append(left + right)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in tokens[:3]])
    return backend


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a model with 128 positions that writes nonsense quickly."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    shutil.copytree(TINY, folder)
    folder.chmod(0o755)
    build_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture(scope="session")
def lm(tiny: str) -> unspool.LanguageModel:
    """The tiny model, loaded by the library."""
    return unspool.load(tiny)


@dataclass(frozen=True)
class Ended:
    """What a run of the program left."""

    code: int
    out: str
    err: str


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ended]:
    """`cli("run", …, stdin=b"…")`: the program in this process, with a pipe at every stream."""

    def run(*words: str, stdin: bytes = b"") -> Ended:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capsys.readouterr()
        code = main(words)
        out, err = capsys.readouterr()
        assert "\x1b" not in out + err, "colours in a pipe"
        return Ended(code, out, err)

    return run
