"""Folders with sentencepiece files: mutated, read and used."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

from tests.fuzz.mutate import dump_json, mutate_bytes, mutate_json
from tests.text.test_sentencepiece import IDS, MARIAN, T5, write_piece
from unspool.text import open_tokenizer

NAME = "sentencepiece"
SHARE = 1.0
SHORT = 30

_TEXTS = ("hello world!", " a  b\n", ">>deu<< hello", "é日本\u0000", "</s><unk><extra_id_0>", "")


def make(rng: Random) -> dict[str, bytes]:
    """Files of T5's, Pegasus's or Marian's layout; bytes of one of them changed, and maybe a piece put before."""
    kind = rng.choice(("T5", "Pegasus", "Marian"))
    model = MARIAN if kind == "Marian" else T5
    if rng.random() < 0.3:
        model = write_piece("x" * rng.choice((0, 1, 300)), rng.choice((0.0, -1e38, 1e30)), rng.randrange(8)) + model
    if rng.random() < 0.7:
        model = mutate_bytes(rng, model, rng.choice((1, 2, 5)))
    if kind != "Marian":
        config = {"tokenizer_class": f"{kind}Tokenizer", "extra_ids": 4, "offset": rng.choice((0, 3, 103))}
        config = mutate_json(rng, config, 1) if rng.random() < 0.3 else config
        return {"spiece.model": model, "tokenizer_config.json": dump_json(config)}
    ids = mutate_json(rng, dict(IDS), rng.choice((1, 2))) if rng.random() < 0.4 else IDS
    return {"source.spm": model, "vocab.json": dump_json(ids)}


def run(given: dict[str, bytes], folder: Path) -> None:
    """Open the folder, and encode and decode some texts."""
    for name, data in given.items():
        (folder / name).write_bytes(data)
    tokenizer = open_tokenizer(folder)
    for text in _TEXTS:
        ids = tokenizer.encode(text)
        assert json.dumps(tokenizer.decode(ids))
