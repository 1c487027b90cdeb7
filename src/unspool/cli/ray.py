"""The options of commands that run on a cluster."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING

from unspool.cli.parser import Parser, UsageError

if TYPE_CHECKING:
    from unspool.ray.cluster import Actors


def add_ray_options(parser: Parser, plural: str, one: str) -> argparse._ArgumentGroup:
    """`--ray`, how many `plural` there are, and what each of them takes."""
    group = parser.add_argument_group("ray")
    group.add_argument(
        "--ray",
        metavar="ADDRESS",
        nargs="?",
        const="",
        help="Run on a Ray cluster: at that address (--ray=ADDRESS), at RAY_ADDRESS, or on this machine.",
    )
    group.add_argument(f"--{plural}", metavar="N", help="Their number, or the least and the most: 1:64. [1]")
    singular = plural[:-1]
    group.add_argument(f"--{singular}-gpus", metavar="N", type=float, help=f"{one}'s GPUs; 0.25 shares one. [1 or 0]")
    group.add_argument(f"--{singular}-cpus", metavar="N", type=float, help=f"{one}'s CPUs. [1]")
    return group


def read_ray_options(arguments: argparse.Namespace, plural: str) -> Actors | None:
    """What the options ask for; None without `--ray`."""
    names = (plural, f"{plural[:-1]}-gpus", f"{plural[:-1]}-cpus")
    count, gpus, cpus = (getattr(arguments, name.replace("-", "_")) for name in names)
    if arguments.ray is None:
        for name, value in zip(names, (count, gpus, cpus), strict=True):
            if value is not None:
                raise UsageError(f"--{name} is for a Ray cluster; use it with --ray")
        return None
    from unspool.ray.cluster import Actors

    found = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", count or "1")
    if found is None:
        raise UsageError(f"--{plural} is a number or a range such as 1:64, not {count[:40]!r}")
    least = int(found[1])
    return Actors(least, int(found[2] or least), 1.0 if cpus is None else cpus, gpus)
