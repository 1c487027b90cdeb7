"""`unspool bench`: this machine's speed, ours and that of other engines."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unspool._version import __version__
from unspool.cli.console import DIM, ProgressLine, can_colour, say, write
from unspool.cli.parser import Parser
from unspool.cli.targets import find_targets, write_target
from unspool.errors import SettingError
from unspool.loading.catalogue import DEFAULT_MODEL

if TYPE_CHECKING:
    from unspool.api import LanguageModel
    from unspool.bench import Benchmark, Report, TimedEngine, TraceReport
    from unspool.bench.native import NativeEngine

FILES = ("json", "plot")
_STORY = 512  # tokens, from which the prompts of requests are taken
_TEXT = (
    "The following is a short story about a lighthouse keeper who lived alone on a rocky island far from land. "
    "Every evening he climbed the spiral stairs to light the great lamp, and every morning he wrote down in his "
    "log the ships that had passed during the night. One winter evening, however, something unusual happened that "
    "he could not explain to anyone. "
)


def build_parser() -> Parser:
    """The options of `unspool bench`."""
    parser = Parser(
        "bench",
        "[MODEL] [options]",
        "Measure decoding, reading prompts, beams and batches on this machine, and what its memory allows.\n"
        "Every engine runs once per round, with the same prompt and the same number of new tokens; medians are shown.",
        (
            "unspool bench",
            "unspool bench --peer transformers --peer llama-cpp --plot bench.svg",
            "unspool bench --quantize auto int8 none --only decode prefill --rounds 5",
            "unspool bench --peer llama-cpp --peer llama-cpp=q4_0.gguf --peer ctranslate2=FOLDER",
            "unspool bench --engine --requests 32 --rate 4 --batch 8 --plot engine.svg",
        ),
    )
    group = parser.add_argument_group("model")
    group.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        default=DEFAULT_MODEL,
        help=f"A short name, a folder, a .gguf file or a hub id. [{DEFAULT_MODEL}]",
    )
    group.add_argument("--offline", action="store_true", help="Use what is on this disk, never the network.")
    group = parser.add_argument_group("engines")
    group.add_argument(
        "--peer",
        metavar="NAME[=PATH]",
        action="append",
        default=[],
        help="Measure beside it: transformers, llama-cpp, onnxruntime or ctranslate2; with a path, on the model in the "
        "peer's own form (a GGUF, an ONNX file, a converted folder). May be given several times.",
    )
    group.add_argument(
        "--quantize",
        metavar="KIND",
        nargs="+",
        help="Ours: auto, none, int8, int4, nf4, fp4 or fp8; several are several engines. [auto]",
    )
    group.add_argument("--device", metavar="DEVICE", help="cpu, cuda or cuda:N. [the GPU if there is one]")
    group.add_argument("--threads", metavar="N", type=int, help="CPU threads of every engine. [the physical cores]")
    group = parser.add_argument_group("scenarios")
    group.add_argument("--only", metavar="SCENARIO", nargs="+", help="decode, prefill, beam, batch. [all]")
    group.add_argument("--new", metavar="N", type=int, help="New tokens per row. [64]")
    group.add_argument("--prompt", metavar="N", type=int, help="Prompt tokens before them. [64]")
    group.add_argument("--prefill", metavar="N", type=int, help="Prompt tokens whose reading is measured. [512]")
    group.add_argument("--batch", metavar="N", type=int, help="Rows of the batch. [16]")
    group.add_argument("--rounds", metavar="N", type=int, help="Rounds; every engine runs once in each. [3]")
    group = parser.add_argument_group("requests")
    group.add_argument(
        "--engine",
        action="store_true",
        help="Measure requests that arrive over time instead: the batch engine with --batch rows, beside static "
        "batches. --prompt and --new are the most tokens of a request.",
    )
    group.add_argument("--requests", metavar="N", type=int, help="How many requests arrive. [32]")
    group.add_argument("--rate", metavar="N", type=float, help="How many of them per second, on average. [4]")
    group.add_argument(
        "--trace",
        metavar="FILE",
        help='Requests from a file, one JSON object per line: {"at": seconds, "prompt": tokens, "new": tokens}.',
    )
    group = parser.add_argument_group("files")
    group.add_argument("--json", metavar="FILE", help="Write the figures.")
    group.add_argument("--plot", metavar="FILE", help="Write a chart, as SVG.")
    group.add_argument("--force", action="store_true", help="Write over files that exist.")
    return parser


def execute(arguments: argparse.Namespace) -> int:
    """Check, load, measure, print, write."""
    targets = find_targets(arguments, FILES)
    if arguments.engine:
        return _execute_trace(arguments, targets)
    for name in ("requests", "rate", "trace"):
        if getattr(arguments, name) is not None:
            raise SettingError(f"--{name} describes requests that arrive over time; add --engine")
    with ProgressLine() as line:
        line.show("starting …")
        report = _measure(arguments, line)
    _print(report)
    from unspool.bench import draw_chart, to_json

    for kind, path in targets.items():
        write_target(path, (to_json if kind == "json" else draw_chart)(report), is_forced=arguments.force)
        say(f"wrote {path}", DIM)
    return 0


def _execute_trace(arguments: argparse.Namespace, targets: dict[str, Path]) -> int:
    """Check, load, serve a trace both ways, print, write."""
    for name in ("peer", "only", "prefill", "rounds"):
        if getattr(arguments, name):
            raise SettingError(f"--{name} does not go with --engine, which measures requests over time; leave it out")
    with ProgressLine() as line:
        line.show("starting …")
        report = _measure_trace(arguments, line)
    from unspool.bench import draw_trace, format_trace, trace_to_json

    write(format_trace(report))
    for kind, path in targets.items():
        write_target(path, (trace_to_json if kind == "json" else draw_trace)(report), is_forced=arguments.force)
        say(f"wrote {path}", DIM)
    return 0


def _measure_trace(arguments: argparse.Namespace, line: ProgressLine) -> TraceReport:
    from unspool.bench import (
        TraceReport,
        check_sizes,
        find_prompts,
        make_benchmark,
        make_native_engines,
        make_trace,
        read_trace,
        serve,
        serve_statically,
    )

    names = ("device", "threads", "quantize", "new", "prompt", "batch")
    asked: dict[str, Any] = {name: getattr(arguments, name) for name in names}
    benchmark = make_benchmark(arguments.model, offline=True if arguments.offline else None, **asked)
    if len(benchmark.quantize) > 1:
        raise SettingError("--quantize has one value with --engine")
    if arguments.trace is not None:
        if arguments.requests is not None or arguments.rate is not None:
            raise SettingError("--trace has its own arrivals; leave --requests and --rate out")
        trace = read_trace(Path(arguments.trace).expanduser())
    else:
        count = 32 if arguments.requests is None else arguments.requests
        trace = make_trace(count, 4.0 if arguments.rate is None else arguments.rate, benchmark.prompt, benchmark.new)
    own = make_native_engines(benchmark)[0]
    line.show(f"loading {own.name} …")
    own.load()
    longest, most = max(one.prompt for one in trace), max(one.new for one in trace)
    text = max(one.prompt + one.new for one in trace)
    check_sizes(own.lm.model.info, longest, most, text, "--prompt or --new")
    prompts = find_prompts(trace, _write_story(own.lm, _STORY))
    served, stats = serve(own.lm, trace, prompts, benchmark.batch, line.show_bar)
    static = serve_statically(own.lm, trace, prompts, benchmark.batch, line.show_bar)
    about = _describe_run(benchmark, own).rsplit(" · ", 1)[0]
    about += f" · {len(trace)} requests over {trace[-1].at:.1f} s, {benchmark.batch} rows, greedy"
    return TraceReport(about, served, static, benchmark.batch, stats)


def _measure(arguments: argparse.Namespace, line: ProgressLine) -> Report:
    from unspool.bench import (
        Report,
        find_floors,
        list_scenarios,
        make_benchmark,
        make_native_engines,
        make_peers,
        measure_bandwidth,
        run_rounds,
    )

    names = ("device", "threads", "quantize", "only", "new", "prompt", "prefill", "batch", "rounds")
    asked: dict[str, Any] = {name: getattr(arguments, name) for name in names}
    benchmark = make_benchmark(arguments.model, offline=True if arguments.offline else None, **asked)
    own = make_native_engines(benchmark)
    engines: list[TimedEngine] = [*own, *make_peers(arguments.peer, benchmark)]  # raises before any model is loaded
    tokens: list[int] = []
    for engine in engines:
        line.show(f"loading {engine.name} …")
        engine.load()
        tokens = tokens or _make_prompt(benchmark, own[0], engines)  # of ours, which comes first
    scenarios = list_scenarios(benchmark)
    line.show("measuring the memory …")
    bandwidth = measure_bandwidth(own[0].lm.device)
    results = run_rounds(engines, scenarios, lambda length: tokens[:length], benchmark.rounds, line.show_bar)
    return Report(
        about=_describe_run(benchmark, own[0]),
        engines={engine.name: engine.describe() for engine in engines},
        scenarios=scenarios,
        results=results,
        floors=find_floors(own[0].lm.model, scenarios, bandwidth),
        bandwidth=bandwidth,
    )


def _make_prompt(benchmark: Benchmark, own: NativeEngine, engines: Sequence[TimedEngine]) -> list[int]:
    """As many tokens as the longest prompt needs, of a model that all engines run."""
    from unspool.bench import check_sizes

    info, length = own.lm.model.info, benchmark.longest_prompt
    check_sizes(info, length, benchmark.new, benchmark.longest, "--prefill, --prompt or --new")
    for engine in engines:
        if info.is_encoder_decoder and not engine.reads_sources:
            raise SettingError(f"--peer {engine.name} runs decoders, and this model has an encoder; leave it out")
    return _write_story(own.lm, length)


def _write_story(lm: LanguageModel, length: int) -> list[int]:
    """So many tokens: a story repeated, or numbers if there is no tokenizer."""
    if lm.tokenizer is None:
        return [3 + number % (lm.model.info.vocab_size - 3) for number in range(length)]
    story = lm.tokenizer.encode(_TEXT)
    return (story * (length // len(story) + 1))[:length]


def _describe_run(benchmark: Benchmark, engine: NativeEngine) -> str:
    import torch

    device, library = engine.lm.device, f"torch {torch.__version__}"
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    threads = "" if device.type == "cuda" else f", {benchmark.threads or torch.get_num_threads()} threads"
    sizes = (
        f"prompt {benchmark.prompt}, {benchmark.new} new tokens, greedy, {benchmark.rounds} rounds in turns, medians"
    )
    return (
        f"{date.today()} · {machine}{threads} · {library} · unspool {__version__} · {benchmark.location.stem} · {sizes}"
    )


def _print(report: Report) -> None:
    """The table: by rich if it is installed and the terminal has colours, else as plain text."""
    from unspool.bench import format_table
    from unspool.bench.report import FLOOR, build_rows, list_notes

    try:
        if not can_colour(sys.stdout):
            raise ImportError
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        write(format_table(report))
        return
    heading, rows = build_rows(report)
    table = Table(header_style="bold")
    for place, name in enumerate(heading):
        table.add_column(Text(name), justify="right" if place else "left")
    first = next(iter(report.engines))
    for row in rows:
        style = "bold green" if row[0] == first else "dim" if row[0] == FLOOR else ""
        table.add_row(*map(Text, row), style=style)
    console = Console()
    console.print(Text(report.about, style="dim"))
    console.print(table)
    for note in list_notes(report):
        console.print(Text(note, style="dim"))
