"""The reader of ONNX files, and a T5 made of two of them."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tests.loading.conversion.files import pack_field, pack_onnx, pack_tensor

import unspool
from unspool.errors import LoadError, UnspoolError, UnsupportedError
from unspool.loading.conversion.onnx import read_onnx
from unspool.loading.conversion.t5 import convert_t5

FLOATS = np.arange(6, dtype=np.float32).reshape(2, 3)
SOUND = pack_onnx(
    [
        pack_tensor("raw", FLOATS),
        pack_tensor("listed", FLOATS, is_listed=True),
        pack_tensor("bytes", np.array([-3, 4], np.int8), is_listed=True),
        pack_tensor("long", np.array([-1, 1 << 40], np.int64), is_listed=True),
        pack_tensor("scalar", np.array(2.5, np.float32)),
    ],
    [("/m/q/MatMul", "MatMul", ("x", "raw"))],
)


def test_tensors_and_nodes_are_read(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(SOUND)
    graph = read_onnx(tmp_path / "m.onnx")
    assert np.array_equal(graph.tensors["raw"], FLOATS) and np.array_equal(graph.tensors["listed"], FLOATS)
    assert graph.tensors["bytes"].tolist() == [-3, 4] and graph.tensors["long"].tolist() == [-1, 1 << 40]
    assert graph.tensors["scalar"].shape == () and graph.tensors["scalar"] == 2.5
    assert [(node.name, node.operator, node.inputs) for node in graph.nodes] == [
        ("/m/q/MatMul", "MatMul", ("x", "raw"))
    ]


@pytest.fixture
def tiny_t5() -> Any:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=40,
        d_model=16,
        d_kv=4,
        d_ff=24,
        num_layers=2,
        num_heads=3,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
    )
    config.tie_word_embeddings = False  # its constructor ties them all the same
    return transformers.T5ForConditionalGeneration(config).eval()


BAD: dict[str, tuple[bytes, type[UnspoolError], str]] = {
    "empty": (b"", LoadError, "no graph"),
    "not protobuf": (b"\xff" * 40, LoadError, "not a sound ONNX"),
    "cut off": (SOUND[:-5], LoadError, "past the end"),
    "a shape that does not fit": (pack_onnx([pack_tensor("a", FLOATS, shape=(2, 4))]), LoadError, "6 elements"),
    "a huge shape": (pack_onnx([pack_tensor("a", FLOATS, shape=(1 << 40, 1 << 40))]), LoadError, "6 elements"),
    "a negative shape": (
        pack_onnx([pack_tensor("a", FLOATS, shape=((1 << 64) - 1, (1 << 64) - 6))]),
        LoadError,
        "not a sound",
    ),
    "many axes": (pack_onnx([pack_tensor("a", FLOATS[:1, :1], shape=(1,) * 9)]), LoadError, "9 axes"),
    "a tensor twice": (pack_onnx([pack_tensor("a", FLOATS)] * 2), LoadError, "two tensors"),
    "half a number": (pack_onnx([pack_field(2, 1) + pack_field(9, b"abc")]), LoadError, "middle of a number"),
    "an unknown type": (pack_onnx([pack_field(2, 8) + pack_field(8, "a")]), UnsupportedError, "not read"),
    "another file": (pack_onnx([pack_tensor("a", FLOATS) + pack_field(14, 1)]), UnsupportedError, "another file"),
    "a name that is a number": (pack_onnx([pack_field(8, 3)]), LoadError, "number stands"),
    "a name that is not UTF-8": (pack_onnx([pack_field(8, b"\xff")]), LoadError, "not a sound"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_refused(tmp_path: Path, case: str) -> None:
    data, kind, message = BAD[case]
    (tmp_path / "m.onnx").write_bytes(data)
    with pytest.raises(kind, match=message):
        read_onnx(tmp_path / "m.onnx")


@given(place=st.integers(0, len(SOUND) - 1), byte=st.integers(0, 255))
def test_a_changed_byte_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, place: int, byte: int) -> None:
    path = tmp_path_factory.getbasetemp() / "changed.onnx"
    path.write_bytes(SOUND[:place] + bytes([byte]) + SOUND[place + 1 :])
    with suppress(UnspoolError):
        read_onnx(path)


def export(weights: dict[str, torch.Tensor], start: str) -> bytes:
    """What torch's exporter and onnxruntime's quantiser make of one side: names of products in nodes, 8-bit weights."""
    tensors, nodes = [], []
    for name, values in weights.items():
        bare = name.removesuffix(".weight")
        numbers = values.numpy()
        if numbers.ndim == 1:
            tensors.append(pack_tensor(f"{start}.{name}", numbers))
            continue
        is_product = "embed" not in bare and "shared" not in bare and "bias" not in bare
        stored = f"onnx::MatMul_{len(nodes)}" if is_product else f"{start}.{name}"
        if is_product:
            nodes.append(
                (f"/{start}/{bare.replace('.', '/')}/MatMul_quant", "MatMulInteger", ("x", f"{stored}_quantized"))
            )
            numbers = numbers.T
        tensors.append(
            pack_tensor(f"{stored}_quantized", np.ascontiguousarray(np.rint(numbers * 100) + 3).astype(np.int8))
        )
        tensors.append(pack_tensor(f"{stored}_scale", np.array(0.01, np.float32), is_listed=True))
        tensors.append(pack_tensor(f"{stored}_zero_point", np.array(3, np.int8)))
    return pack_onnx(tensors, nodes)


def test_a_t5_comes_out_as_it_went_in(tmp_path: Path, tiny_t5: Any) -> None:
    # Matrices hold hundredths, which 8 bits with a scale of 0.01 hold exactly.
    weights = {
        name: values if values.dim() == 1 else (values * 100).round().clamp(-100, 100) / 100
        for name, values in tiny_t5.state_dict().items()
    }
    weights |= {f"{side}.embed_tokens.weight": weights["shared.weight"] for side in ("encoder", "decoder")}
    tiny_t5.load_state_dict(weights)
    encoder = {name.removeprefix("encoder."): v for name, v in weights.items() if name.startswith("encoder.")}
    decoder = {n: v for n, v in weights.items() if not n.startswith("encoder.") and n != "decoder.embed_tokens.weight"}
    source, target = tmp_path / "from", tmp_path / "to"
    source.mkdir()
    target.mkdir()
    (source / "encoder.onnx").write_bytes(export(encoder, "enc"))
    (source / "decoder.onnx").write_bytes(export(decoder, "m"))
    (source / "tokenizer.json").write_text("{}")
    convert_t5(source, target)
    (target / "tokenizer.json").unlink()
    assert json.loads((target / "config.json").read_text())["feed_forward_proj"] == "gated-gelu"
    lm = unspool.load(str(target))
    ids = torch.tensor([[5, 9, 12, 1]])
    expected = tiny_t5(input_ids=ids, decoder_input_ids=ids).logits
    torch.testing.assert_close(lm.model(input_ids=ids, decoder_input_ids=ids).logits, expected, atol=2e-2, rtol=2e-2)
