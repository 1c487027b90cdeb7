from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from unspool.errors import LoadError, MissingExtraError
from unspool.loading.hub import fetch, parse_hub_name

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORIES = {
    "owner/plain": {
        "config.json": b'{"model_type": "llama"}',
        "model.safetensors": b"\x02\0\0\0\0\0\0\0{}",
        "tokenizer.json": b"{}",
        "chat_template.jinja": b"{{ messages }}",
        "pytorch_model.bin": b"pickle",
        "modeling_plain.py": b"raise SystemExit",
        "tokenizer.py": b"raise SystemExit",
        "onnx/model.json": b"{}",
        "consolidated.safetensors": b"twice",
    },
    "owner/ggufs": {"README.md": b"", "config.json": b"{}", "a.Q4_0.gguf": b"GGUF a", "b.gguf": b"GGUF b"},
    "owner/pickled": {"config.json": b"{}", "pytorch_model.bin": b"pickle", "training_args.bin": b"pickle"},
    "owner/torch": {"config.json": b"{}", "model.pt": b"pickle"},
}


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as its client library asks for."""

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def answer(self, body: bytes, code: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self) -> None:
        path = urlsplit(self.path).path.strip("/")
        is_api = path.startswith("api/models/")
        parts = path.removeprefix("api/models/").split("/")
        files = REPOSITORIES.get("/".join(parts[:2]))
        if files is None:
            code = "GatedRepo" if parts[1] == "gated" else "RepoNotFound"
            self.answer(b"{}", 403 if code == "GatedRepo" else 404, {"X-Error-Code": code})
        elif len(parts) > 3 and parts[3] not in ("main", COMMIT):
            self.answer(b"{}", 404, {"X-Error-Code": "RevisionNotFound"})
        elif is_api and len(parts) > 2 and parts[2] == "tree":
            listing = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in files.items()
            ]
            self.answer(json.dumps(listing).encode(), headers={"Content-Type": "application/json"})
        elif is_api:
            siblings = [{"rfilename": name} for name in files]
            info = {"id": "/".join(parts[:2]), "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}
            self.answer(json.dumps(info).encode(), headers={"Content-Type": "application/json"})
        elif (name := "/".join(parts[4:])) in files:
            etag = hashlib.sha1(files[name]).hexdigest()
            self.answer(files[name], headers={"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})
        else:
            self.answer(b"", 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})

    def do_HEAD(self) -> None:
        self.do_GET()


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


# The client library reads its environment when it is imported: every case runs in a process of its own,
# which tries the calls given and prints what came of each.
CALLS = """
import json, sys
from pathlib import Path
from unspool.loading.hub import HubOptions, fetch

answers = []
for arguments in json.loads(sys.argv[1]):
    try:
        options = HubOptions(**arguments.pop("options", {}))
        path = fetch(**arguments, options=options)
        names = sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()) if path.is_dir() else []
        answers.append({"path": str(path), "names": names})
    except Exception as error:
        answers.append({"error": type(error).__name__, "text": str(error)})
print(json.dumps(answers))
"""


def call(home: Path, endpoint: str, *arguments: dict[str, Any], **environment: str) -> list[dict[str, Any]]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_") and "proxy" not in key.lower()}
    own = {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    own |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1"}
    result = subprocess.run(
        [sys.executable, "-c", CALLS, json.dumps(arguments)],
        env=kept | own | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    answers: list[dict[str, Any]] = json.loads(result.stdout)
    return answers


def test_a_hub_on_this_machine_and_then_its_cache(endpoint: str, tmp_path: Path) -> None:
    plain, one, choice, pickled, other, absent, gated, revision, entry = call(
        tmp_path,
        endpoint,
        {"repo_id": "owner/plain"},
        {"repo_id": "owner/ggufs", "filename": "b.gguf"},
        {"repo_id": "owner/ggufs"},
        {"repo_id": "owner/pickled"},
        {"repo_id": "owner/torch"},
        {"repo_id": "owner/absent"},
        {"repo_id": "owner/gated"},
        {"repo_id": "owner/plain", "revision": "v9"},
        {"repo_id": "owner/ggufs", "filename": "c.gguf"},
    )
    assert plain["names"] == ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"]
    assert Path(one["path"]).read_bytes() == b"GGUF b"
    assert choice["error"] == "LoadError" and "owner/ggufs:a.Q4_0.gguf, owner/ggufs:b.gguf" in choice["text"]
    assert pickled["names"] == ["config.json", "pytorch_model.bin"]
    assert other["error"] == "LoadError" and "other pickles are never downloaded" in other["text"]
    assert absent["error"] == "ModelNotFoundError" and "nor a repository on the hub" in absent["text"]
    assert gated["error"] == "LoadError" and "hf auth login" in gated["text"]
    assert revision["error"] == "ModelNotFoundError" and "no revision 'v9'" in revision["text"]
    assert entry["error"] == "ModelNotFoundError" and "no such file" in entry["text"]

    nowhere = "http://127.0.0.1:9"  # nothing listens there: what comes now comes from the cache
    wanted = ({"repo_id": "owner/plain"}, {"repo_id": "owner/ggufs", "filename": "b.gguf"}, {"repo_id": "owner/other"})
    offline = call(tmp_path, nowhere, *wanted, HF_HUB_OFFLINE="1")
    asked = call(tmp_path, nowhere, *({**arguments, "offline": True} for arguments in wanted))
    for answers in (offline, asked):
        assert answers[0]["path"] == plain["path"] and answers[1]["path"] == one["path"]
        assert answers[2]["error"] == "ModelNotFoundError" and "offline mode is on" in answers[2]["text"]
    unreachable = call(tmp_path / "empty", nowhere, {"repo_id": "owner/plain"})[0]
    assert unreachable["error"] == "LoadError" and "can't be reached" in unreachable["text"]


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        ("owner/name", ("owner/name", None)),
        ("HuggingFaceTB/SmolLM2-1.7B", ("HuggingFaceTB/SmolLM2-1.7B", None)),
        ("owner/name:file.Q4_0.gguf", ("owner/name", "file.Q4_0.gguf")),
        ("owner/name:sub/file.gguf", ("owner/name", "sub/file.gguf")),
    ],
)
def test_hub_names(name: str, parsed: tuple[str, str | None]) -> None:
    assert parse_hub_name(name) == parsed


NOT_HUB_NAMES = ["name", "a/b/c", "../b", "a/..", "a/b..c", "a--b/c", "/a/b", "a/b:", "a/b:x.bin", "a/b:../x.gguf"]
NOT_HUB_NAMES += ["a/b\n", "a b/c", "a/b?x", "https://x/y", "a/" + "b" * 97, "é/b", "a/b:/x.gguf"]


@pytest.mark.parametrize("name", NOT_HUB_NAMES)
def test_what_is_no_hub_name(name: str) -> None:
    assert parse_hub_name(name) is None
    with pytest.raises(LoadError, match="is not a hub id"):
        fetch(name)


@pytest.mark.parametrize("revision", ["../x", "a b", "", "-x", "x/../y", "x" * 300])
def test_what_is_no_revision(revision: str) -> None:
    with pytest.raises(LoadError, match="is not a revision"):
        fetch("owner/name", revision=revision)


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError, match=r"unspool\[hub\]"):
        fetch("owner/name")


def test_small_files_alone_in_another_cache(endpoint: str, tmp_path: Path) -> None:
    small, again = call(
        tmp_path / "home",
        endpoint,
        {"repo_id": "owner/plain", "has_weights": False, "options": {"cache_dir": str(tmp_path / "other")}},
        {"repo_id": "owner/plain", "options": {"token": "hf_x", "force_download": True}},
    )
    assert small["names"] == ["chat_template.jinja", "config.json", "tokenizer.json"]
    assert Path(small["path"]).is_relative_to(tmp_path / "other")
    assert "model.safetensors" in again["names"] and Path(again["path"]).is_relative_to(tmp_path / "home")
