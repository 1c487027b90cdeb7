"""A BART out of an npz file, with a tokenizer that reads letters and writes sounds."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import unspool
from unspool.errors import LoadError
from unspool.loading.conversion.bart import convert_bart

TOLD: dict[str, Any] = {
    "grapheme_chars": "____abc'xyz",
    "phoneme_chars": "____abcæʃ",
    "d_model": 8,
    "ffn_dim": 12,
    "num_heads": 1,
    "max_position_embeddings": 30,
}


def make_bart() -> Any:
    torch.manual_seed(0)
    sides = {
        f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in (("layers", 1), ("ffn_dim", 12))
    }
    heads = {f"{side}_attention_heads": 1 for side in ("encoder", "decoder")}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = transformers.BartConfig(
        vocab_size=13,
        d_model=8,
        max_position_embeddings=30,
        init_std=0.4,
        forced_eos_token_id=None,
        **sides,
        **heads,
        **ids,
    )
    return transformers.BartForConditionalGeneration(config).eval()


def convert(tmp_path: Path, told: Any = TOLD, **changed: np.ndarray) -> Path:
    source, target = tmp_path / "from", tmp_path / "to"
    source.mkdir()
    target.mkdir()
    tied = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight")
    weights = {name: values.numpy() for name, values in make_bart().state_dict().items() if name not in tied}
    np.savez_compressed(source / "a.npz", meta_json=json.dumps(told), **{**weights, **changed})
    convert_bart(source, target)
    return target


def test_a_bart_comes_out_as_it_went_in(tmp_path: Path) -> None:
    lm = unspool.load(str(convert(tmp_path)))
    assert lm.tokenizer.encode("a'zq") == [1, 4, 7, 10, 3, 2]
    assert lm.tokenizer.decode([4, 7, 8, 10, 2], skip_special_tokens=True) == "aæʃz"
    ids = torch.tensor([[1, 4, 7, 10, 2]])
    expected = make_bart()(input_ids=ids, decoder_input_ids=ids).logits
    torch.testing.assert_close(lm.model(input_ids=ids, decoder_input_ids=ids).logits, expected, atol=1e-4, rtol=1e-4)


BAD: dict[str, tuple[Any, dict[str, np.ndarray], str]] = {
    "no sizes": ({**TOLD, "d_model": True}, {}, "no size for d_model"),
    "a huge size": ({**TOLD, "ffn_dim": 1 << 40}, {}, "no size for ffn_dim"),
    "no letters": ({**TOLD, "grapheme_chars": 3}, {}, "grapheme_chars"),
    "more letters than tokens": ({**TOLD, "phoneme_chars": "_" * 20}, {}, "phoneme_chars"),
    "a letter twice": ({**TOLD, "grapheme_chars": "____abc'ayz"}, {}, "twice"),
    "not an object": ([], {}, "not all float32"),
    "other numbers": (TOLD, {"final_logits_bias": np.zeros((1, 13), np.int32)}, "not all float32"),
    "not a number": (TOLD, {"final_logits_bias": np.full((1, 13), np.nan, np.float32)}, "not finite"),
    "objects": (TOLD, {"final_logits_bias": np.array([{}], dtype=object)}, "not the npz"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_refused(tmp_path: Path, case: str) -> None:
    told, changed, message = BAD[case]
    with pytest.raises(LoadError, match=message):
        convert(tmp_path, told, **changed)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(b"PK no npz")
    with pytest.raises(LoadError, match="not the npz"):
        convert_bart(tmp_path, tmp_path)


def test_headers_that_claim_more_than_there_is_are_refused(tmp_path: Path) -> None:
    """An array's memory is asked for by its header: 64 GB, by a file of some bytes."""
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (16000000000,), }"
    content = b"\x93NUMPY\x01\x00" + (len(header) + 1).to_bytes(2, "little") + header + b"\n" + bytes(64)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("model.shared.weight.npy", content)
    with pytest.raises(LoadError, match="does not hold what its header says"):
        convert_bart(tmp_path, tmp_path / "to")


@pytest.mark.parametrize("place", range(0, 400, 7))
def test_damaged_archives_are_refused(tmp_path: Path, place: int) -> None:
    values = np.linspace(0, 1, 300, dtype=np.float32)
    np.savez_compressed(tmp_path / "a.npz", weight=values)
    content = bytearray((tmp_path / "a.npz").read_bytes())
    content[place % len(content)] ^= 0x15
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(LoadError):
        convert_bart(tmp_path, tmp_path / "to")
