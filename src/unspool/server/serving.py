"""`unspool.serve` and `unspool.asgi`: models in, a server or an application out."""

from __future__ import annotations

import asyncio
import json
import math
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from unspool.api import LanguageModel, load
from unspool.errors import MissingExtraError, ResourceError, SettingError
from unspool.loading.catalogue import CATALOGUE, DEFAULT_MODEL
from unspool.server.options import ServerOptions

if TYPE_CHECKING:
    from unspool.server.models import Served

_ENGINE_OPTIONS = (
    "max_rows",
    "memory",
    "tokens_per_pass",
    "share_prefixes",
    "block_size",
    "cache_implementation",
    "cache_config",
    "batch_invariant",
)
_LOAD_OPTIONS = ("device", "dtype", "quantize", "threads", "revision", "offline", "progress", "native")
LAST_PORT = 65_535
_CHAT = '{"messages": [{"role": "user", "content": "Write a haiku about a lighthouse."}]}'
_OTHER_FILES = 512  # than connections: weights, libraries, the processes that check grammars
_PATIENCE = 2  # signals: the first waits for requests, the second ends them, a third cuts them off
_LAST_SECONDS = 3.0  # in which requests that are ended say so
_WAITING = 1 << 16  # the server bounds what waits itself, and answers 429


def require_packages() -> None:
    """Raise where what a server needs is not installed."""
    for package in ("msgspec", "starlette", "uvicorn"):
        if find_spec(package) is None:
            raise MissingExtraError(package, "serve", "a server")


def asgi(models: Any, **options: Any) -> Any:
    """An ASGI application that serves a language model, or several by name, to be mounted in another application.

    Takes what `unspool.serve` takes, except for addresses and signals.
    """
    require_packages()
    from unspool.server.app import make_app

    state = make_state(models, options)
    state.models.open_all()
    return make_app(state, closes=True)


def make_state(models: Any, options: dict[str, Any]) -> Any:
    """A server's state from the arguments of `serve`."""
    from unspool.server.models import Models, Served
    from unspool.server.state import ServerState

    engine = {name: options.pop(name) for name in _ENGINE_OPTIONS if name in options}
    engine["max_waiting"] = _WAITING
    loading = {name: options.pop(name) for name in _LOAD_OPTIONS if name in options}
    budget = options.pop("memory_budget", None)
    given = ServerOptions.read(**options)
    found = _list_models(models)
    served = [
        Served(name, _make_loader(source, loading), aliases, engine, _guess_size(source), is_alone=len(found) == 1)
        for name, source, aliases in found
    ]
    return ServerState(Models(served, memory=budget, restarts=given.restart), given)


def _list_models(models: Any) -> list[tuple[str, Any, tuple[str, ...]]]:
    """Names, what to load or to serve, and further names."""
    if isinstance(models, Mapping):
        return [(str(name), source, ()) for name, source in models.items()]
    found: list[tuple[str, Any, tuple[str, ...]]] = []
    for one in models if isinstance(models, list | tuple) else [models]:
        if isinstance(one, LanguageModel):
            found.append((one.name, one, ()))
            continue
        name, has_name, source = str(one).partition("=")
        if not has_name:
            name, source = _name_source(str(one)), str(one)
        found.append((name, source, tuple(dict.fromkeys(one for one in _list_aliases(source) if one != name))))
    return found


def _list_aliases(source: str) -> list[str]:
    """Names under which a source is known too."""
    known = [entry for entry in CATALOGUE if source in (entry.name, *entry.aliases)]
    return [source, *(alias for entry in known for alias in (entry.name, *entry.aliases))]


def _name_source(source: str) -> str:
    path = Path(source)
    return (path.stem if path.suffix == ".gguf" else path.name) if path.exists() else source


def _make_loader(source: Any, options: Mapping[str, Any]) -> Callable[[], LanguageModel]:
    if isinstance(source, LanguageModel):
        return lambda: source
    return partial(load, source, **options)


def _guess_size(source: Any) -> int:
    """Bytes of a model's files, as far as they are known before it is loaded."""
    from unspool.loading.catalogue import find_model

    if isinstance(source, LanguageModel):
        return 0
    with suppress(Exception):  # a name that is not installed yet
        path = find_model(str(source)) or Path(str(source))
        if path.is_file():
            return path.stat().st_size
        return sum(one.stat().st_size for one in path.glob("*.safetensors"))
    return 0


def serve(
    models: Any = DEFAULT_MODEL,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    ready_file: str | Path | None = None,
    on_ready: Callable[[str], None] | None = None,
    announces: bool = False,
    loads_on_demand: bool = False,
    allows_anyone: bool = False,
    **options: Any,
) -> None:
    """Serve models over HTTP until a signal ends the process: OpenAI's routes, with every setting as a field.

    `models` are names, paths, language models, or a mapping of served names to these. `on_ready(address)` is called,
    and `ready_file` written with the address, once requests are taken; with `announces` a line to try the server with
    is printed. Further arguments: those of `unspool.load` and
    `unspool.Engine`, `keys`, `hosts`, `origins`, `restart`, `memory_budget`, limits such as `requests` or
    `new_tokens`. SIGTERM and SIGINT let requests end for `drain_seconds`; a second signal ends at once.
    """
    require_packages()
    from unspool.server.app import make_app
    from unspool.server.security import is_loopback

    local = is_loopback(host)
    state = make_state(models, {**options, "is_loopback": local})
    if not local and not state.keys and not allows_anyone:
        raise SettingError(
            f"host={host!r} lets other machines in, and there are no keys, so that anyone could use this server; give "
            "keys (--api-key-file), or say that it is meant (allows_anyone=True, --no-keys)"
        )
    listening = listen(host, port)
    _allow_files(state.options.limits.connections + _OTHER_FILES)
    stop_logging = state.log.take_over() if state.options.log != "none" else lambda: None
    try:
        if not loads_on_demand:
            state.models.open_all()
        server = make_server(make_app(state), state, listening, ready_file, on_ready, announces=announces)
        run_server(server, listening)
    finally:
        listening.close()
        state.models.close()
        stop_logging()
        if ready_file is not None:
            with suppress(OSError):
                Path(ready_file).unlink()


def _allow_files(count: int) -> None:
    """Raise the number of files that this process may have open, as far as the system lets it: connections are files,
    and where there are no more of them nobody is let in."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _is_watched() -> bool:
    """Whether standard error is a terminal; else it is a log, whose lines are JSON."""
    return sys.stderr is not None and sys.stderr.isatty()


def run_server(server: Any, listening: socket.socket) -> None:
    """Run a server until it ends, in uvicorn's choice of an event loop."""
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(server.serve(sockets=[listening]))


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; taken before models are loaded, so that a port in use is refused at once."""
    if not 0 <= port <= LAST_PORT:  # the system would take the rest of a division
        raise SettingError(f"{port} is no port; use one from 1 to {LAST_PORT}, or 0 for any that is free")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, protocol)
    except (OSError, OverflowError, UnicodeError) as error:
        raise SettingError(f"{host}:{port} is not an address to listen on: {error}") from error
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except (OSError, OverflowError) as error:
        made.close()
        raise ResourceError(f"{host}:{port} can't be listened on: {error}; choose another --port") from error
    return made


def make_server(
    app: Any,
    state: Any,
    listening: socket.socket,
    ready_file: str | Path | None = None,
    on_ready: Callable[[str], None] | None = None,
    *,
    announces: bool = False,
    parser: Callable[..., Any] | None = None,
) -> Any:
    """uvicorn around an application, on a socket; `serve(sockets=[…])` runs it. `parser` is a protocol of uvicorn's."""
    import uvicorn
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    from unspool.server.connections import Connections

    connections = Connections(state, AutoHTTPProtocol if parser is None else parser)
    limits = state.options.limits

    class Server(uvicorn.Server):
        """uvicorn's server, which lets requests end before it does."""

        draining: asyncio.Task[None] | None = None
        num_signals = 0

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            host, number = listening.getsockname()[:2]
            address = f"http://{f'[{host}]' if ':' in host else host}:{number}"
            self.loop = asyncio.get_running_loop()
            if ready_file is not None:
                Path(ready_file).write_text(address + "\n", encoding="utf-8")
            state.log.write("ready", address=address, models=[one.name for one in state.models.all])
            if on_ready is not None:
                on_ready(address)
            if announces and (state.options.log == "none" or _is_watched()):  # else lines are the log's
                served = state.models.all
                names = ", ".join(one.name for one in served)
                print_ready(address, names, needs_key=bool(state.keys), example=choose_example(served))

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            await super().shutdown(sockets)
            if self.force_exit:  # uvicorn would cancel the application's own end, and print where it was
                await self.lifespan.shutdown()

        def handle_exit(self, sig: int, _frame: Any) -> None:
            self.num_signals += 1
            if self.num_signals > _PATIENCE:
                self.should_exit = self.force_exit = True
                return
            state.gate.is_draining = True
            self.loop.call_soon_threadsafe(self._note_signal, sig)

        def _note_signal(self, sig: int) -> None:
            if self.draining is not None:
                state.gate.hurry()
            else:
                self._begin_drain(sig)

        def _begin_drain(self, sig: int) -> None:
            state.log.write("draining", signal=signal.Signals(sig).name, active=state.gate.num_active)
            self.draining = asyncio.ensure_future(self._drain())

        async def _drain(self) -> None:
            is_idle = await state.gate.drain(state.options.drain_seconds)
            if not is_idle:
                state.gate.end_all()
                is_idle = await state.gate.drain(_LAST_SECONDS)
            state.log.write("drained", active=None if is_idle else state.gate.num_active)
            self.force_exit = not is_idle
            self.should_exit = True

    config = uvicorn.Config(
        app,
        http=cast(Any, connections.make),
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_keep_alive=math.ceil(limits.idle_seconds + limits.header_seconds) + 5,  # `Connections` is before it
        h11_max_incomplete_event_size=64 << 10,
        ws="none",
        lifespan="on",
        timeout_graceful_shutdown=5,
    )
    return Server(config)


def print_ready(address: str, models: str, *, needs_key: bool = False, example: tuple[str, str] | None = None) -> None:
    """The address, and a line to try it with from this machine: a route and what curl sends; a chat without one."""
    route, sent = example or ("chat/completions", f"-d '{_CHAT}'")
    here = address.replace("//0.0.0.0", "//127.0.0.1").replace("//[::]", "//[::1]")  # where a client can't connect to
    key = '-H "Authorization: Bearer $KEY" ' if needs_key else ""
    print(f"serving {models} at {address}/v1", file=sys.stderr)
    print(f"try: curl {here}/v1/{route} {key}{sent}", file=sys.stderr, flush=True)


def choose_example(models: Sequence[Served]) -> tuple[str, str]:
    """A route that the first of the served models answers, and what curl sends there; it is named beside others."""
    first = models[0]
    is_named = len(models) > 1
    if first.lm is not None and first.lm.model.info.features is not None:
        return "audio/transcriptions", f"-F file=@sound.wav{f' -F model={first.name}' if is_named else ''}"
    body = {"model": first.name} if is_named else {}
    if first.lm is not None and not getattr(first.lm.tokenizer, "chat_template", None):
        return "completions", f"-d '{json.dumps({**body, 'prompt': 'Once upon a time'})}'"
    return "chat/completions", f"-d '{json.dumps({**body, **json.loads(_CHAT)})}'"
