"""Other engines: each is a class in a module of its own, which imports its library where it is used."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from importlib import import_module
from typing import Final, cast

from unspool.bench.engine import Engine
from unspool.bench.task import Task
from unspool.errors import SettingError

PEERS: Final = {  # the module and the class of each
    "transformers": ("transformers", "TransformersPeer"),
    "llama-cpp": ("llama_cpp", "LlamaCppPeer"),
    "onnxruntime": ("onnxruntime", "OnnxruntimePeer"),
    "ctranslate2": ("ctranslate2", "CTranslate2Peer"),
}


def make_peers(names: Sequence[str], task: Task) -> list[Engine]:
    """The peers of these names, each known to be able to run the task's model here; nothing is loaded yet."""
    for name in (*names, *task.files):
        if name not in PEERS:
            near = difflib.get_close_matches(name, PEERS, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; they are {', '.join(PEERS)}"
            raise SettingError(f"there is no peer {name[:40]!r}{hint}")
    for name in task.files:
        if name not in names:
            raise SettingError(f"--peer-model names a model for {name}, which takes no part; add --peer {name}")
    if len(set(names)) < len(names):
        raise SettingError("--peer names each engine once")
    return [_make_peer(name, task) for name in names]


def _make_peer(name: str, task: Task) -> Engine:
    module, kind = PEERS[name]
    return cast(Engine, getattr(import_module(f"unspool.bench.peers.{module}"), kind)(task))
