"""Protobuf's wire format, as far as model files need it: the fields of a message, without a schema."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # how a field is written

Value = int | float | bytes


def read_fields(data: bytes) -> Iterator[tuple[int, Value]]:
    """The fields of a message: numbers, 32- and 64-bit floats, and bytes for texts and messages in it.

    Raises ValueError, IndexError or struct.error if `data` is no message.
    """
    place = 0
    while place < len(data):
        key, place = read_varint(data, place)
        number, form = key >> 3, key & 7
        if form == _VARINT:
            value, place = read_varint(data, place)
            yield number, value
        elif form == _BYTES:
            size, place = read_varint(data, place)
            if size > len(data) - place:
                raise ValueError("a field reaches past the end of the file")
            yield number, data[place : place + size]
            place += size
        elif form == _FIXED32:
            yield number, struct.unpack_from("<f", data, place)[0]
            place += 4
        elif form == _FIXED64:
            yield number, struct.unpack_from("<d", data, place)[0]
            place += 8
        else:
            raise ValueError(f"a field is written in the form {form}")


def read_varint(data: bytes, place: int) -> tuple[int, int]:
    """A number of up to 64 bits without a sign, and where it ends."""
    value = shift = 0
    while True:
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7
        if shift > 63:
            raise ValueError("a number has more than 64 bits")
