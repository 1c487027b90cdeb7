"""`unspool batch`: a file of prompts in, a file of answers out."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unspool.cli.console import DIM, ProgressLine, say
from unspool.cli.interrupt import Interrupt
from unspool.cli.model import add_model_options, list_options, load_text_model
from unspool.cli.parser import Parser, UsageError
from unspool.cli.ray import add_ray_options, read_ray_options
from unspool.cli.serve import read_size
from unspool.cli.settings import add_settings, collect_settings, imply_sampling, refuse_tensors
from unspool.errors import MissingExtraError

if TYPE_CHECKING:
    from unspool.batch.job import Job
    from unspool.batch.ledger import Progress
    from unspool.batch.output import JobOutput
    from unspool.batch.sources import Source
    from unspool.ray.batch import RayJob
    from unspool.ray.cluster import Actors

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
            "unspool batch prompts.jsonl -o answers/ --ray=ray://head:10001 --actors 1:64",
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
    add_ray_options(parser, "actors", "An actor")
    add_settings(parser)
    return parser


def execute(arguments: argparse.Namespace) -> int:
    """Answer the file; 0 if every line was, 3 if some failed or are left."""
    settings = imply_sampling(collect_settings(arguments))
    refuse_tensors(settings)
    seed = settings.pop("seed", 0)
    if not isinstance(seed, int):
        raise UsageError("--seed is one number here; the seed of each line follows from it and from its number")
    share = _read_share(arguments.shard)
    actors = read_ray_options(arguments, "actors")
    try:
        from unspool.batch.answers import find_name
        from unspool.batch.job import Job
        from unspool.batch.ledger import Share
        from unspool.batch.output import JobOutput
        from unspool.batch.sources import open_source
        from unspool.engine import Engine
    except ImportError as error:
        raise MissingExtraError(error.name or "msgspec", "batch", "files of prompts") from error

    columns = {name: getattr(arguments, f"{name}_column") for name in ("prompt", "messages", "id")}
    source = open_source(arguments.input, {name: column for name, column in columns.items() if column is not None})
    options: dict[str, Any] = {} if arguments.max_rows is None else {"max_rows": arguments.max_rows}
    if arguments.memory is not None:
        options["memory"] = read_size("--memory", arguments.memory)
    common: dict[str, Any] = {
        "name": find_name(arguments.model),
        "settings": settings,
        "seed": seed,
        "share": Share(*share, arguments.limit),
        "any_model": arguments.any_model,
    }
    if actors is not None:
        return _run_on_ray(arguments, source, actors, {**common, "engine": options, "load": list_options(arguments)})
    output = JobOutput(arguments.output)
    lm = load_text_model(arguments)
    with Engine(lm, **options) as engine, Interrupt() as interrupt:
        job = Job(lm, engine, source, output, max_errors=arguments.max_errors, restarts=arguments.restart, **common)
        _tell_unlocked(output)
        return _run(job, interrupt, arguments.output)


def _tell_unlocked(output: JobOutput) -> None:
    if not output.is_locked:
        say(f"the file system of {output.path} has no locks: see to it that no other run writes it", DIM)


def _run(job: Job | RayJob, interrupt: Interrupt, output: str) -> int:
    with ProgressLine() as line:
        if job.is_resumed:
            say(f"{job.progress.done} of {job.progress.total} lines were done before", DIM)
        is_whole = job.run(
            lambda progress: line.show_bar(_describe(progress), progress.done, progress.total),
            lambda: interrupt.is_asked,
        )
    return _end(job.progress, output, is_whole)


def _end(progress: Progress, output: str, is_whole: bool) -> int:
    say(_sum_up(progress, output, is_whole), DIM)
    return 0 if is_whole and not progress.failed else _UNFINISHED


def _run_on_ray(arguments: argparse.Namespace, source: Source, actors: Actors, options: dict[str, Any]) -> int:
    """Answer the file by actors of a cluster: into one file, or into a folder by whoever has an answer."""
    from unspool.ray.cluster import connect

    connect(arguments.ray)
    from unspool.batch.output import JobOutput
    from unspool.ray.batch import RayJob, RayPipeline
    from unspool.ray.folder import FolderJob

    pipeline = RayPipeline(arguments.model, source, actors, **options)
    if arguments.output.endswith("/") or Path(arguments.output).is_dir():
        if arguments.max_errors is not None:
            raise UsageError(
                "--max-errors is for an output that is one file; the actors that fill a folder count by themselves"
            )
        folder = FolderJob(pipeline, arguments.output, restarts=arguments.restart)
        if folder.is_resumed:
            say(f"{folder.progress.done} of {folder.progress.total} lines were done before", DIM)
        return _end(folder.progress, arguments.output, folder.run())
    with Interrupt() as interrupt:
        output = JobOutput(arguments.output)
        job = RayJob(pipeline, output, max_errors=arguments.max_errors, restarts=arguments.restart)
        _tell_unlocked(output)
        return _run(job, interrupt, arguments.output)


def _read_share(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    if found is None:
        raise UsageError(f"--shard is I/N, such as 2/8, not {text[:40]!r}")
    return int(found[1]), int(found[2])


def _describe(progress: Progress) -> str:
    left = progress.seconds_left
    speed = progress.num_tokens / max(progress.seconds, 1e-9)
    text = f"{progress.done:,} of {progress.total:,} lines, {speed:,.0f} tokens/s"
    if progress.failed:
        text += f", {progress.failed:,} failed"
    return text if left is None else f"{text}, {_spell_time(left)} left"


def _spell_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _sum_up(progress: Progress, output: str, is_whole: bool) -> str:
    new = progress.done - progress.num_before
    text = f"{new:,} lines in {_spell_time(progress.seconds)}, {progress.num_tokens:,} tokens"
    text += f" ({progress.num_tokens / max(progress.seconds, 1e-9):,.0f} a second), in {output}"
    if progress.failed:
        text += f"; {progress.failed:,} failed: {output}.errors"
    if not is_whole:
        text += f"; {progress.total - progress.done:,} are left: the same command goes on"
    return text
