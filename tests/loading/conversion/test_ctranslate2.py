"""The reader of CTranslate2's files, and a Marian packed as Argos Translate packs them."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.loading.conversion.files import pack_ct2

import unspool
from unspool.errors import LoadError, UnspoolError, UnsupportedError
from unspool.loading.conversion.ctranslate2 import read_variables
from unspool.loading.conversion.marian import convert_marian

FLOATS = np.arange(6, dtype=np.float32).reshape(2, 3)
HALVES = np.array([2.0, 4.0], np.float32)
SOUND = pack_ct2({"a": FLOATS, "b": FLOATS.astype(np.int8), "b_scale": HALVES, "flag": np.array(3, np.int16)})


def read(tmp_path: Path, data: bytes) -> dict[str, np.ndarray]:
    (tmp_path / "model.bin").write_bytes(data)
    return read_variables(tmp_path / "model.bin", "TransformerSpec")


def test_floats_and_scaled_bytes_are_read(tmp_path: Path) -> None:
    found = read(tmp_path, SOUND)
    assert np.array_equal(found["a"], FLOATS) and found["flag"] == 3
    assert np.array_equal(found["b"], FLOATS / HALVES[:, None]) and "b_scale" not in found


BAD: dict[str, tuple[bytes, type[UnspoolError], str]] = {
    "empty": (b"", LoadError, "0 bytes"),
    "another program's": (b"GGUF" * 20, UnsupportedError, "no TransformerSpec"),
    "another kind": (pack_ct2({}, "WhisperSpec"), UnsupportedError, "no TransformerSpec"),
    "cut off": (SOUND[:-3], LoadError, "ends in the middle"),
    "more variables than there are": (pack_ct2({"a": FLOATS}, count=2), LoadError, "ends in the middle"),
    "very many variables": (pack_ct2({"a": FLOATS}, count=1 << 31), LoadError, "claims"),
    "no scale": (pack_ct2({"a": FLOATS.astype(np.int8)}), UnsupportedError, "not read"),
    "a scale of zero": (
        pack_ct2({"a": FLOATS.astype(np.int8), "a_scale": HALVES * 0}),
        UnsupportedError,
        "not read",
    ),
    "another scale": (pack_ct2({"a": FLOATS.astype(np.int8), "a_scale": FLOATS[0]}), UnsupportedError, "not read"),
    "16 bits": (pack_ct2({"a": FLOATS.astype(np.int16), "a_scale": HALVES}), UnsupportedError, "not read"),
    "not a number": (pack_ct2({"a": FLOATS * np.nan}), LoadError, "not finite"),
    "many axes": (pack_ct2({"a": FLOATS.reshape(1, 1, 1, 2, 3)}), LoadError, "5 axes"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_refused(tmp_path: Path, case: str) -> None:
    data, kind, message = BAD[case]
    with pytest.raises(kind, match=message):
        read(tmp_path, data)


def test_a_shape_that_does_not_fit(tmp_path: Path) -> None:
    data = bytearray(pack_ct2({"a": FLOATS}))
    place = data.index(b"\x02\x00\x00\x00\x03\x00\x00\x00")
    data[place : place + 8] = b"\xff" * 8
    with pytest.raises(LoadError, match="does not fit"):
        read(tmp_path, bytes(data))


# --- a Marian ---------------------------------------------------------------------------------------------------

WORDS = ["</s>", "<unk>", *(f"▁w{index}" for index in range(20))]


def make_marian() -> Any:
    torch.manual_seed(0)
    config = transformers.MarianConfig(
        vocab_size=len(WORDS) + 1,
        d_model=16,
        encoder_layers=2,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_position_embeddings=512,
        activation_function="swish",
        scale_embedding=True,
        eos_token_id=0,
        pad_token_id=len(WORDS),
        decoder_start_token_id=len(WORDS),
        init_std=0.3,
    )
    model = transformers.MarianMTModel(config).eval()
    with torch.no_grad():
        model.final_logits_bias[:, :-1].normal_()
        model.model.shared.weight[-1] = 0  # a <pad> begins texts, without an embedding
    return model


def pack_marian(model: Any, changed: dict[str, np.ndarray] | None = None) -> bytes:
    """The model as CTranslate2 writes it: projections of one input are one matrix."""
    state = {name.removeprefix("model."): values.numpy() for name, values in model.state_dict().items()}
    made: dict[str, np.ndarray] = {}

    def put(to: str, *names: str) -> None:
        for end, ours in (
            ("weight", "gamma" if "norm" in to else "weight"),
            ("bias", "beta" if "norm" in to else "bias"),
        ):
            made[f"{to}/{ours}"] = np.concatenate([state[f"{name}.{end}"] for name in names])

    for side, count in (("encoder", 2), ("decoder", 1)):
        for index in range(count):
            layer, to = f"{side}.layers.{index}", f"{side}/layer_{index}"
            put(f"{to}/self_attention/linear_0", *(f"{layer}.self_attn.{part}_proj" for part in "qkv"))
            put(f"{to}/self_attention/linear_1", f"{layer}.self_attn.out_proj")
            put(f"{to}/self_attention/layer_norm", f"{layer}.self_attn_layer_norm")
            put(f"{to}/ffn/linear_0", f"{layer}.fc1")
            put(f"{to}/ffn/linear_1", f"{layer}.fc2")
            put(f"{to}/ffn/layer_norm", f"{layer}.final_layer_norm")
            if side == "decoder":
                put(f"{to}/attention/linear_0", f"{layer}.encoder_attn.q_proj")
                put(f"{to}/attention/linear_1", f"{layer}.encoder_attn.k_proj", f"{layer}.encoder_attn.v_proj")
                put(f"{to}/attention/linear_2", f"{layer}.encoder_attn.out_proj")
                put(f"{to}/attention/layer_norm", f"{layer}.encoder_attn_layer_norm")
        made[f"{side}/num_heads"] = np.array(2, np.int16)
        for name, value in (("pre_norm", 0), ("activation", 2), ("scale_embeddings", 1)):
            made[f"{side}/{name}"] = np.array(value, np.int8)
    made["decoder/start_from_zero_embedding"] = np.array(1, np.int8)
    made["decoder/embeddings/weight"] = state["shared.weight"][:-1]
    made["decoder/projection/bias"] = model.final_logits_bias[0, :-1].numpy()
    return pack_ct2(made | (changed or {}))


def pack_argos(model_bin: bytes, words: Any = WORDS) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("translate-aa_bb/model/model.bin", model_bin)
        archive.writestr("translate-aa_bb/model/shared_vocabulary.json", json.dumps(words))
        archive.writestr("translate-aa_bb/sentencepiece.model", b"pieces")
        archive.writestr("../outside", b"never unpacked")
    return out.getvalue()


def convert(tmp_path: Path, data: bytes) -> Path:
    source, target = tmp_path / "from", tmp_path / "to"
    source.mkdir()
    target.mkdir()
    (source / "m.argosmodel").write_bytes(data)
    convert_marian(source, target)
    return target


def test_a_marian_comes_out_as_it_went_in(tmp_path: Path) -> None:
    theirs = make_marian()
    folder = convert(tmp_path, pack_argos(pack_marian(theirs)))
    assert (folder / "source.spm").read_bytes() == b"pieces"
    assert json.loads((folder / "vocab.json").read_text()) == {word: i for i, word in enumerate([*WORDS, "<pad>"])}
    assert not (tmp_path / "outside").exists()
    for name in ("source.spm", "vocab.json"):
        (folder / name).unlink()
    model = unspool.load(str(folder)).model
    ids = torch.tensor([[5, 9, 12, 0]])
    begun = torch.tensor([[len(WORDS), 4, 7]])
    expected = theirs(input_ids=ids, decoder_input_ids=begun).logits
    torch.testing.assert_close(model(input_ids=ids, decoder_input_ids=begun).logits, expected, atol=2e-2, rtol=2e-2)


BAD_MODELS: dict[str, tuple[dict[str, np.ndarray], Any, str]] = {
    "norms before": ({"encoder/pre_norm": np.array(1, np.int8)}, WORDS, "norms follow"),
    "a token that begins": ({"decoder/start_from_zero_embedding": np.array(0, np.int8)}, WORDS, "begin with none"),
    "two vocabularies": ({"encoder/embeddings_0/weight": np.ones((22, 16), np.float32)}, WORDS, "of their own"),
    "an activation": ({"decoder/activation": np.array(9, np.int8)}, WORDS, "activation"),
    "other tokens": ({}, ["<s>", *WORDS[1:]], "does not begin"),
    "fewer tokens": ({}, WORDS[:-1], "for 21 tokens"),
    "no list": ({}, {"a": 1}, "no list"),
}


@pytest.mark.parametrize("case", BAD_MODELS)
def test_other_models_are_refused(tmp_path: Path, case: str) -> None:
    changed, words, message = BAD_MODELS[case]
    with pytest.raises(UnspoolError, match=message):
        convert(tmp_path, pack_argos(pack_marian(make_marian(), changed), words))


@pytest.mark.parametrize("data", [b"no zip", b"PK\x05\x06" + bytes(18)], ids=["no zip", "an empty zip"])
def test_other_files_are_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(LoadError, match=r"not a sound zip|has no model/model\.bin"):
        convert(tmp_path, data)
