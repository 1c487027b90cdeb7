"""`unspool batch`: a file of prompts in, a file of answers out."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unspool.cli.console import DIM, ProgressLine, say
from unspool.cli.interrupt import Interrupt
from unspool.cli.model import add_model_options, load_model
from unspool.cli.parser import Parser, UsageError
from unspool.cli.serve import read_size
from unspool.cli.settings import add_settings, collect_settings, refuse_tensors
from unspool.errors import MissingExtraError

if TYPE_CHECKING:
    from unspool.batch.ledger import Progress

_UNFINISHED = 3  # the exit code of a job that was interrupted, or has rows that failed


def build_parser() -> Parser:
    """The options of `unspool batch`."""
    parser = Parser(
        "batch",
        "IN -o OUT [options]",
        "Answer every line of a file: OpenAI's batch form, or objects with a prompt or messages and settings of their\n"
        "own; also .parquet and .arrow files. Answers are appended as they finish. Started again, it goes on where it\n"
        "ended, and lines that fail are in OUT.errors. Options of generation hold for lines that don't say otherwise.",
        (
            "unspool batch prompts.jsonl -o answers.jsonl --max-new-tokens 64",
            "unspool batch requests.jsonl -o answers.jsonl -m qwen3-0.6b --any-model --max-errors 100",
            "unspool batch part.parquet -o answers.jsonl --prompt-column question --shard 2/8",
        ),
    )
    parser.general.add_argument("input", metavar="IN", help=argparse.SUPPRESS)
    files = parser.add_argument_group("files")
    files.add_argument("-o", "--output", metavar="OUT", required=True, help="The file of answers, one on each line.")
    files.add_argument("--restart", action="store_true", help="Begin again, and delete what was written before.")
    files.add_argument("--shard", metavar="I/N", default="1/1", help="Every N-th line, from the I-th on. [1/1]")
    files.add_argument("--limit", metavar="N", type=int, help="The first N lines alone.")
    files.add_argument("--max-errors", metavar="N", type=int, help="End if more lines fail. [never]")
    files.add_argument("--any-model", action="store_true", help="Answer lines that ask for another model, too.")
    for name in ("prompt", "messages", "id"):
        files.add_argument(f"--{name}-column", metavar="NAME", help=f"The column with {name}, of a .parquet file.")
    add_model_options(parser)
    engine = parser.add_argument_group("engine")
    engine.add_argument("--max-rows", metavar="N", type=int, help="Rows that decode at once. [32, on a GPU 256]")
    engine.add_argument("--memory", metavar="SIZE", help="For keys and values, such as 2G.")
    add_settings(parser)
    return parser


def execute(arguments: argparse.Namespace) -> int:
    """Answer the file; 0 if every line was, 3 if some failed or are left."""
    settings = collect_settings(arguments)
    refuse_tensors(settings)
    seed = settings.pop("seed", 0)
    if not isinstance(seed, int):
        raise UsageError("--seed is one number here; the seed of each line follows from it and from its number")
    share = _read_share(arguments.shard)
    try:
        from unspool.batch.answers import find_name
        from unspool.batch.job import Job
        from unspool.batch.ledger import Share
        from unspool.batch.output import Output
        from unspool.batch.sources import open_source
        from unspool.engine import Engine
    except ImportError as error:
        raise MissingExtraError(error.name or "msgspec", "batch", "files of prompts") from error

    columns = {name: getattr(arguments, f"{name}_column") for name in ("prompt", "messages", "id")}
    source = open_source(arguments.input, {name: column for name, column in columns.items() if column is not None})
    output = Output(arguments.output)
    options: dict[str, Any] = {} if arguments.max_rows is None else {"max_rows": arguments.max_rows}
    if arguments.memory is not None:
        options["memory"] = read_size("--memory", arguments.memory)
    lm = load_model(arguments)
    with Engine(lm, **options) as engine, Interrupt() as interrupt, ProgressLine() as line:
        job = Job(
            lm,
            engine,
            source,
            output,
            name=find_name(arguments.model),
            settings=settings,
            seed=seed,
            share=Share(*share, arguments.limit),
            max_errors=arguments.max_errors,
            any_model=arguments.any_model,
            restarts=arguments.restart,
        )
        if job.is_resumed:
            say(f"{job.progress.done} of {job.progress.total} lines were done before", DIM)
        is_whole = job.run(
            lambda progress: line.show_bar(_describe(progress), progress.done, progress.total),
            lambda: interrupt.is_asked,
        )
    say(_sum_up(job.progress, Path(arguments.output), is_whole), DIM)
    return 0 if is_whole and not job.progress.failed else _UNFINISHED


def _read_share(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    if found is None:
        raise UsageError(f"--shard is I/N, such as 2/8, not {text[:40]!r}")
    return int(found[1]), int(found[2])


def _describe(progress: Progress) -> str:
    left = progress.seconds_left
    speed = progress.num_tokens / max(progress.seconds, 1e-9)
    told = f"{progress.done:,} of {progress.total:,} lines, {speed:,.0f} tokens/s"
    if progress.failed:
        told += f", {progress.failed:,} failed"
    return told if left is None else f"{told}, {_spell_time(left)} left"


def _spell_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _sum_up(progress: Progress, output: Path, is_whole: bool) -> str:
    new = progress.done - progress.num_before
    told = f"{new:,} lines in {_spell_time(progress.seconds)}, {progress.num_tokens:,} tokens"
    told += f" ({progress.num_tokens / max(progress.seconds, 1e-9):,.0f} a second), in {output}"
    if progress.failed:
        told += f"; {progress.failed:,} failed: {output}.errors"
    if not is_whole:
        told += f"; {progress.total - progress.done:,} are left: the same command goes on"
    return told
