"""`unspool serve`: models over HTTP."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable
from typing import Any

from unspool.cli.parser import Parser, UsageError
from unspool.cli.ray import add_ray_options, read_ray_options
from unspool.loading.catalogue import DEFAULT_MODEL

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_LIMITS = {
    "requests": "Requests at work or waiting; more are answered 429.",
    "requests_per_key": "The same, for each key.",
    "traces": "Traced requests at work at once.",
    "new_tokens": "The most tokens of one answer.",
    "prompts": "The most prompts of one request.",
    "choices": "The most answers of one request.",
    "connections": "Open connections; beyond them one without a request is closed.",
    "header_bytes": "The headers of one request.",
    "header_seconds": "Until they are sent.",
    "body_bytes": "The largest body.",
    "audio_bytes": "The largest sound.",
    "costly_bytes": "Long bodies that wait to be read, a hard grammar counting as 1M; more are answered 429.",
    "costly_bytes_per_client": "The same, for each key, or each address where there are no keys.",
    "text_bytes": "The longest text whose tokens are listed or counted.",
    "token_ids": "The most token ids whose text is asked for.",
    "logit_bias": "The most entries of logit_bias, and of lists of words.",
    "messages": "The most messages of a chat.",
    "pictures": "The most pictures of a request.",
    "picture_pixels": "The most pixels of a picture.",
    "stop_strings": "The most stop strings of a request.",
    "priority": "The highest priority that a client may ask for.",
    "request_seconds": "Then a request ends with what it has.",
}


def build_parser() -> Parser:
    """The options of `unspool serve`."""
    parser = Parser(
        "serve",
        "[MODEL…] [options]",
        "Serve models over HTTP: OpenAI's routes, and others; every generation setting is a field of a request.\n"
        "MODEL is a short name, a folder, a .gguf file or a hub id; NAME=MODEL serves it under another name.",
        (
            "unspool serve",
            "unspool serve small=smollm2-135m speech=whisper-tiny.en --port 9000",
            "unspool serve --host 0.0.0.0 --api-key-file keys.txt",
            "unspool serve qwen3-0.6b --ray --replicas 1:8 --replica-gpus 0.5 --route session",
        ),
    )
    parser.general.add_argument("models", metavar="MODEL", nargs="*", help=argparse.SUPPRESS)
    _add_address(parser)
    _add_limits(parser)
    add_engine_options(parser)
    add_ray_options(parser, "replicas", "A replica").add_argument(
        "--route", metavar="KIND", help="balanced, or session: by the header x-session-id. [balanced]"
    )
    return parser


def _add_address(parser: Parser) -> None:
    where = parser.add_argument_group("where, and for whom")
    where.add_argument("--host", metavar="ADDRESS", default="127.0.0.1", help="Where to listen. [127.0.0.1]")
    where.add_argument("--port", metavar="N", type=int, default=8000, help="0 takes a free one. [8000]")
    where.add_argument("--api-key-file", metavar="FILE", help="A file with a key on each line; one of them is needed.")
    where.add_argument("--no-keys", action="store_true", help="Let anyone in where --host lets other machines in.")
    where.add_argument(
        "--allowed-host", metavar="NAME", action="append", default=[], help="A name in the Host header; several times."
    )
    where.add_argument(
        "--allow-origin", metavar="URL", action="append", default=[], help="Pages that may call; several times."
    )
    where.add_argument("--ready-file", metavar="FILE", help="Write the address here once requests are taken.")
    where.add_argument("--log", metavar="KIND", default="requests", help="requests, or none. [requests]")


def _add_limits(parser: Parser) -> None:
    group = parser.add_argument_group("limits")
    for name, meaning in _LIMITS.items():
        group.add_argument(f"--max-{name.replace('_', '-')}", dest=f"limit:{name}", metavar="N", help=meaning)
    group.add_argument(
        "--drain-seconds", metavar="N", type=float, default=60.0, help="That SIGTERM lets requests end in. [60]"
    )
    group.add_argument("--restart", action="store_true", help="Make a new engine where one has died by a fault.")


def add_engine_options(parser: Parser) -> None:
    """Options of how models are loaded and run, which `unspool studio` has too."""
    group = parser.add_argument_group("models and engines")
    group.add_argument("--max-rows", metavar="N", type=int, help="Rows that decode at once. [32, on a GPU 256]")
    group.add_argument("--memory", metavar="SIZE", help="For keys and values of each model, such as 2G.")
    group.add_argument("--memory-budget", metavar="SIZE", help="For the weights of all models, such as 8G.")
    group.add_argument("--on-demand", action="store_true", help="Load a model when it is first asked for.")
    group.add_argument("--device", metavar="DEVICE", help="cpu, cuda or cuda:N. [the GPU if there is one]")
    group.add_argument("--dtype", metavar="DTYPE", help="float32, float16, bfloat16 or auto. [auto]")
    group.add_argument(
        "--quantize", metavar="KIND", default="auto", help="int8, int4, nf4, fp4, fp8 or none. [as the file has them]"
    )
    group.add_argument("--threads", metavar="N", type=int, help="CPU threads. [the physical cores]")
    group.add_argument("--offline", action="store_true", help="Use what is on this disk, never the network.")


def execute(arguments: argparse.Namespace) -> int:
    """Load and serve, until a signal ends it."""
    from unspool.server.serving import print_ready, require_packages, serve

    require_packages()
    from unspool.server.security import read_key_file

    options = read_engine_options(arguments) | _read_limits(arguments)
    if arguments.log not in ("requests", "none"):
        raise UsageError(f"--log is requests or none, not {arguments.log[:40]!r}")
    models = arguments.models or [DEFAULT_MODEL]
    replicas = read_ray_options(arguments, "replicas")
    start: Callable[..., None] = serve
    if replicas is None:
        if arguments.route is not None:
            raise UsageError("--route is for a Ray cluster; use it with --ray")
        options |= {"ready_file": arguments.ready_file, "loads_on_demand": arguments.on_demand, "announces": True}
    else:
        for name in ("ready_file", "on_demand"):
            if getattr(arguments, name):
                raise UsageError(f"--{name.replace('_', '-')} is for a server of its own; leave it out beside --ray")
        from unspool.ray.serving import serve_on_ray

        start = serve_on_ray
        options |= {"address": arguments.ray, "replicas": replicas, "route": arguments.route or "balanced"}
        has_keys = arguments.api_key_file is not None
        options["on_ready"] = lambda address: print_ready(address, ", ".join(models), needs_key=has_keys)
    start(
        models,
        host=arguments.host,
        port=arguments.port,
        allows_anyone=arguments.no_keys,
        keys=read_key_file(arguments.api_key_file) if arguments.api_key_file is not None else (),
        hosts=arguments.allowed_host,
        origins=arguments.allow_origin,
        restart=arguments.restart,
        drain_seconds=arguments.drain_seconds,
        log=arguments.log,
        **options,
    )
    return 0


def read_engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """What `add_engine_options` asked for, as arguments of `serve`."""
    options: dict[str, Any] = {
        name: getattr(arguments, name)
        for name in ("device", "dtype", "quantize", "threads", "max_rows")
        if getattr(arguments, name) is not None
    }
    for name in ("memory", "memory_budget"):
        if getattr(arguments, name) is not None:
            options[name] = read_size(f"--{name.replace('_', '-')}", getattr(arguments, name))
    if arguments.offline:
        options["offline"] = True
    return options


def _read_limits(arguments: argparse.Namespace) -> dict[str, Any]:
    from unspool.server.options import ClientLimits

    found: dict[str, Any] = {}
    kinds = {one.name: one.type for one in dataclasses.fields(ClientLimits)}
    for name in _LIMITS:
        value = getattr(arguments, f"limit:{name}")
        if value is None:
            continue
        flag = f"--max-{name.replace('_', '-')}"
        try:
            found[name] = read_size(flag, value) if kinds[name] == "int" else float(value)
        except ValueError as error:
            raise UsageError(f"{flag} is a number, not {value[:40]!r}") from error
    return found


def read_size(flag: str, text: str) -> int:
    """A number, or one with K, M, G or T behind it."""
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if found is None:
        raise UsageError(f"{flag} is a number such as 4096 or 2G, not {text[:40]!r}")
    return int(float(found[1]) * _UNITS[found[2]])
