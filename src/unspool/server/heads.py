"""The head of an HTTP/1.1 request, read within bounds before a parser sees it.

Whatever two readers could understand in two ways is refused, so that the parser behind finds the same end of the body.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

MOST_HEADERS: Final = 128
LONGEST_LINE: Final = 8192  # of the request line: the routes are short, and queries are not read
_LONGEST_COUNT: Final = 15  # digits of a Content-Length
_METHOD: Final = re.compile(rb"[A-Z][A-Z-]{0,31}")
_TARGET: Final = re.compile(rb"(?:/|https?://[A-Za-z0-9.:\[\]_-]+)[\x21-\x7e]*|\*")
_HEADER: Final = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,256}):([^\x00-\x08\x0a-\x1f\x7f]*)")
_UPGRADE: Final = b"upgrade"  # of which there is none here: the request is answered as it is


class HeadError(Exception):
    """A head that is refused."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Head:
    """One request's head, and how its body ends."""

    text: bytes  # as the parser behind gets it
    method: str
    path: str
    length: int = 0  # of the body, unless it is chunked
    is_chunked: bool = False


def check_line(data: bytes | bytearray) -> None:
    """Raise if a request line, of which these are the first bytes, can't be one."""
    line = bytes(data[: LONGEST_LINE + 2]).partition(b"\r\n")[0]
    if not re.match(rb"[A-Z-]{1,32}(?: |$)", line):
        raise HeadError(400, "this is no HTTP/1.1 request: it does not begin with a method")
    if len(line) > LONGEST_LINE:
        raise HeadError(414, f"the request line has more than {LONGEST_LINE} bytes; send the fields as a JSON body")


def read_head(data: bytes) -> Head:
    """A head that ends with an empty line, which is left out of `data`; raises HeadError."""
    first, *lines = data.split(b"\r\n")
    check_line(first)
    method, path, version = _read_line(first)
    if len(lines) > MOST_HEADERS:
        raise HeadError(431, f"the request has more than {MOST_HEADERS} header lines")
    kept, found = [first], dict[bytes, bytes]()
    for line in lines:
        name, value = _read_header(line)
        if name in (b"host", b"content-length", b"transfer-encoding", b"expect"):
            if name in found:
                raise HeadError(400, f"the request has two {name.decode()} headers")
            found[name] = value
        if name != _UPGRADE:
            kept.append(line)
    if version == b"1.1" and b"host" not in found:
        raise HeadError(400, "the request has no Host header, which HTTP/1.1 demands")
    if b"expect" in found and found[b"expect"].lower() != b"100-continue":
        raise HeadError(417, "the Expect header has 100-continue alone")
    length, is_chunked = _read_framing(found, version)
    text = b"\r\n".join(kept) + b"\r\n\r\n"
    return Head(text, method.decode(), path.partition(b"?")[0].decode(), length, is_chunked)


def _read_line(line: bytes) -> tuple[bytes, bytes, bytes]:
    parts = line.split(b" ")
    if len(parts) != 3 or not _METHOD.fullmatch(parts[0]) or not _TARGET.fullmatch(parts[1]):
        raise HeadError(400, "the request line is not METHOD /path HTTP/1.1")
    if parts[0] == b"CONNECT":
        raise HeadError(405, "this server is no proxy")
    if parts[2] not in (b"HTTP/1.1", b"HTTP/1.0"):
        raise HeadError(505, "this server speaks HTTP/1.1")
    return parts[0], parts[1], parts[2][5:]


def _read_header(line: bytes) -> tuple[bytes, bytes]:
    found = _HEADER.fullmatch(line)
    if found is None:
        raise HeadError(400, "a header line is not `name: value` of printable characters")
    return found[1].lower(), found[2].strip(b" \t")


def _read_framing(found: dict[bytes, bytes], version: bytes) -> tuple[int, bool]:
    """How long the body is, and whether it comes in chunks."""
    length, coding = found.get(b"content-length"), found.get(b"transfer-encoding")
    if coding is not None:
        if coding.lower() != b"chunked":
            raise HeadError(501, "a body's Transfer-Encoding is chunked, or there is none")
        if length is not None or version == b"1.0":
            raise HeadError(400, "a chunked body has no Content-Length, and is of HTTP/1.1")
        return 0, True
    if length is None:
        return 0, False
    if not length.isdigit() or len(length) > _LONGEST_COUNT:
        raise HeadError(400, "the Content-Length is not a number of bytes")
    return int(length), False


class ChunkReader:
    """The data of a chunked body, without the framing, within bounds of it."""

    _LONGEST_SIZE: Final = 256  # of a chunk's size, with its extensions
    _LONGEST_TRAILER: Final = 4096  # which is read by nothing
    _MOST_CHUNKS: Final = 4096  # and one more for every 16 bytes

    def __init__(self) -> None:
        self._line = bytearray()
        self._left = 0  # of the chunk
        self._state = "size"  # "data", "gap" behind the data, "trailer", "end"
        self._trailer = 0
        self._num_chunks, self._num_bytes = 0, 0

    @property
    def is_done(self) -> bool:
        """Whether the body has ended."""
        return self._state == "end"

    def read(self, data: memoryview) -> tuple[list[bytes], int]:
        """Pieces of the body, and how many bytes of `data` belong to it; raises HeadError."""
        pieces, at = list[bytes](), 0
        while at < len(data) and not self.is_done:
            if self._state == "data":
                piece = bytes(data[at : at + self._left])
                pieces.append(piece)
                at += len(piece)
                self._left -= len(piece)
                if not self._left:
                    self._state = "gap"
            else:
                at += self._read_line(data[at:])
        return pieces, at

    def _read_line(self, data: memoryview) -> int:
        """Read a line as far as it is there, and what it says if it is whole; the bytes that were taken."""
        most = self._LONGEST_TRAILER if self._state == "trailer" else self._LONGEST_SIZE
        held = len(self._line)
        self._line += data[: most + 2 - min(held, most)]
        end = self._line.find(b"\r\n", max(0, held - 1))
        if self._state == "gap" and not self._line.startswith(b"\r\n"[: len(self._line)]):
            raise HeadError(400, "a chunk is longer than its size")
        if end < 0:
            if len(self._line) > most:
                raise HeadError(400, "a chunk's size or the trailers are too long")
            return len(self._line) - held
        line, self._line = bytes(self._line[:end]), bytearray()
        self._take_line(line)
        return end + 2 - held

    def _take_line(self, line: bytes) -> None:
        if self._state == "size":
            size = line.partition(b";")[0].strip(b" \t")
            if not re.fullmatch(rb"[0-9A-Fa-f]{1,12}", size):
                raise HeadError(400, "a chunk does not begin with its size")
            self._left = int(size, 16)
            self._num_chunks += 1
            self._num_bytes += self._left
            if self._num_chunks > self._MOST_CHUNKS + self._num_bytes // 16:
                raise HeadError(400, "the body comes in too many chunks of a few bytes; send larger ones")
            self._state = "data" if self._left else "trailer"
        elif self._state == "gap":
            self._state = "size"
        else:
            self._trailer += len(line)
            if self._trailer > self._LONGEST_TRAILER:
                raise HeadError(431, "the trailers are too long")
            if not line:
                self._state = "end"
