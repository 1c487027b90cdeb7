"""Encoder-decoders on a GPU beside transformers and the memory floor, in one run.

    python benchmarks/gpu_pairs.py [--shapes bart-large whisper-large-v3 t5-large] [--rows 1 8] [--beams 1 4]
        [--ways greedy top-k top-p temperature suppressed] [--new 128] [--rounds 3] [--source 512] [--profile]
        [--no-reference] [--several-kernels]

Weights are random and the same for both, in bfloat16. Greedy decoding (or beams) without an end token. A step's time is
the difference between `--new` tokens and a quarter of them, over their number: the encoder and the first steps are left
out on both sides. The floor is what a step must read (the decoder's matrices but for the sources' keys and values, the
head, and the sources' keys) over the bandwidth of a large copy, measured first. With `--several-kernels` no step of one
row runs all blocks in one kernel.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from datetime import date
from typing import Any

import torch
from gpu_profile import profile_layers, profile_passes, profile_steps  # benchmarks/gpu_profile.py
from gpu_step import measure_bandwidth  # benchmarks/gpu_step.py

import unspool
from unspool.models.paths import captured_pair_choice
from unspool.models.registry import build_model
from unspool.models.weights import MemorySource, iterate_tensors

# name: the config's class, and its settings
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "bart-large": (
        "Bart",
        {
            "d_model": 1024,
            "encoder_layers": 12,
            "decoder_layers": 12,
            "encoder_attention_heads": 16,
            "decoder_attention_heads": 16,
            "encoder_ffn_dim": 4096,
            "decoder_ffn_dim": 4096,
            "max_position_embeddings": 1024,
            "vocab_size": 50265,
        },
    ),
    "whisper-large-v3": (
        "Whisper",
        {
            "d_model": 1280,
            "encoder_layers": 32,
            "decoder_layers": 32,
            "encoder_attention_heads": 20,
            "decoder_attention_heads": 20,
            "encoder_ffn_dim": 5120,
            "decoder_ffn_dim": 5120,
            "num_mel_bins": 128,
            "max_source_positions": 1500,
            "max_target_positions": 448,
            "vocab_size": 51866,
        },
    ),
    "t5-large": (
        "T5",
        {
            "d_model": 1024,
            "d_kv": 64,
            "d_ff": 2816,
            "num_layers": 24,
            "num_decoder_layers": 24,
            "num_heads": 16,
            "vocab_size": 32128,
            "feed_forward_proj": "gated-gelu",
            "decoder_start_token_id": 0,
        },
    ),
    "marian": (  # OPUS-MT
        "Marian",
        {
            "d_model": 512,
            "encoder_layers": 6,
            "decoder_layers": 6,
            "encoder_attention_heads": 8,
            "decoder_attention_heads": 8,
            "encoder_ffn_dim": 2048,
            "decoder_ffn_dim": 2048,
            "max_position_embeddings": 512,
            "vocab_size": 58101,
            "activation_function": "swish",
            "scale_embedding": True,
            "pad_token_id": 58100,
            "decoder_start_token_id": 58100,
        },
    ),
}
SHAPES["nllb-600m"] = ("M2M100", {**SHAPES["bart-large"][1], "vocab_size": 256206, "scale_embedding": True})
SHAPES["whisper-medium"] = (
    "Whisper",
    {
        **SHAPES["whisper-large-v3"][1],
        "d_model": 1024,
        "encoder_layers": 24,
        "decoder_layers": 24,
        "encoder_attention_heads": 16,
        "decoder_attention_heads": 16,
        "encoder_ffn_dim": 4096,
        "decoder_ffn_dim": 4096,
        "num_mel_bins": 80,
        "vocab_size": 51865,
    },
)
CLASSES = {"Marian": "MarianMTModel"}  # others are called …ForConditionalGeneration
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "top-k": {"do_sample": True, "top_k": 50, "top_p": 0.9},
    "top-p": {"do_sample": True, "top_k": 0, "top_p": 0.9},
    "temperature": {"do_sample": True, "top_k": 0, "temperature": 0.8},
    "suppressed": {"do_sample": False, "suppress_tokens": list(range(50, 120))},
}
Run = Callable[[int], Any]  # of so many new tokens


def make(name: str) -> tuple[Any, Any]:
    """Our model and transformers', of the same weights."""
    import transformers

    transformers.logging.set_verbosity_error()
    kind, sizes = SHAPES[name]
    config = getattr(transformers, f"{kind}Config")(**sizes)
    torch.manual_seed(0)
    with torch.device("cuda"):
        kind = CLASSES.get(kind, f"{kind}ForConditionalGeneration")
        reference = getattr(transformers, kind)(config).to(torch.bfloat16).eval()
    reference.generation_config.eos_token_id = reference.generation_config.forced_eos_token_id = None
    settings = {**config.to_dict(), "architectures": [type(reference).__name__]}
    source = MemorySource(reference.state_dict())
    return build_model(settings, source, device=torch.device("cuda"), dtype=torch.bfloat16), reference


def draw_source(model: Any, rows: int, length: int) -> dict[str, torch.Tensor]:
    """Random tokens or features."""
    shape = model.info.features
    first = {"decoder_input_ids": torch.full((rows, 1), 7, device="cuda")}
    if shape is not None:
        return first | {"input_features": torch.randn(rows, shape.channels, shape.frames, device="cuda").bfloat16()}
    return first | {"input_ids": torch.randint(5, 30_000, (rows, length), device="cuda")}


def measure(run: Run, new: int, rounds: int) -> float:
    """Milliseconds per token after the first quarter: the median of the rounds."""
    times: dict[int, list[float]] = {new: [], new // 4: []}
    for _ in range(rounds):
        for count, spent in times.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            run(count)
            torch.cuda.synchronize()
            spent.append(time.perf_counter() - begin)
    whole, part = (statistics.median(times[count]) for count in (new, new // 4))
    return 1e3 * (whole - part) / (new - new // 4)


def count_bytes(model: Any, rows: int, source: int) -> int:
    """What a step must read."""
    stack, spec = model.weights.decoder, model.spec
    crosses = [part for cross in stack.crosses for part in (cross.q, cross.out)]
    read = [*stack.layers, *crosses, model.weights.head]
    weights = sum(tensor.nbytes for tensor in iterate_tensors(read))
    decoder = spec.decoder
    return weights + rows * source * decoder.num_layers * 2 * decoder.num_heads * decoder.head_dim * 2


def profile_step(model: Any, source: dict[str, torch.Tensor], rows: int) -> None:
    """Print a captured step's time, and its kernels."""
    encoded = model.encode(source.get("input_ids"), embeds=source.get("input_features"))
    cache = model.new_cache("static", rows, 400, encoded)
    tokens = torch.randint(5, 30_000, (rows, 1), device="cuda")
    model.forward(tokens.expand(rows, 32), cache)
    profile_passes(lambda: model.forward(tokens, cache), f"  {rows} rows", 16)
    profile_layers(lambda: model.forward(tokens, cache), f"  {rows} rows", model.spec.decoder.num_layers)


@torch.no_grad()
def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--beams", type=int, nargs="+", default=[1])
    parser.add_argument("--ways", nargs="+", default=["greedy"], choices=list(WAYS))
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--source", type=int, default=512)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--no-reference", action="store_true")
    parser.add_argument("--several-kernels", action="store_true")
    options = parser.parse_args()
    if options.several_kernels:
        captured_pair_choice.can_reside = lambda *_: False
    bandwidth = measure_bandwidth()
    name = torch.cuda.get_device_name()
    print(f"{date.today()} · {name} · torch {torch.__version__} · a copy moves {bandwidth / 1e12:.2f} TB/s")
    for shape in options.shapes:
        model, reference = make(shape)
        if options.profile:
            for rows in options.rows:
                profile_step(model, draw_source(model, rows, options.source), rows)
        for rows in options.rows:
            for beams in options.beams:
                source = draw_source(model, rows, options.source)
                peer = None if options.no_reference else reference
                for way in options.ways:
                    measure_one(shape, model, peer, source, rows, beams, way, options, bandwidth)
        del model, reference
        gc.collect()
        torch.cuda.empty_cache()


def measure_one(
    shape: str,
    model: Any,
    reference: Any,
    source: dict[str, torch.Tensor],
    rows: int,
    beams: int,
    way: str,
    options: argparse.Namespace,
    bandwidth: float,
) -> None:
    """One line of the table."""
    asked = {"num_beams": beams, "eos_token_id": None, **WAYS[way]}

    def ours(count: int) -> None:
        unspool.generate(model, **source, **asked, max_new_tokens=count)

    def theirs(count: int) -> None:
        told = {"max_new_tokens": count, "num_beams": beams, **WAYS[way]}
        from transformers.generation import GenerationMixin

        GenerationMixin.generate(reference, **source, **told)  # Whisper's own would divide sounds into windows first

    path = unspool.generate(model, **source, **asked, max_new_tokens=8, return_dict_in_generate=True).stats.path
    ours(options.new // 2)
    if options.profile:
        name, num_layers = f"  {rows} rows {beams} beams {way}", model.spec.decoder.num_layers
        profile_steps(lambda: ours(options.new), name, "_take_verified", num_layers)
    here = measure(ours, options.new, options.rounds)
    length = model.info.features.positions if model.info.features is not None else options.source
    floor = 1e3 * count_bytes(model, rows, length) / bandwidth
    told = f"{shape:18} rows {rows:3} beams {beams} {way}: {here:.4f} ms a step ({path}), "
    told += f"{floor / here:.2f} of the floor {floor:.4f}"
    if reference is not None:
        theirs(8)
        there = measure(theirs, min(options.new, 64), 1)
        told += f"; transformers {there:.3f} ms, {there / here:.1f}x"
    print(told, flush=True)


if __name__ == "__main__":
    main()
