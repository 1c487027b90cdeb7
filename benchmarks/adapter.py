"""What a token costs through the adapter, beside transformers' own generate and the native model, in turns.

    OMP_NUM_THREADS=2 python benchmarks/adapter.py                     # CPU: SmolLM2-135M's shape, and a quarter of it
    python benchmarks/adapter.py --device cuda --dtype bfloat16
    python benchmarks/adapter.py --tiny --rounds 1 --new 8             # a smoke run
    python benchmarks/adapter.py --attached                            # CPU: attach(model), SmolLM2-135M's shape
    python benchmarks/adapter.py --attached --device cuda --dtype bfloat16   # Llama 1B, 8B, Qwen3 0.6B, Gemma 3 1B
    python benchmarks/adapter.py --attached --device cuda --dtype bfloat16 --shapes gemma3-1b --own 0 --watch

Weights are random. Every engine writes `--new` tokens after a prompt of `--prompt` tokens, `--rounds` times in turns;
the figure is the median time per token after the first, from runs of one and of all tokens.

`--attached` compares an object after `unspool.attach(model)` with its own generate and with the same weights loaded
natively: tokens per second of one greedy row (engines in turns, each as often first; the medians, and the median and
the range of the rounds' ratios), the seconds from attach() to the end of the first call (8 tokens), and the memory that
the process (on a GPU: torch) holds after it beyond the object's weights. On a GPU every shape has a process of its own
with an empty cache of kernels, after one call of its own generate, which starts CUDA and its libraries. `--own` is the
number of tokens that its own generate is timed with, 0 for not at all. Weights are rounded to the dtype of the
checkpoint that an object would come from (`--stored`): bfloat16 for all of these models.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import resource
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # CUDA is started by forks, and not before

import torch
import transformers
from cold_start import watch_compilers  # benchmarks/cold_start.py

import unspool
from unspool.api.starting import start
from unspool.models.registry import build_model
from unspool.models.weights import MemorySource

SMOLLM = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "kv": 3}
SMALL = {"hidden_size": 288, "intermediate_size": 768, "num_hidden_layers": 8, "num_attention_heads": 9, "kv": 3}
TINY = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 3, "kv": 3}
WORKS: dict[str, tuple[int, dict[str, Any]]] = {
    "greedy, 1 row": (1, {}),
    "greedy, 8 rows": (8, {}),
    "greedy, 8 ragged rows": (-8, {}),
    "sampling, 1 row": (1, {"do_sample": True, "top_k": 50, "top_p": 0.9}),
    "4 beams": (1, {"num_beams": 4}),
}


def _sizes(hidden: int, ffn: int, layers: int, heads: int, kv: int, vocabulary: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocabulary,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        **more,
    }


SHAPES: dict[str, tuple[str, dict[str, Any]]] = {  # the class of the config, and its sizes
    "tiny": ("LlamaConfig", _sizes(48, 64, 2, 3, 3, 500)),
    "smollm2-135m": ("LlamaConfig", _sizes(576, 1536, 30, 9, 3, 49_152)),
    "llama-1b": ("LlamaConfig", _sizes(2048, 8192, 16, 32, 8, 128_256)),
    "llama-8b": ("LlamaConfig", _sizes(4096, 14_336, 32, 32, 8, 128_256, tie_word_embeddings=False)),
    "qwen3-0.6b": ("Qwen3Config", _sizes(1024, 3072, 28, 16, 8, 151_936, head_dim=128)),
    "gemma3-1b": (
        "Gemma3TextConfig",
        _sizes(1152, 6912, 26, 4, 1, 262_144, head_dim=256, sliding_window=512, query_pre_attn_scalar=256),
    ),
    "qwen2-0.5b": ("Qwen2Config", _sizes(896, 4864, 24, 14, 2, 151_936)),
    "mistral-7b": ("MistralConfig", _sizes(4096, 14_336, 32, 32, 8, 32_000, tie_word_embeddings=False)),
    "phi3-mini": ("Phi3Config", _sizes(3072, 8192, 32, 32, 32, 32_064, tie_word_embeddings=False)),
    "olmo2-1b": ("Olmo2Config", _sizes(2048, 8192, 16, 16, 16, 100_352, tie_word_embeddings=False)),
    "gpt2": ("GPT2Config", {}),
    "opt-1.3b": (
        "OPTConfig",
        {"hidden_size": 2048, "ffn_dim": 8192, "num_hidden_layers": 24, "num_attention_heads": 32},
    ),
    "mamba-790m": ("MambaConfig", {"hidden_size": 1536, "num_hidden_layers": 48, "vocab_size": 50_280}),
    "t5-large": (
        "T5Config",
        {"d_model": 1024, "d_kv": 64, "d_ff": 4096, "num_layers": 24, "num_heads": 16, "decoder_start_token_id": 0},
    ),
    "bart-large": ("BartConfig", {"forced_eos_token_id": None, "decoder_start_token_id": 2}),
    "whisper-tiny": ("WhisperConfig", {"suppress_tokens": None, "begin_suppress_tokens": None}),
}
ATTACHED = ["llama-1b", "qwen3-0.6b", "gemma3-1b", "llama-8b"]
FIRST = 8  # tokens of the first call


def main() -> None:
    """Print a table for every shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=None, help="tokens of a call: 32, attached on a GPU 128")
    parser.add_argument("--rounds", type=int, default=None, help="3, attached on a GPU 8")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--attached", action="store_true", help="attach(model) beside its own generate")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=None, help="with --attached")
    parser.add_argument("--own", type=int, default=24, help="with --attached: tokens of its own generate")
    parser.add_argument("--stored", default="bfloat16", help="with --attached: the dtype that weights were saved in")
    parser.add_argument("--watch", action="store_true", help="with --attached: list what is compiled")
    arguments = parser.parse_args()
    is_quick = arguments.attached and arguments.device.startswith("cuda")
    arguments.new = arguments.new or (128 if is_quick else 32)
    arguments.rounds = arguments.rounds or (8 if is_quick else 3)
    if arguments.attached:
        usual = ATTACHED if arguments.device.startswith("cuda") else ["smollm2-135m"]
        shapes = arguments.shapes or (["tiny"] if arguments.tiny else usual)
        for shape in shapes:  # what every fork would import
            find_class(make_config(shape))
        _ = unspool.attach
        for shape in shapes:
            with tempfile.TemporaryDirectory() as kernels:
                os.environ["TRITON_CACHE_DIR"] = kernels
                if arguments.device.startswith("cuda"):
                    run_apart(functools.partial(measure_attached, shape, arguments))
                else:
                    measure_attached(shape, arguments)
        return
    for sizes in (TINY,) if arguments.tiny else (SMALL, SMOLLM):
        measure(sizes, arguments)


def measure(sizes: dict[str, int], arguments: argparse.Namespace) -> None:
    """One shape's table."""
    settings = {name: value for name, value in sizes.items() if name != "kv"}
    config = transformers.LlamaConfig(**settings, num_key_value_heads=sizes["kv"], vocab_size=49152, eos_token_id=None)
    dtype = getattr(torch, arguments.dtype)
    model = transformers.LlamaForCausalLM(config).to(arguments.device, dtype).eval()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        native = unspool.load(folder, device=arguments.device, dtype=dtype, quantize=None).model
    engines: dict[str, Callable[..., Any]] = {
        "transformers": model.generate,
        "adapter": lambda **asked: unspool.generate(model, **asked),
        "native": lambda **asked: unspool.generate(native, **asked),
    }
    print(f"\n{settings}, {arguments.dtype}, {arguments.device}, transformers {transformers.__version__}: ms per token")
    print(f"{'':<24}" + "".join(f"{name:>14}" for name in engines) + f"{'adapter/theirs':>16}")
    for work, (rows, settings) in WORKS.items():
        inputs = draw_inputs(rows, arguments)
        times: dict[str, list[float]] = {name: [] for name in engines}
        for turn in range(arguments.rounds + 1):
            for name, generate in engines.items():
                took = [time_call(generate, inputs, num_new, settings) for num_new in (1, arguments.new)]
                if turn:  # the first is a warm-up
                    times[name].append((took[1] - took[0]) / (arguments.new - 1) * 1000)
        medians = {name: statistics.median(values) for name, values in times.items()}
        ratio = medians["adapter"] / medians["transformers"]
        print(f"{work:<24}" + "".join(f"{value:>14.2f}" for value in medians.values()) + f"{ratio:>16.2f}")


def make_config(shape: str) -> Any:
    """A shape as transformers' config."""
    kind, sizes = SHAPES[shape]
    return getattr(transformers, kind)(**sizes, eos_token_id=None, bos_token_id=1, pad_token_id=0)


def find_class(config: Any) -> Any:
    """The class of models that generate, for a config."""
    tables = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ")
    kinds = [getattr(transformers, f"MODEL_FOR_{name}_MAPPING") for name in tables]
    if config.is_encoder_decoder:  # whose decoder alone is in the first table
        kinds = kinds[1:]
    return next(found[type(config)] for found in kinds if type(config) in found)


def run_apart(work: Callable[[], None]) -> None:
    """Run something in a fork, in which nothing was compiled and CUDA has not started."""
    process = os.fork()
    if process:
        os.waitpid(process, 0)
        return
    try:
        work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def measure_attached(shape: str, arguments: argparse.Namespace) -> None:
    """One shape's lines."""
    dtype, device = getattr(torch, arguments.dtype), torch.device(arguments.device)
    config, began = make_config(shape), time.perf_counter()
    with torch.device(device):
        model = find_class(config)._from_config(config, dtype=dtype).eval()
    model.generation_config.eos_token_id = None
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, arguments.stored)).to(dtype)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    drawing = torch.Generator().manual_seed(1)
    if hasattr(config, "num_mel_bins"):
        sound = torch.randn(1, config.num_mel_bins, 2 * config.max_source_positions, generator=drawing)
        inputs = {"input_features": sound.to(device, dtype)}
    else:
        ids = torch.randint(3, config.vocab_size, (1, arguments.prompt), generator=drawing)
        inputs = {"input_ids": ids.to(device), "attention_mask": torch.ones_like(ids).to(device)}
    own = model.generate
    time_call(own, inputs, FIRST, {})  # what a process takes once, for torch and transformers
    before = count_bytes(device)
    compiled = watch_compilers() if arguments.watch and device.type == "cuda" else []
    started = time.perf_counter()
    unspool.attach(model)
    marks = [("attached", time.perf_counter())]
    call = {"max_new_tokens": FIRST, "do_sample": False, "pad_token_id": 0}
    run = start(model, **inputs, **call)
    for number, _ in enumerate(run, 1):
        if number in (1, 2, FIRST):
            marks.append((f"token {number}", time.perf_counter()))
    grown = count_bytes(device) - before
    stored = model.state_dict()
    held = {name: parameter.detach() for name, parameter in model.named_parameters()}
    held |= {name: buffer for name, buffer in model.named_buffers() if name in stored}
    told = config.to_dict() | {"architectures": [type(model).__name__]}
    begins: dict[str, Any] = {}
    if config.is_encoder_decoder:  # a model that was not loaded has no settings of its own
        given = model.generation_config.decoder_start_token_id
        begins["decoder_start_token_id"] = SHAPES[shape][1].get("decoder_start_token_id", given)
    native = build_model(told, MemorySource(held), device=device, dtype=dtype)
    engines: dict[str, Callable[..., Any]] = {
        "attached": model.generate,
        "native": functools.partial(unspool.generate, native, **begins),
    }
    rates: dict[str, list[float]] = {"attached": [], "native": []}
    if arguments.own > 1:
        took = [time_call(own, inputs, num_new, {}) for num_new in (1, arguments.own)]
        rates["its own"] = [(arguments.own - 1) / (took[1] - took[0])]
    for turn in range(arguments.rounds + 1):
        for name in sorted(engines, reverse=turn % 2 == 1):
            took = [time_call(engines[name], inputs, num_new, {}) for num_new in (1, arguments.new)]
            if turn:  # the first is a warm-up
                rates[name].append((arguments.new - 1) / (took[1] - took[0]))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    print(
        f"\n{shape}, {arguments.dtype}, {device}, transformers {transformers.__version__}: {weights / 1e6:.0f} MB, "
        f"made in {started - began:.1f} s, measured in {time.perf_counter() - started:.1f} s"
    )
    print("  tokens/s: " + ", ".join(f"{name} {value:.1f}" for name, value in medians.items()))
    for name in [name for name in rates if name != "attached"]:
        is_paired = len(rates[name]) == len(rates["attached"])
        pairs = (
            zip(rates["attached"], rates[name], strict=True) if is_paired else [(medians["attached"], medians[name])]
        )
        ratios = [mine / theirs for mine, theirs in pairs]
        print(f"  attached / {name} {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    print("  first call: " + ", ".join(f"{name} {at - started:.2f}" for name, at in marks) + " s")
    print(f"  memory {1 + grown / weights:.3f} of the object's ({grown / 1e6:.0f} MB more)")
    print(f"  path: {run.stats.path}, {run.stats.path_reason or 'no reason given'}")
    for at, line in sorted(compiled):
        print(f"    {at - started:6.2f} s: {line}")
    unspool.detach(model)


def count_bytes(device: torch.device) -> int:
    """The bytes that torch holds on a GPU, or the process in memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        return int(torch.cuda.memory_allocated())
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def draw_inputs(rows: int, arguments: argparse.Namespace) -> dict[str, torch.Tensor]:
    """Prompts; a negative number of rows means rows of different lengths."""
    ids = torch.randint(3, 49152, (abs(rows), arguments.prompt), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row in range(-rows):
        mask[row, : row * arguments.prompt // 10] = 0
    return {"input_ids": ids.to(arguments.device), "attention_mask": mask.to(arguments.device)}


def time_call(generate: Callable[..., Any], inputs: dict[str, torch.Tensor], num_new: int, settings: Any) -> float:
    """Seconds of one call."""
    defaults = {"do_sample": False, "max_new_tokens": num_new, "pad_token_id": 0}
    started = time.perf_counter()
    generate(**inputs, **{**defaults, **settings})
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
