"""Checkpoints that other tools quantised: GPTQ, AWQ, compressed-tensors, FP8 and bitsandbytes, under plain names."""

from unspool.loading.quantised.tensors import QuantisedTensors, open_quantised

__all__ = ["QuantisedTensors", "open_quantised"]
