"""What a captured pass is made for: numbers that calls differ in are told to it, forms are not."""

from __future__ import annotations

from unspool.kernels.readings import Contrast, Guide
from unspool.models.paths.captured_shape import PassShape


def test_guidance_of_any_scale_is_one_graph() -> None:
    shapes = {PassShape(rows=2, epilogue=Guide(scale).key) for scale in (0.5, 1.5, -3.0)}
    assert len(shapes) == 1


def test_other_forms_are_other_graphs() -> None:
    readings = (Guide(1.5), Contrast(by_row=True), Contrast(by_row=False), Contrast(by_row=False, relative_top=0.2))
    shapes = {PassShape(rows=2, epilogue=reading.key) for reading in readings}
    assert len(shapes) == 4
    assert PassShape(rows=2, epilogue="contest") != PassShape(rows=2)
