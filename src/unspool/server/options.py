"""What a server is started with: limits, keys, addresses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self

from unspool.errors import SettingError
from unspool.numeric import is_number


@dataclass(frozen=True)
class ClientLimits:
    """Bounds of what clients may ask for."""

    connections: int = 1024  # open ones; beyond them one that asks for nothing is closed
    header_bytes: int = 32 << 10  # of one request
    header_seconds: float = 20.0  # that a client may take to send them
    idle_seconds: float = 30.0  # that a connection may be open without a request
    body_bytes: int = 4 << 20
    audio_bytes: int = 64 << 20
    pictures: int = 16  # of one request
    picture_pixels: int = 1 << 26  # of one of them
    costly_bytes: int = 256 << 20  # of long bodies that wait to be read; a hard grammar counts as a MiB
    costly_bytes_per_client: int = 64 << 20  # the same, of a key, or of an address where there are no keys
    text_bytes: int = 2 << 20  # of a text whose tokens are listed or counted
    token_ids: int = 1 << 18  # whose text is asked for
    logit_bias: int = 4096  # entries; also of lists of words and of sequences
    new_tokens: int = 8192  # of one choice
    prompts: int = 64  # of one request
    choices: int = 64  # of one request, `n` and `best_of` of all prompts
    messages: int = 2048
    stop_strings: int = 16
    top_logprobs: int = 64
    requests: int = 256  # at work or waiting, of all clients
    requests_per_key: int = 256
    traces: int = 8  # traced requests at work, of all clients
    priority: int = 0  # the highest that a client may ask for
    request_seconds: float = 600.0  # then a request ends with what it has
    send_seconds: float = 60.0  # that a client may take to read what was sent
    body_seconds: float = 60.0  # that a client may take to send its request

    def __post_init__(self) -> None:
        for one in fields(self):
            value, whole = getattr(self, one.name), one.type == "int"
            least = 0 if one.name == "priority" else 1e-3
            if not is_number(value) or (whole and not isinstance(value, int)) or not least <= value <= 1 << 40:
                raise SettingError(f"the limit {one.name!r} must be a positive number, not {value!r:.40}")


@dataclass(frozen=True)
class ServerOptions:
    """How a server behaves; `unspool serve --help` says the same of its flags."""

    limits: ClientLimits = field(default_factory=ClientLimits)
    keys: Sequence[str] = ()  # without any, no client is asked for one
    hosts: Sequence[str] = ()  # names that a Host header may have; empty: loopback names, or any beyond loopback
    origins: Sequence[str] = ()  # pages that may call this server from a browser
    is_loopback: bool = True  # it is bound to this machine alone
    restart: bool = False  # make a new engine where one has died
    drain_seconds: float = 60.0
    ping_seconds: float = 15.0  # of silence after which a stream gets a comment
    log: str = "requests"  # or "none"

    def __post_init__(self) -> None:
        for name in ("drain_seconds", "ping_seconds"):
            value = getattr(self, name)
            if not is_number(value) or not 0 <= value <= 1 << 40:
                raise SettingError(f"{name!r} must be a number of seconds, not {value!r:.40}")

    @classmethod
    def read(cls, **given: Any) -> Self:
        """Options from keyword arguments; names of limits are taken too."""
        bounds = {name: given.pop(name) for name in [one.name for one in fields(ClientLimits)] if name in given}
        known = {one.name for one in fields(cls)}
        for name in given:
            if name not in known:
                raise SettingError(f"a server has no option {name!r}; it has {', '.join(sorted(known))}")
        if bounds:
            given["limits"] = ClientLimits(**bounds)
        return cls(**given)
