"""What `launching` has for Triton's kernels, for those in Gluon, Triton's lower language, which can't call them."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def let_next_start(PDL: gl.constexpr):
    """Let the kernel after this one start, up to where it waits."""
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def wait_for_input(PDL: gl.constexpr):
    """Wait until the kernel before has finished writing."""
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def ask_for(at, is_asked, PDL: gl.constexpr):
    """Prefetch the cache lines at some addresses into the L2 cache, without waiting."""
    if PDL:
        gl.inline_asm_elementwise(
            """{
            .reg .pred asked;
            setp.ne.s32 asked, $2, 0;
            @asked prefetch.global.L2 [$1];
            mov.b32 $0, 0;
            }""",
            "=r,l,r", [at.to(gl.int64), is_asked.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
