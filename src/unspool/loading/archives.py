"""What Python's readers of archives raise for damaged ones."""

from __future__ import annotations

import gzip
import lzma
import struct
import tarfile
import zipfile
import zlib
from typing import Final

# RuntimeError: an encrypted member; NotImplementedError is one: a way to compress that is not known.
UNPACKING: Final = (
    *(zipfile.BadZipFile, tarfile.TarError, gzip.BadGzipFile, zlib.error, lzma.LZMAError, struct.error),
    *(EOFError, RuntimeError, ValueError, OverflowError),
)
