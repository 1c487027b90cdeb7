"""A T5 exported to ONNX as an encoder and a decoder, rewritten as a folder in the hub's layout.

Names of weights that were multiplied are lost in such files, but those of the modules that multiply are kept:
`/enc/block.0/layer.0/SelfAttention/q/MatMul_quant` reads the transposed weight of `block.0.layer.0.SelfAttention.q`.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any, Final

import numpy as np

from unspool.errors import LoadError, UnsupportedError
from unspool.loading.conversion.folder import halve, write_model
from unspool.loading.conversion.onnx import OnnxGraph, read_onnx

_PRODUCT: Final = re.compile(r"\A/[^/]+/(.+)/MatMul(_quant)?")
_QUANTISED = "_quantized"
_EMBEDDING = "encoder.embed_tokens.weight"


def convert_t5(source: Path, target: Path) -> None:
    """Write the model of `source` (encoder.onnx, decoder.onnx, tokenizer.json) to `target` in the hub's layout."""
    tensors = _name_weights(read_onnx(source / "encoder.onnx"), "encoder.")
    tensors |= _name_weights(read_onnx(source / "decoder.onnx"), "")
    config = _describe(tensors)
    own = tensors.pop(_EMBEDDING, None)
    if own is not None and not np.array_equal(own, tensors["shared.weight"]):
        raise UnsupportedError("the encoder has embeddings of its own")
    write_model(target, {name: halve(values) for name, values in tensors.items()}, config, {})
    shutil.copyfile(source / "tokenizer.json", target / "tokenizer.json")


def _name_weights(graph: OnnxGraph, prefix: str) -> dict[str, np.ndarray]:
    """The floating-point weights of a graph, by the names that they have in a checkpoint."""
    found: dict[str, np.ndarray] = {}
    for name in graph.tensors:
        bare = name.removesuffix(_QUANTISED)
        if bare.endswith(".weight") and "." in bare:
            found[prefix + bare.split(".", 1)[1]] = _take(graph, bare)
    for node in graph.nodes:
        match = _PRODUCT.fullmatch(node.name)
        if match is None or len(node.inputs) < 2 or node.inputs[1] not in graph.tensors:
            continue
        weight = _take(graph, node.inputs[1].removesuffix(_QUANTISED))
        if weight.ndim != 2:
            raise LoadError(f"the weight of {match[1][:80]!r} has {weight.ndim} axes")
        found[f"{prefix}{match[1].replace('/', '.')}.weight"] = weight.T
    return found


def _take(graph: OnnxGraph, name: str) -> np.ndarray:
    """A tensor of the graph as floats: as it is, or its 8-bit numbers less their zero point, times their scale."""
    if name in graph.tensors:
        values = graph.tensors[name]
        if values.dtype.kind != "f":
            raise UnsupportedError(f"the weight {name[:80]!r} is {values.dtype}, without a scale")
        return values
    try:
        scale, zero = graph.tensors[f"{name}_scale"], graph.tensors[f"{name}_zero_point"]
        values = graph.tensors[name + _QUANTISED].astype(np.float32)
    except KeyError as error:
        raise LoadError(f"the file has no {error}") from error
    if any(part.size not in (1, values.shape[-1]) for part in (scale, zero)):
        raise UnsupportedError(
            f"the weight {name[:80]!r} has {scale.size} scales; one, or one for each output, is read"
        )
    return ((values - zero.astype(np.float32)) * scale.astype(np.float32)).astype(np.float32)


def _describe(tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    def count_layers(side: str) -> int:
        found = {name.split(".")[2] for name in tensors if name.startswith(f"{side}.block.")}
        return len(found)

    first = "encoder.block.0.layer.0.SelfAttention"
    try:
        vocab_size, width = tensors["shared.weight"].shape
        buckets, heads = tensors[f"{first}.relative_attention_bias.weight"].shape
        inner = tensors[f"{first}.q.weight"].shape[0]
        ffn_size = tensors["encoder.block.0.layer.1.DenseReluDense.wo.weight"].shape[1]
    except (KeyError, ValueError, IndexError) as error:
        raise LoadError(f"the files are not those of a T5: {error}") from error
    if not heads or inner % heads:
        raise LoadError(f"the files are not those of a T5: {inner} sizes of {heads} heads")
    is_gated = "encoder.block.0.layer.1.DenseReluDense.wi_0.weight" in tensors
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "is_encoder_decoder": True,
        "vocab_size": vocab_size,
        "d_model": width,
        "d_kv": inner // heads,
        "d_ff": ffn_size,
        "num_layers": count_layers("encoder"),
        "num_decoder_layers": count_layers("decoder"),
        "num_heads": heads,
        "relative_attention_num_buckets": buckets,
        "relative_attention_max_distance": 128,
        "layer_norm_epsilon": 1e-6,
        "feed_forward_proj": "gated-gelu" if is_gated else "relu",
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
    }
