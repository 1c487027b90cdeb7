"""A decoder assembled of tensors without memory has the shapes of the real one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from unspool.models.decoder.layers import assemble_decoder
from unspool.models.families.base import DecoderFamily
from unspool.models.registry import find_family
from unspool.models.settings import Settings
from unspool.models.sharing import SharedSource, without_numbers
from unspool.models.weights import MemorySource, iterate_tensors

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Gemma2", "Phi3", "GPT2", "GPTNeoX", "Bloom"])
@pytest.mark.parametrize("is_shared", [False, True])
def test_shapes_are_those_of_the_real_one(kind: str, is_shared: bool) -> None:
    told = {name: value for name, value in SIZES.items() if "key" not in name or kind in ("Llama", "Qwen3", "Phi3")}
    config = getattr(transformers, f"{kind}Config")(**told)
    model = transformers.AutoModelForCausalLM.from_config(config)
    source: MemorySource = SharedSource(dict(model.named_parameters()))
    if not is_shared:
        source = MemorySource({name: one.detach() for name, one in model.named_parameters()})
    settings = Settings(model.config.to_dict() | {"architectures": [type(model).__name__]})
    family = find_family({"architectures": [type(model).__name__]})
    assert isinstance(family, DecoderFamily)
    spec, names = family.read_config(settings), family.find_names(settings, source)
    before = {name: one.data_ptr() for name, one in model.named_parameters()}
    made = []
    for given, device in ((without_numbers(source, torch.float32), "meta"), (source, "cpu")):
        weights = assemble_decoder(spec, names, given, torch.device(device), torch.float32)
        if device == "meta":
            assert {name: one.data_ptr() for name, one in model.named_parameters()} == before
            assert all(isinstance(one, nn.Parameter) for one in model.parameters())
        tensors = list(iterate_tensors(weights))
        assert {one.device.type for one in tensors} == {device}
        made.append([(one.shape, one.stride(), one.dtype) for one in tensors])
        made.append([(layer.is_halved, None, None) for layer in weights.layers])
    assert made[0] == made[2] and made[1] == made[3]
