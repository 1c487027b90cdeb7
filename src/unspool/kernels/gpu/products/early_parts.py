"""What kernels in Gluon share: Gluon can't call functions of Triton's language."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def let_next_start(PDL: gl.constexpr):
    """As `launching.let_next_start`."""
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def wait_for_input(PDL: gl.constexpr):
    """As `launching.wait_for_input`."""
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _sigmoid(x):
    return 1.0 / (1.0 + gl.exp(-x))


@gluon.jit
def activate(x, CODE: gl.constexpr):
    """As `activations.activate`."""
    if CODE == 1:
        x = x * _sigmoid(x)
    elif CODE == 2:
        x = gl.maximum(x, 0.0)
    elif CODE == 3:
        x = 0.5 * x * (1.0 + gl.erf(x * 0.7071067811865476))
    elif CODE == 4:
        x = x * _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif CODE == 5:
        x = x * _sigmoid(1.702 * x)
    elif CODE == 6:
        x = gl.maximum(x, 0.0)
        x = x * x
    return x
