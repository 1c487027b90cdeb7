"""Pictures are opened within bounds, whatever their files say."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("PIL", reason="Pillow decodes pictures")

from PIL import Image

from tests.pictures.files import encode_picture, make_bomb, make_picture, make_uri
from unspool.errors import InputError
from unspool.pictures import Limits, open_picture, take_pictures
from unspool.pictures.chats import has_pictures

PICTURE = make_picture()


def read(source: Any, **limits: Any) -> np.ndarray:
    return np.asarray(open_picture(source, Limits(**limits)))


def test_sources_of_every_kind(tmp_path: Path) -> None:
    content = encode_picture(PICTURE)
    (tmp_path / "a.png").write_bytes(content)
    sources = [
        *(tmp_path / "a.png", str(tmp_path / "a.png"), content, bytearray(content), io.BytesIO(content)),
        *(make_uri(content), PICTURE, torch.from_numpy(PICTURE), Image.fromarray(PICTURE)),
    ]
    for source in sources:
        assert (read(source) == PICTURE).all()


@pytest.mark.parametrize("kind", ("PNG", "JPEG", "WEBP", "GIF"))
def test_formats(kind: str) -> None:
    assert read(encode_picture(PICTURE, kind)).shape == PICTURE.shape


def test_colours_and_turns_are_settled() -> None:
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # it was taken with the camera on its side
    Image.fromarray(PICTURE).save(file, "JPEG", exif=exif)
    assert read(file.getvalue()).shape == (60, 40, 3)
    grey = io.BytesIO()
    Image.fromarray(PICTURE[:, :, 0]).save(grey, "PNG")
    assert read(grey.getvalue()).shape == PICTURE.shape


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (make_bomb(), "too many pixels|million"),
        (make_bomb(9_000), "9000 × 9000 pixels"),
        (encode_picture(PICTURE)[:200], "damaged"),
        (encode_picture(PICTURE, "BMP"), "no picture in a format that is read"),
        (b"what is this?", "no picture in a format that is read"),
        (b"", "no bytes"),
        (make_picture(0, 2, 300), "100 times as long"),
        (PICTURE.astype(np.float32), "uint8"),
        (PICTURE[:, :, 0], "uint8"),
        ("data:image/png;base64,@@@", "not base64"),
        ("data:image/png,abc", "base64,…"),
        ("data:text/plain;base64,aGVsbG8=", "no picture"),
        ("/there/is/none.png", "there is none"),
        ("/dev/zero", "not a regular file"),
        ("https://example.com/a.png", "nothing is fetched from there"),
        ("http://127.0.0.1/a.png", "nothing is fetched from there"),
        ("file:///etc/passwd", "nothing is fetched from there"),
        (None, "give a path"),
        (3, "give a path"),
    ],
)
def test_what_is_no_picture_is_refused(source: Any, why: str) -> None:
    with pytest.raises(InputError, match=why):
        read(source)


def test_bounds() -> None:
    content = encode_picture(PICTURE)
    with pytest.raises(InputError, match="more than 0 MiB"):
        read(content, num_bytes=len(content) - 1)
    with pytest.raises(InputError, match="more than 0 MiB"):
        read(make_uri(content), num_bytes=len(content) - 10)
    with pytest.raises(InputError, match="at most 0 million"):
        read(content, num_pixels=100)
    assert read(content, num_bytes=len(content), num_pixels=2400).shape == PICTURE.shape


def test_pictures_of_chats() -> None:
    content = encode_picture(PICTURE)
    text = base64.b64encode(content).decode()
    forms: list[dict[str, Any]] = [
        {"type": "image", "image": PICTURE},
        {"type": "image", "url": make_uri(content)},
        {"type": "image", "base64": text},
        {"type": "image_url", "image_url": {"url": make_uri(content)}},
        {"type": "input_image", "image_url": make_uri(content)},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": text}},
    ]
    for part in forms:
        chat = [{"role": "user", "content": [part, {"type": "text", "text": "what?"}]}]
        found = take_pictures(chat)
        assert has_pictures(chat) and found.messages[0]["content"] == [
            {"type": "image"},
            {"type": "text", "text": "what?"},
        ]
        assert (np.asarray(found.pictures[0]) == PICTURE).all()
        assert chat[0]["content"][0] is part  # the caller's messages stay as they are
    assert not has_pictures([{"role": "user", "content": "hello"}]) and not has_pictures("hello")


@pytest.mark.parametrize("part", [{}, {"url": "a", "path": "b"}, {"source": {"type": "base64"}}, {"image_url": {}}])
def test_a_part_without_one_source_is_refused(part: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"messages\[0\].content\[0\] is a picture"):
        take_pictures([{"role": "user", "content": [{"type": "image", **part}]}])


def test_a_chat_has_a_bounded_number_of_pictures() -> None:
    chat = [{"role": "user", "content": [{"type": "image", "image": PICTURE}] * 3}]
    with pytest.raises(InputError, match="3 pictures; at most 2"):
        take_pictures(chat, Limits(num_pictures=2))
