"""`BitsAndBytesConfig` and what it means here: codes of nf4 or fp4 as bitsandbytes makes them, or 8-bit blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

import torch

from unspool.errors import SettingError, UnsupportedError, excerpt
from unspool.kernels.cpu import TABLE_KINDS

_THRESHOLD: Final = 6.0


@dataclass
class BitsAndBytesConfig:
    """How many bits matrices are quantised to.

    With `load_in_4bit` they become bitsandbytes' own codes, of `bnb_4bit_quant_type` "nf4" or "fp4", and with
    `bnb_4bit_use_double_quant` the sizes of blocks become numbers of 8 bits; with `load_in_8bit` they become blocks of
    unspool's own. The compute dtype is the weights' on a GPU; a CPU always sums in float32.
    """

    load_in_8bit: bool = False
    load_in_4bit: bool = False
    bnb_4bit_compute_dtype: Any = None
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_quant_storage: Any = None
    llm_int8_threshold: float = _THRESHOLD

    def __post_init__(self) -> None:
        if self.load_in_8bit and self.load_in_4bit:
            raise SettingError("load_in_8bit and load_in_4bit are both set; give one of them")
        if self.bnb_4bit_quant_type not in TABLE_KINDS:
            raise SettingError(
                f"bnb_4bit_quant_type={excerpt(self.bnb_4bit_quant_type)} is not known; use {' or '.join(TABLE_KINDS)}"
            )
        if self.bnb_4bit_quant_storage not in (None, "uint8", torch.uint8):
            raise UnsupportedError(
                f"bnb_4bit_quant_storage={excerpt(self.bnb_4bit_quant_storage)} is for training on several GPUs; codes "
                "are kept two to a byte, leave it out"
            )
        if self.llm_int8_threshold != _THRESHOLD:
            raise UnsupportedError(
                f"llm_int8_threshold={excerpt(self.llm_int8_threshold)}: no columns are multiplied apart, because "
                "every 32 numbers have a scale of their own; leave it out"
            )

    @property
    def quantize(self) -> str:
        """The same as `unspool.load` takes it."""
        if self.load_in_4bit:
            return self.bnb_4bit_quant_type + ("-double" if self.bnb_4bit_use_double_quant else "")
        return "int8" if self.load_in_8bit else "auto"


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
