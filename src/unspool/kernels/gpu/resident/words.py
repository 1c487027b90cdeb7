"""Numbers that programs of one kernel hand to each other, in Gluon: who reads one sees whether it is there yet.

A word has a 16-bit float above and a tag below, which tells one round of a kernel from the one before. So a reader
needs no barrier and no second load: it loads until all of its words have the tag of this round. All loads of a thread
are under way at once, because each of them takes as long as all.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LINE = gl.constexpr(32)  # words of a cache line: what many programs wait for is in lines of its own
_PAUSE = 40  # nanoseconds between loads of many words: they would keep the cache from being written


@gluon.constexpr_function
def _write_waiting(count, vector):
    """PTX that loads `count` words by vectors until all of them have a tag: ($0 … words, addresses, tags)."""
    lines = ["{", ".reg .pred missing;", ".reg .b32 apart, other;", "AGAIN:"]
    for first in range(0, count, vector):
        words = ", ".join(f"${number}" for number in range(first, first + vector))
        kind = f"v{vector}.b32 {{{words}}}" if vector > 1 else f"b32 {words}"
        lines.append(f"ld.relaxed.gpu.global.{kind}, [${count + first}];")
    lines += _write_comparison([f"${number}" for number in range(count)], f"${2 * count}")
    lines += ["@missing bra AGAIN;", "}"]
    return "\n".join(lines)


@gluon.constexpr_function
def _write_comparison(words, tag):
    """PTX that finds whether a word's tag is another one."""
    lines = [f"xor.b32 apart, {words[0]}, {tag};"]
    for word in words[1:]:
        lines += [f"xor.b32 other, {word}, {tag};", "or.b32 apart, apart, other;"]
    return [*lines, "and.b32 apart, apart, 0xffff;", "setp.ne.u32 missing, apart, 0;"]


@gluon.constexpr_function
def _constrain(outputs, addresses, numbers):
    return ",".join(["=&r"] * outputs + ["l"] * addresses + ["r"] * numbers)


@gluon.jit
def wait_for_words(at, tags, COUNT: gl.constexpr, VECTOR: gl.constexpr):
    """The floats at some addresses, once all have their tags; a thread has `COUNT` of them, `VECTOR` side by side."""
    words = gl.inline_asm_elementwise(
        _write_waiting(COUNT, VECTOR), _constrain(COUNT, COUNT, COUNT), [at.to(gl.int64), tags],
        dtype=gl.int32, is_pure=False, pack=COUNT,
    )  # fmt: skip
    return take_float(words)


@gluon.jit
def take_float(words):
    """The float of a word."""
    return (words >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)


@gluon.constexpr_function
def _write_waiting_for_parts(splits, each):
    """PTX for some words of each part, side by side, and the two words of its weight.

    Operands, as many of each as a thread has words of a part: the parts' words; the parts' weights; addresses of the
    words, then of the weights; tags; how many parts there are.
    """
    weights, at, weights_at, tags = (number * splits * each for number in range(1, 5))
    tag, used = f"${tags}", f"${tags + each}"
    lines = ["{", ".reg .pred missing;", ".reg .b32 apart, other;"]
    for split in range(splits):  # a part that nobody writes weighs nothing
        lines += [f".reg .pred is_used{split};", f".reg .b32 high{split}, low{split};"]
        lines += [f"setp.gt.s32 is_used{split}, {used}, {split};"]
        lines += [f"mov.b32 ${each * split + number}, {tag};" for number in range(each)]
        lines += [f"or.b32 high{split}, {tag}, 0xff800000;", f"mov.b32 low{split}, {tag};"]
    lines.append("AGAIN:")
    for split in range(splits):
        words = ", ".join(f"${each * split + number}" for number in range(each))
        lines.append(f"@is_used{split} ld.relaxed.gpu.global.v{each}.b32 {{{words}}}, [${at + each * split}];")
        words = f"{{high{split}, low{split}}}, [${weights_at + each * split}]"
        lines.append(f"@is_used{split} ld.relaxed.gpu.global.v2.b32 {words};")
    halves = [f"{half}{split}" for split in range(splits) for half in ("high", "low")]
    lines += _write_comparison([*(f"${number}" for number in range(each * splits)), *halves], tag)
    lines += ["@!missing bra DONE;", f"nanosleep.u32 {_PAUSE};", "bra AGAIN;", "DONE:"]
    for split in range(splits):
        for number in range(each):
            lines.append(f"prmt.b32 ${weights + each * split + number}, low{split}, high{split}, 0x7632;")
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _constrain_parts(splits, each):
    count = splits * each
    return ",".join(["=&r"] * count + ["=&r"] * count + ["l"] * 2 * count + ["r"] * 2 * each)


@gluon.constexpr_function
def _list_kinds(splits):
    return tuple([gl.int32] * 2 * splits)


@gluon.jit
def wait_for_parts(values, weights, tags, used, SPLITS: gl.constexpr, EACH: gl.constexpr):
    """The words of an attention's parts, of which a thread has `EACH` side by side, and the logarithms of the parts'
    weights as whole numbers; `values` and `weights`: their addresses, by part; from `used` on there are no parts."""
    given = ()
    for split in gl.static_range(SPLITS):
        given = given + (values[split].to(gl.int64),)
    for split in gl.static_range(SPLITS):
        given = given + (weights[split].to(gl.int64),)
    return gl.inline_asm_elementwise(
        _write_waiting_for_parts(SPLITS, EACH), _constrain_parts(SPLITS, EACH), given + (tags, used),
        dtype=_list_kinds(SPLITS), is_pure=False, pack=EACH,
    )  # fmt: skip


@gluon.constexpr_function
def _write_holding(cycles):
    return f"""{{
        .reg .pred is_early;
        .reg .b32 begin, now;
        mov.u32 begin, %clock;
        LONGER:
        mov.u32 now, %clock;
        sub.u32 now, now, begin;
        setp.lt.u32 is_early, now, {cycles};
        @is_early bra LONGER;
        mov.b32 $0, 0;
        }}"""


@gluon.jit
def hold_back(CYCLES: gl.constexpr):
    """Do nothing for a while: who asks before words can be there sees later that they are than by a first question."""
    gl.inline_asm_elementwise(_write_holding(CYCLES), "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def put_words(at, x, tag, mask):
    """Write floats, rounded to 16 bits, with their tag."""
    _put((x.to(gl.bfloat16).to(gl.int16, bitcast=True).to(gl.int32) << 16) | tag, at, mask)


@gluon.jit
def put_weight(at, x, tag, mask):
    """Write a float32 in two words."""
    bits = x.to(gl.int32, bitcast=True)
    _put((bits & -65536) | tag, at, mask)
    _put((bits << 16) | tag, at + 1, mask)


@gluon.jit
def find_logarithm(x):
    """The natural logarithm, by the instruction for one to base 2."""
    two = gl.inline_asm_elementwise(
        "lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )  # fmt: skip
    return two * 0.6931471805599453


@gluon.jit
def _put(word, at, mask):
    gl.inline_asm_elementwise(
        """{
        .reg .pred is_put;
        setp.ne.s32 is_put, $3, 0;
        @is_put st.relaxed.gpu.global.b32 [$2], $1;
        mov.b32 $0, 0;
        }""",
        "=r,r,l,r", [word, at.to(gl.int64), mask.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
