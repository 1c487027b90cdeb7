"""What comes over the wire, in front of both parsers: heads without end, slow ones, chunks, pipelines, idle crowds."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tests.server.running import RunningServer, Slow, make_fake_lm

HOST = b"Host: localhost\r\n"
GET = b"GET /health HTTP/1.1\r\n" + HOST
CHUNKED = b"POST /tokenize HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n"
BODY = b'{"prompt": "hello"}'


@pytest.fixture(scope="module", params=[HttpToolsProtocol, H11Protocol], ids=["httptools", "h11"])
def server(request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    bounds = {"header_seconds": 0.4, "body_seconds": 0.4, "idle_seconds": 0.4, "connections": 12, "body_bytes": 100_000}
    with RunningServer({"fake": make_fake_lm()}, parser=request.param, **bounds) as running:
        yield running


def connect(server: RunningServer) -> socket.socket:
    host, _, port = server.address.removeprefix("http://").partition(":")
    made = socket.create_connection((host, int(port)), timeout=10)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def read_all(connection: socket.socket) -> bytes:
    """What the server sends until it closes."""
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionError:
        pass
    return b"".join(parts)


def send(server: RunningServer, *parts: bytes, pause: float = 0.0) -> bytes:
    """What a server answers to bytes, until it closes."""
    with connect(server) as connection:
        try:
            for part in parts:
                connection.sendall(part)
                time.sleep(pause)
        except ConnectionError:
            pass
        return read_all(connection)


def status_of(answer: bytes) -> int:
    return int(answer[9:12])


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (GET + b"X-Long: " + b"a" * 5_000_000, 431),
        (GET + b"X: 1\r\n" * 100_000, 431),
        (GET + b"X-Short: 1\r\n" * 200 + b"\r\n", 431),
        (b"GET /" + b"a" * 1_000_000, 414),
        (b"GET /health?" + b"a=1&" * 4000 + b" HTTP/1.1\r\n" + HOST + b"\r\n", 414),
        (b"\x16\x03\x01\x02\x00\x01\x00", 400),  # a TLS client
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
        (b"GET /health HTTP/1.1\n" + HOST + b"\n", 408),
        (b"A" * 100_000, 400),
        (b"CONNECT a:1 HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (b"GET /health HTTP/1.1\r\n\r\n", 400),
        (GET + HOST + b"\r\n", 400),
        (GET + b"Expect: a-miracle\r\n\r\n", 417),
        (GET + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n", 400),
        (GET + b"Content-Length: +5\r\n\r\n", 400),
        (GET + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n", 400),
        (GET + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (GET + b"Transfer-Encoding: gzip, chunked\r\n\r\n", 501),
        (GET + b"X: 1\r\n folded\r\n\r\n", 400),
        (GET + b"X: \x00\r\n\r\n", 400),
        (GET + b"X : 1\r\n\r\n", 400),
        (CHUNKED + b"\r\n1;" + b"x" * 1_000_000, 400),
        (CHUNKED + b"\r\nzz\r\n", 400),
        (CHUNKED + b"\r\n2\r\nabcd", 400),
        (CHUNKED + b"\r\n" + b"1\r\n \r\n" * 90_000, 400),
        (CHUNKED + b"\r\n0\r\n" + b"X: 1\r\n" * 100_000, 431),
    ],
)
def test_what_is_refused_on_the_wire(server: RunningServer, data: bytes, status: int) -> None:
    """In one piece and byte by byte at its beginning; the server answers others meanwhile."""
    for parts in ((data,), (*(data[at : at + 1] for at in range(20)), data[20:])):
        answer = send(server, *parts)
        if answer or len(data) < 1_000_000:  # it may be gone before all was sent
            assert status_of(answer) == status and b"connection: close" in answer
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
        assert server.get("/health").status_code == 200


def test_heads_and_bodies_that_dribble(server: RunningServer) -> None:
    """Each byte comes in time, and the whole does not."""
    started = time.monotonic()
    dribble = (b"X-Slow: 1\r\n",) * 20
    assert status_of(send(server, GET, *dribble, pause=0.04)) == 408
    body = b"POST /tokenize HTTP/1.1\r\n" + HOST + b"Content-Length: 100\r\n\r\n"
    assert status_of(send(server, body, *((b"x",) * 20), pause=0.04)) == 408
    assert send(server) == b""  # nothing is said, and nothing answered
    assert time.monotonic() - started < 9


def test_what_ordinary_clients_send(server: RunningServer) -> None:
    close = b"Connection: close\r\n\r\n"
    chunks = b"".join(b"%X ; a=b\r\n%b\r\n" % (len(part), part) for part in (BODY[:7], BODY[7:])) + b"0\r\nT: 1\r\n\r\n"
    for parts in (
        (CHUNKED + close, chunks),
        tuple((CHUNKED + close + chunks)[at : at + 1] for at in range(len(CHUNKED + close + chunks))),
        (b"\r\nPOST /tokenize HTTP/1.1\r\n" + HOST + b"Content-Length: 19\r\n" + close, BODY),
        (CHUNKED + b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\n" + close, chunks),
    ):
        answer = send(server, *parts)
        assert status_of(answer) == 200 and b'"count":' in answer
    absolute = b"GET http://localhost/health HTTP/1.1\r\n" + HOST + close
    assert status_of(send(server, absolute)) in (200, 404)
    assert status_of(send(server, b"GET /health HTTP/1.0\r\n\r\n")) in (200, 403)
    websocket = GET + b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n\r\n"
    assert status_of(send(server, websocket)) == 200
    expects = b"POST /tokenize HTTP/1.1\r\n" + HOST + b"Content-Length: 19\r\nExpect: 100-continue\r\n" + close
    with connect(server) as connection:
        connection.sendall(expects)
        assert connection.recv(100).startswith(b"HTTP/1.1 100 ")
        connection.sendall(BODY)
        assert status_of(read_all(connection)) == 200


def test_requests_behind_one_another(server: RunningServer) -> None:
    """In the order in which they came, however they are cut."""
    post = b"POST /tokenize HTTP/1.1\r\n" + HOST + b"Content-Length: 19\r\n\r\n" + BODY
    data = (
        (GET + b"\r\n" + post + GET.replace(b"/health", b"/nowhere") + b"\r\n") * 3 + GET + b"Connection: close\r\n\r\n"
    )
    for size in (len(data), 7):
        answer = send(server, *(data[at : at + size] for at in range(0, len(data), size)))
        found = [int(one) for one in re.findall(rb"HTTP/1.1 (\d+) ", answer)]
        assert found == [200, 200, 404] * 3 + [200]


def test_a_client_that_goes_with_requests_behind_frees_its_rows(server: RunningServer) -> None:
    model = Slow(vocab=160, max_context=2048)
    with RunningServer({"slow": make_fake_lm(model)}, parser=server.parser) as slow:
        body = json.dumps({"prompt": "hello", "max_tokens": 1500, "ignore_eos": True, "stream": True}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"Content-Length: %d\r\n\r\n" % len(body)
        with connect(slow) as connection:
            connection.sendall(head + body + (GET + b"\r\n") * 100)
            assert b"200 OK" in connection.recv(4096)
        slow.wait_until_idle(3.0)


def test_an_answer_before_the_bodys_end_can_be_read(server: RunningServer) -> None:
    """A refusal closes the connection, and is not lost by it; what comes without end is not read for ever."""
    head = b"POST /nowhere HTTP/1.1\r\n" + HOST + b"Content-Length: 1000000000000\r\n\r\n"
    answer = send(server, head, b"x" * 50_000)
    assert status_of(answer) == 404 and b"connection: close" in answer
    started = time.monotonic()
    with connect(server) as connection, pytest.raises(ConnectionError):
        connection.sendall(head)
        while time.monotonic() - started < 20:
            connection.sendall(b"x" * 10_000)
            time.sleep(0.01)
    assert time.monotonic() - started < 15


def test_a_crowd_that_asks_nothing_keeps_nobody_out(server: RunningServer) -> None:
    crowd = [connect(server) for _ in range(60)]
    for one in crowd[::2]:
        try:
            one.sendall(b"GET /health HT")
        except ConnectionError:
            continue
    assert server.get("/health").status_code == 200
    for one in crowd:
        one.close()


HOSTILE = [
    "http://[",
    "http://[::1",
    "://",
    "null",
    "é\xff\x80",
    "%",
    "%zz%00",
    ",;=,,\"'",
    '"' * 500,
    "bytes=0-99999999999999999999,-",
    "multipart/form-data; boundary=\"",
    "multipart/form-data; charset=nonsense; boundary=x",
    "application/json; charset=utf-999",
    "Basic " + "A" * 4000,
    "Bearer",
    "Bearer \xa0",
    "1" * 4400,
    "-1",
    "\t",
    "[",
    "]:99999",
    "localhost:port",
    "[::1]:1:2",
    "*/*;q=" + "9" * 300,
]  # fmt: skip
PARSED = [
    "Origin",
    "Host",
    "Content-Type",
    "Content-Encoding",
    "Authorization",
    "X-Api-Key",
    "X-Request-Id",
    "X-Forwarded-For",
    "X-Forwarded-Proto",
    "Forwarded",
    "X-Session-Id",
    "Accept",
    "Accept-Encoding",
    "Accept-Language",
    "Range",
    "Cookie",
    "If-None-Match",
    "If-Modified-Since",
    "Connection",
    "Content-Length",
    "Transfer-Encoding",
    "Expect",
    "Upgrade",
    "Access-Control-Request-Method",
    "Sec-WebSocket-Key",
    "TE",
]


@pytest.mark.parametrize("is_loopback", [True, False])
def test_no_header_is_a_fault(is_loopback: bool) -> None:
    """With a hostile value each, on routes that are there and others: refused or ignored, never a 500."""
    asked = [("GET", "/health"), ("GET", "/nowhere"), ("GET", "/v1/models/"), ("PUT", "/health"), ("OPTIONS", "/v1/x")]
    asked += [("GET", "/studio/x"), ("POST", "/v1/audio/transcriptions"), ("POST", "/tokenize"), ("HEAD", "/")]
    options: dict[str, Any] = {"origins": ["*"]} if not is_loopback else {}
    with RunningServer({"fake": make_fake_lm()}, is_loopback=is_loopback, body_seconds=0.2, **options) as running:
        for place, name in enumerate(PARSED):
            for number, value in enumerate(HOSTILE):
                method, path = asked[(place + number) % len(asked)]
                head = f"{method} {path} HTTP/1.1\r\n" + ("" if name == "Host" else "Host: localhost\r\n")
                head += f"{name}: {value}\r\nConnection: close\r\n\r\n"
                answer = send(running, head.encode("latin-1"))
                assert status_of(answer) < 500 or status_of(answer) == 501, (name, value, answer)


def test_a_form_of_a_hostile_type_is_refused(server: RunningServer) -> None:
    for kind in HOSTILE:
        head = f"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n"
        head += "Connection: close\r\nContent-Length: 7\r\n\r\n"
        assert status_of(send(server, head.encode("latin-1"), b"--x\r\n\r\n")) == 400, kind
