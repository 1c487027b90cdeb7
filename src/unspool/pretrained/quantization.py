"""`BitsAndBytesConfig` and what it means here: matrices in 8-bit or 4-bit blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from unspool.errors import SettingError, UnsupportedError, excerpt


@dataclass
class BitsAndBytesConfig:
    """How many bits matrices are quantised to. The blocks are unspool's own, on CPUs and GPUs.

    The compute dtype is the weights' on a GPU; a CPU always sums in float32. The other values choose between
    bitsandbytes' own formats, of which there is one here.
    """

    load_in_8bit: bool = False
    load_in_4bit: bool = False
    bnb_4bit_compute_dtype: Any = None
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_quant_storage: Any = None
    llm_int8_threshold: float = 6.0

    def __post_init__(self) -> None:
        if self.load_in_8bit and self.load_in_4bit:
            raise SettingError("load_in_8bit and load_in_4bit are both set; give one of them")


_NAMES = frozenset(field.name for field in fields(BitsAndBytesConfig))
_OTHERS = ("quant_method", "_load_in_8bit", "_load_in_4bit")
_UNBUILT = {
    "llm_int8_skip_modules": "all matrices are quantised alike",
    "llm_int8_enable_fp32_cpu_offload": "a model is kept on one device",
    "llm_int8_has_fp16_weight": "weights are not trained",
}


def read_quantization(config: Any) -> BitsAndBytesConfig | None:
    """A quantization_config as ours: our class, transformers' (by its `to_dict`), or a dict."""
    if config is None or isinstance(config, BitsAndBytesConfig):
        return config
    given = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(given, Mapping):
        raise SettingError(f"quantization_config is a {type(config).__name__}; give a BitsAndBytesConfig or a dict")
    method = getattr(given.get("quant_method"), "value", given.get("quant_method"))
    if method not in (None, "bitsandbytes"):
        raise UnsupportedError(
            f"quantization_config asks for {excerpt(method)}; matrices are quantised to 8 or 4 bits: give "
            "BitsAndBytesConfig(load_in_4bit=True), or quantize='int4'"
        )
    for name, value in given.items():
        if name in _UNBUILT and value not in (None, False, []):
            raise UnsupportedError(f"quantization_config has {name}={excerpt(value)}: {_UNBUILT[name]}; leave it out")
        if name not in _NAMES and name not in _UNBUILT and name not in _OTHERS:
            raise SettingError(f"quantization_config has {name!r:.80}, which is not known")
    return BitsAndBytesConfig(**{name: given[name] for name in _NAMES if name in given})
