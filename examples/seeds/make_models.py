"""Make the small models that the scripts beside this file load: `python make_models.py FOLDER`.

Their weights are the random ones of the conformance tests; a tokenizer of characters and a few pairs goes with each.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

GOLDENS = Path(__file__).parents[2] / "tests" / "conformance" / "goldens" / "models"
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
PAIRS = (
    *("th", "he", "in", "er", "an", "re", "on", "at", "en", "nd", "ti", "es", "or", "te", "of", "ed", "is", "it"),
    *("al", "ar", "st", "to", "nt", "ng", "se", "ha", "as", "ou", "io", "le", "ve", "co", "me", "de", "hi", "ri"),
)
CHAT = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def make_tokenizer() -> tokenizers.Tokenizer:
    """A tokenizer whose ids fit models with 160 tokens."""
    letters = [chr(code) for code in (10, *range(33, 127))]
    pieces = [*SPECIAL, *letters, "\u2581", *PAIRS]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    merges = [(pair[0], pair[1]) for pair in PAIRS]
    made = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="never")
    made.decoder = decoders.Metaspace(replacement="\u2581", prepend_scheme="never")
    made.add_special_tokens(list(SPECIAL))
    return made


def make_models(target: Path, names: list[str] | None = None) -> None:
    """Write every model's folder, or those of the names given."""
    for source in sorted(GOLDENS.iterdir()):
        if not source.is_dir() or (names is not None and source.name not in names):
            continue
        folder = target / source.name
        shutil.copytree(source, folder)
        make_tokenizer().save(str(folder / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": "<pad>",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "chat_template": CHAT,
            "model_max_length": 64,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


if __name__ == "__main__":
    make_models(Path(sys.argv[1]))
