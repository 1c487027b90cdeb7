"""Other engines: each is a class in a module of its own, which imports its library where it is used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Final, cast

from unspool.bench.benchmark import Benchmark
from unspool.bench.engine import TimedEngine
from unspool.errors import SettingError
from unspool.wording import suggest

PEERS: Final = {  # the module and the class of each
    "transformers": ("transformers", "TransformersPeer"),
    "llama-cpp": ("llama_cpp", "LlamaCppPeer"),
    "onnxruntime": ("onnxruntime", "OnnxruntimePeer"),
    "ctranslate2": ("ctranslate2", "CTranslate2Peer"),
}
MOST_PEERS: Final = 16


def make_peers(asked: Sequence[str], benchmark: Benchmark) -> list[TimedEngine]:
    """The peers asked for, each checked to be able to run its model here; nothing is loaded yet.

    Each is `NAME`, on the benchmark's model, or `NAME=PATH`, on the model in the peer's own form. If a peer is given
    more than once, its label includes the file.
    """
    if len(asked) > MOST_PEERS:
        raise SettingError(f"{len(asked)} peers are asked for, and at most {MOST_PEERS} can be measured in one run")
    pairs = [_read_pair(word) for word in asked]
    times = Counter(name for name, _ in pairs)
    labels = [f"{name} {path.stem}" if path is not None and times[name] > 1 else name for name, path in pairs]
    for place, label in enumerate(labels):
        if label in labels[:place]:
            raise SettingError(f"--peer names each engine once, and two would be called {label!r:.80}")
    engines = [_make_peer(name, benchmark, path) for name, path in pairs]
    for engine, label in zip(engines, labels, strict=True):
        engine.name = label
    return engines


def _read_pair(word: str) -> tuple[str, Path | None]:
    name, has_path, path = word.partition("=")
    if name not in PEERS:
        hint = suggest(name, PEERS, str) or f"; they are {', '.join(PEERS)}"
        raise SettingError(f"there is no peer {name[:40]!r}{hint}")
    if not has_path:
        return name, None
    found = Path(path).expanduser()
    if not path or not found.exists():
        raise SettingError(f"--peer {name}={path[:200]}: there is no such file or folder")
    return name, found


def _make_peer(name: str, benchmark: Benchmark, path: Path | None) -> TimedEngine:
    module, kind = PEERS[name]
    return cast(TimedEngine, getattr(import_module(f"unspool.bench.peers.{module}"), kind)(benchmark, path))
