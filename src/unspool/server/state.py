"""Everything that the routes of one server share."""

from __future__ import annotations

from dataclasses import dataclass, field

from unspool.server.lifecycle import Gate
from unspool.server.logs import Log, RequestRecord
from unspool.server.metrics import Metrics
from unspool.server.models import Models
from unspool.server.options import ServerOptions
from unspool.server.security import Keys
from unspool.server.turns import Turns


@dataclass
class ServerState:
    """Models, keys, counts and the log of one server."""

    models: Models
    options: ServerOptions
    gate: Gate = field(init=False)
    keys: Keys = field(init=False)
    turns: Turns = field(init=False)
    log: Log = field(init=False)
    metrics: Metrics = field(default_factory=Metrics)
    is_ready: bool = False

    def __post_init__(self) -> None:
        self.gate = Gate(self.options.limits)
        self.keys = Keys(self.options.keys)
        self.turns = Turns(self.options.limits)
        self.log = Log(self.options.log)

    def note_end(self, record: RequestRecord, route: str) -> None:
        """Count and log a request that has ended."""
        model = record.model or ""
        self.metrics.requests[route, record.status, model] += 1
        self.metrics.gone[model] += record.is_gone
        if route not in ("/health", "/ready", "/metrics"):  # probes would fill the log
            self.log.write_request(record)
