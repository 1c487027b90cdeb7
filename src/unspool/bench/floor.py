"""The memory floor: no step can be faster than reading its weights and keys once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from unspool.bench.scenarios import Scenario
from unspool.models.encoder_decoder.layers import EncoderDecoderWeights
from unspool.models.paths.library import LibraryPath
from unspool.models.paths.path import WithPaths
from unspool.models.weights import iterate_tensors

_MEGABYTES: Final = {"cpu": 256, "cuda": 2048}
_REPEATS: Final = 7


def measure_bandwidth(device: torch.device) -> float:
    """This device's memory bandwidth in bytes per second: the best of several sums and copies of a large tensor."""
    numbers = torch.ones(_MEGABYTES["cuda" if device.type == "cuda" else "cpu"] * 2**18, device=device)
    other = torch.empty_like(numbers)

    best = 0.0
    works: tuple[tuple[Callable[[], object], int], ...] = (
        (numbers.sum, numbers.nbytes),
        (lambda: other.copy_(numbers), 2 * numbers.nbytes),
    )
    for work, num_bytes in works:
        for _ in range(_REPEATS):
            _wait(device)
            started = time.perf_counter()
            work()
            _wait(device)
            best = max(best, num_bytes / (time.perf_counter() - started))
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def count_step_bytes(model: Any, num_rows: int, context: int) -> int:
    """Bytes that a step of a native model must read: every matrix once, and the keys of every row.

    Of an encoder-decoder those of the decoder, without what made the source's keys, which are part of the context. Of
    experts those that rows choose, as many as they would choose at random; of a matrix that has a copy in fewer
    bytes, the copy.
    """
    tensors = list(iterate_tensors(_find_read(model.weights)))
    library = model.find_path("library") if isinstance(model, WithPaths) else None
    copies: dict[int, torch.Tensor | None] = {}
    if isinstance(library, LibraryPath):
        copies = {tensor.data_ptr(): library.find_copy(tensor) for tensor in tensors}

    def count(tensor: torch.Tensor) -> int:
        copy = copies.get(tensor.data_ptr())
        return int(tensor.nbytes if copy is None else copy.nbytes)

    read = {tensor.data_ptr(): count(tensor) for tensor in tensors}
    mixture = getattr(getattr(model, "spec", None), "mixture", None)
    if mixture is not None:
        share = 1.0 - (1.0 - mixture.num_chosen / mixture.num_experts) ** num_rows
        for layer in model.weights.layers:
            if layer.mixture is not None:
                experts = [*iterate_tensors(layer.up), *iterate_tensors(layer.down)]
                read |= {tensor.data_ptr(): int(share * count(tensor)) for tensor in experts}
    head = {tensor.data_ptr() for tensor in iterate_tensors(model.get_output_embeddings())}
    for tensor in iterate_tensors(model.get_input_embeddings()):
        if tensor.data_ptr() not in head:
            read.pop(tensor.data_ptr(), None)  # a row of it is read, not the table
    shape = model.key_shape
    per_key = 2 * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize
    seen = sum(
        min(context, shape.window) if kind == "sliding" and shape.window else context
        for kind in shape.layer_kinds or ("full",) * shape.num_layers
        if kind != "state"
    )
    return int(sum(read.values()) + num_rows * seen * per_key)


def _find_read(weights: Any) -> Any:
    """The weights that steps read."""
    if not isinstance(weights, EncoderDecoderWeights):
        return weights
    stack = weights.decoder
    crosses = [[cross.norm, cross.q, cross.out] for cross in stack.crosses]
    return [stack.layers, crosses, stack.final_norm, weights.head]


def find_floors(model: Any, scenarios: Sequence[Scenario], bandwidth: float) -> dict[str, float]:
    """The minimum milliseconds per step of each scenario that has steps, by its label."""
    return {
        scenario.label: 1e3
        * count_step_bytes(model, scenario.num_rows, scenario.prompt + scenario.num_new // 2)
        / bandwidth
        for scenario in scenarios
        if scenario.is_step
    }
