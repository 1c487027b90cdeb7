"""`unspool serve --ray`: our application as a deployment of Ray Serve, with an engine in every replica."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from unspool.api import LanguageModel
from unspool.errors import EngineError, MissingExtraError, SettingError
from unspool.ray.cluster import Actors, connect, find_share, limit_memory
from unspool.ray.worker import locate
from unspool.server.serving import make_state, require_packages

APPLICATION: Final = "unspool"
# Serve's router by a header, x-session-id: whoever sends the same one comes to the same replica, which knows the
# beginning of the chat. A router that reads prompts is for deployments of ray.serve.llm alone, which need vLLM.
_ROUTERS: Final[Mapping[str, str | None]] = {
    "balanced": None,  # Serve's default: the emptier of two
    "session": "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter",
}
_QUEUE: Final = 4096  # requests that wait at a proxy for a replica; more are answered 503
_TARGET: Final = 32  # requests at work in a replica, on average, above which there are to be more replicas


class Replica:
    """The models, engines and application of one replica."""

    def __init__(self, models: Any, options: dict[str, Any]) -> None:
        """`models` are those of `unspool.serve`, or a function that returns them."""
        made = models() if callable(models) and not isinstance(models, LanguageModel) else models
        self._state = make_state(made, dict(options))
        _share_gpu(self._state.models.all)
        self._state.models.open_all()

    def __serve_build_asgi_app__(self) -> Any:
        """The application that requests go to; Serve asks for it once the replica is made."""
        from unspool.server.app import make_app

        return make_app(self._state, closes=True)

    def check_health(self) -> None:
        """Raise if an engine has died: Serve then puts another replica in the place of this one."""
        failed = [one.name for one in self._state.models.all if one.has_failed]
        if failed and not self._state.options.restart:
            raise EngineError(f"the engine of {', '.join(failed)} has stopped by a fault")


def _share_gpu(served: list[Any]) -> None:
    """Let engines keep to this replica's share of a GPU."""
    import torch

    share = find_share()
    if share == 1 or not torch.cuda.is_available():
        return
    total = torch.cuda.get_device_properties(0).total_memory
    for one in served:
        if one.engine_options.get("memory") is None:
            one.engine_options = {**one.engine_options, "memory": limit_memory(share / len(served), total, one.size)}


def import_serve() -> Any:
    """The module ray.serve; raises an error that names the extra if it is not installed."""
    require_packages()
    try:
        from ray import serve
    except ImportError as error:
        raise MissingExtraError(error.name or "ray", "ray", "unspool serve --ray") from error
    return serve


def build_application(
    models: Any,
    *,
    replicas: Actors | None = None,
    route: str = "balanced",
    target_requests: float = _TARGET,
    **options: Any,
) -> Any:
    """An application for `ray.serve.run`: what `unspool.serve` takes, in replicas with CPUs and GPUs of their own.

    Between the least and the most of `replicas` there are as many as keep `target_requests` at work in each.
    `route="session"` sends requests with the same x-session-id to the same replica.
    """
    serve = import_serve()
    if route not in _ROUTERS:
        raise SettingError(f"`route` is {' or '.join(_ROUTERS)}, not {route!r:.40}")
    if not callable(models):
        models = _locate_all(models)
        make_state(models, dict(options))  # what can't be is refused here, not in every replica
    given = replicas or Actors()
    limits = make_limits(options)
    settings: dict[str, Any] = {
        "name": APPLICATION,
        "ray_actor_options": given.find_resources(_get_ray()),
        "max_ongoing_requests": limits.requests + 16,  # the application refuses first, and health is asked for too
        "max_queued_requests": _QUEUE,
        "graceful_shutdown_timeout_s": options.get("drain_seconds", 60.0),
        "health_check_period_s": 5.0,
    }
    if given.least == given.most:
        settings["num_replicas"] = given.least
    else:
        settings["autoscaling_config"] = {
            "min_replicas": given.least,
            "max_replicas": given.most,
            "target_ongoing_requests": target_requests,
        }
    router = _ROUTERS[route]
    if router is not None:
        from ray.serve.config import RequestRouterConfig

        settings["request_router_config"] = RequestRouterConfig(request_router_class=router)
    return serve.deployment(**settings)(serve.ingress()(Replica)).bind(models, options)


def _get_ray() -> Any:
    import ray

    return ray


def make_limits(options: Mapping[str, Any]) -> Any:
    """The limits that a replica's application has."""
    from unspool.server.options import ClientLimits

    names = ClientLimits.__dataclass_fields__
    return ClientLimits(**{name: value for name, value in options.items() if name in names})


def _locate_all(models: Any) -> Any:
    """Models as replicas are given them: paths are given whole."""
    if isinstance(models, Mapping):
        return {name: locate(one) for name, one in models.items()}
    if isinstance(models, list | tuple):
        return [_locate_all(one) for one in models]
    if isinstance(models, str | Path):
        name, has_name, source = str(models).partition("=")
        return f"{name}={locate(source)}" if has_name else locate(models)
    return models


def serve_on_ray(
    models: Any,
    *,
    address: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    replicas: Actors | None = None,
    route: str = "balanced",
    allows_anyone: bool = False,
    on_ready: Callable[[str], None] | None = None,
    **options: Any,
) -> None:
    """Serve models on a cluster until a signal ends this process, and with it the application."""
    from unspool.server.security import is_loopback

    local = is_loopback(host)
    if not local and not options.get("keys") and not allows_anyone:
        raise SettingError(
            f"host={host!r} lets other machines in, and there are no keys, so that anyone could use this server; give "
            "keys (--api-key-file), or say that it is meant (allows_anyone=True, --no-keys)"
        )
    serve = import_serve()
    connect(address)
    application = build_application(models, replicas=replicas, route=route, is_loopback=local, **options)
    ended = threading.Event()
    before = {one: signal.signal(one, lambda *_: ended.set()) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        serve.start(http_options={"host": host, "port": port})
        serve.run(application, name=APPLICATION, route_prefix="/")
        if on_ready is not None:
            on_ready(f"http://{host}:{port}")
        ended.wait()
    finally:
        with suppress(Exception):
            serve.delete(APPLICATION)
        for one, handler in before.items():
            signal.signal(one, handler)
