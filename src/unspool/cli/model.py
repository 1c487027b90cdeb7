"""Loading a model, for the commands that need one."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from unspool.cli.console import ProgressLine
from unspool.cli.parser import Parser, UsageError
from unspool.loading.catalogue import DEFAULT_MODEL

if TYPE_CHECKING:
    from unspool.api import LanguageModel


def add_model_options(parser: Parser, default: str = DEFAULT_MODEL) -> argparse._ArgumentGroup:
    """The options for the model and its device."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "-m",
        "--model",
        metavar="NAME",
        default=default,
        help=f"A short name, a folder, a .gguf file or a hub id. [{default}]",
    )
    group.add_argument("--device", metavar="DEVICE", help="cpu, cuda or cuda:N. [the GPU if there is one]")
    group.add_argument("--dtype", metavar="DTYPE", help="float32, float16, bfloat16 or auto. [auto]")
    group.add_argument(
        "--quantize",
        metavar="KIND",
        default="auto",
        help="int8, int4, nf4, fp4, fp8 (GPUs), or none for plain numbers. [as the file has them]",
    )
    group.add_argument("--threads", metavar="N", type=int, help="CPU threads. [the physical cores]")
    group.add_argument("--revision", metavar="NAME", help="A branch, tag or commit of a hub id.")
    group.add_argument("--offline", action="store_true", help="Use what is on this disk, never the network.")
    return group


def add_assistant_option(group: argparse._ArgumentGroup) -> None:
    """The option for a draft model."""
    group.add_argument(
        "--assistant-model",
        "--assistant_model",
        metavar="NAME",
        help="A smaller model, which drafts for this one to check.",
    )


def list_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """What `unspool.load` is given."""
    return {
        "device": arguments.device,
        "dtype": arguments.dtype,
        "quantize": None if arguments.quantize == "none" else arguments.quantize,
        "threads": arguments.threads,
        "revision": arguments.revision,
        "offline": True if arguments.offline else None,
    }


def load_model(arguments: argparse.Namespace) -> LanguageModel:
    """Load what the options ask for, with a progress line on a terminal."""
    return _load(arguments.model, arguments)


def load_text_model(arguments: argparse.Namespace, *, chats: bool = False) -> LanguageModel:
    """Load a model that reads text, and has a chat template if it `chats`; point to the command of any other."""
    lm = load_model(arguments)
    if lm.model.info.features is not None:
        raise UsageError(f"{lm.name} reads sound, not text; use: unspool transcribe -m {arguments.model} FILE")
    if chats and lm.tokenizer is not None and not lm.tokenizer.chat_template:
        raise UsageError(
            f'{lm.name} has no chat template, so it takes texts and no chats; use: unspool run -m {arguments.model} "…"'
        )
    return lm


def load_assistant(arguments: argparse.Namespace) -> LanguageModel | None:
    """Load the draft model, if one is named."""
    return None if arguments.assistant_model is None else _load(arguments.assistant_model, arguments)


def _load(name: str, arguments: argparse.Namespace) -> LanguageModel:
    with ProgressLine() as line, _no_collecting():
        line.show(f"loading {name} …")
        from unspool.loading.model import load_parts  # torch comes with it: the longest part of starting

        with ThreadPoolExecutor(1) as beside:  # weights are read while the rest of the library is imported
            loading = beside.submit(
                load_parts,
                name,
                **list_options(arguments),
                progress=lambda _what, done, total: line.show_bar(f"loading {name}", done, total),
            )
            from unspool.api import LanguageModel

            return LanguageModel(loading.result())


@contextmanager
def _no_collecting() -> Iterator[None]:
    """Disable the garbage collector at startup: importing torch, which creates no garbage, takes 0.3 s less."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()  # nor need it scan all that later
    finally:
        if was_on:
            gc.enable()
