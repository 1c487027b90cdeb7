"""The cluster: ray itself, a connection, and what one actor may take."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any, Final

from unspool.errors import MissingExtraError, ResourceError, SettingError
from unspool.numeric import is_number, is_whole

_PART_OF_GPU: Final = 0.9  # of an actor's share; the rest is for passes
_MOST_ACTORS: Final = 100_000
_LEAST_CPUS: Final = 4  # that a cluster of our own counts: reading and writing take their turn beside an actor


def import_ray(purpose: str) -> Any:
    """The package ray; raises an error that names the extra if it is not installed."""
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise MissingExtraError(error.name or "ray", "ray", purpose) from error
    return ray


def connect(address: str | None = None, **options: Any) -> Any:
    """ray, connected to the cluster at an address; without one to that of RAY_ADDRESS, or to one of our own."""
    ray = import_ray("--ray")
    if ray.is_initialized():
        return ray
    if not address and "RAY_ADDRESS" not in os.environ:
        address = "local"
        options.setdefault("num_cpus", max(_LEAST_CPUS, os.cpu_count() or 1))
        options.setdefault("include_dashboard", False)
    try:
        ray.init(address=address or None, log_to_driver=False, logging_level=logging.WARNING, **options)
    except Exception as error:  # its own have no common root with the system's
        raise ResourceError(f"no Ray cluster answers at {address or os.environ.get('RAY_ADDRESS')}: {error}") from error
    return ray


@dataclass(frozen=True)
class Actors:
    """How many actors there are, and what each of them takes."""

    least: int = 1
    most: int = 1
    cpus: float = 1.0
    gpus: float | None = None  # a fraction lets small models share a GPU; None: one, if the cluster has any

    def __post_init__(self) -> None:
        if not (is_whole(self.least) and is_whole(self.most)):
            raise SettingError(f"actors are a whole number, or a range, not {self.least!r:.40}:{self.most!r:.40}")
        if not 1 <= self.least <= self.most <= _MOST_ACTORS:
            raise SettingError(f"actors are from 1 to {_MOST_ACTORS}, or a range, not {self.least}:{self.most}")
        if not is_number(self.cpus) or not 0 < self.cpus <= 4096:
            raise SettingError(f"an actor takes a positive number of CPUs, not {self.cpus!r:.40}")
        gpus = 0 if self.gpus is None else self.gpus
        if not is_number(gpus) or not 0 <= gpus <= 64 or (gpus > 1 and gpus != int(gpus)):
            raise SettingError(f"an actor takes a fraction of a GPU, or a whole number of them, not {self.gpus!r:.40}")

    def find_resources(self, ray: Any) -> dict[str, float]:
        """What an actor takes on a cluster, in Ray's names."""
        gpus = self.gpus
        if gpus is None:
            gpus = 1.0 if ray.is_initialized() and ray.cluster_resources().get("GPU", 0) else 0.0
        return {"num_cpus": self.cpus, **({"num_gpus": gpus} if gpus else {})}


def find_share() -> float:
    """The part of a GPU that this actor was given; 1 if it was given none, whole ones, or if this is no actor."""
    ray = import_ray("an actor")
    if not ray.is_initialized():
        return 1.0
    given = float(ray.get_runtime_context().get_assigned_resources().get("GPU", 0.0))
    return given if 0 < given < 1 else 1.0


def limit_memory(share: float, total: int, held: int) -> int:
    """Bytes for keys and values of an actor with a share of a GPU of `total` bytes, whose weights take `held`."""
    left = int(share * total * _PART_OF_GPU) - held
    if left <= 0:
        raise ResourceError(
            f"{share:g} of a GPU of {total >> 20} MiB has no room for keys beside weights of {held >> 20} MiB; "
            "give an actor a larger share"
        )
    return left
