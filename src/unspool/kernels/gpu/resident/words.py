"""Numbers that programs of one kernel hand to each other, in Gluon: who reads one sees whether it is there yet.

A word has a 16-bit float above and a tag below, which tells one round of a kernel from the one before. So a reader
needs no barrier and no second load: it loads until all of its words have the tag of this round. All loads of a thread
are under way at once, because each of them takes as long as all.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from unspool.kernels.gpu.resident.vectors import count_all, count_each, count_kinds, find_first

LINE = gl.constexpr(32)  # words of a cache line: what many programs wait for is in lines of its own
_PAUSE = 40  # nanoseconds between loads of many words: they would keep the cache from being written


@gluon.constexpr_function
def _list_widths(hidden):
    """How many words of a state a thread has side by side, of its first part and of the rest."""
    return tuple(count_each(hidden, part) for part in range(count_kinds(hidden)))


@gluon.constexpr_function
def _write_waiting(widths, blocks, stride):
    """PTX that loads words until all of them have a tag, of each block some from each of the addresses, side by side.

    Operands: the words, block by block; the first block's addresses; the tag. Blocks are `stride` words apart.
    """
    count = blocks * sum(widths)
    lines = ["{", ".reg .pred missing;", ".reg .b32 apart, other;", "AGAIN:"]
    number = 0
    for block in range(blocks):
        for place, width in enumerate(widths):
            lines.append(_write_load(range(number, number + width), f"${count + place}+{4 * stride * block}"))
            number += width
    lines += _write_comparison([f"${number}" for number in range(count)], f"${count + len(widths)}")
    lines += ["@missing bra AGAIN;", "}"]
    return "\n".join(lines)


@gluon.constexpr_function
def _write_load(numbers, at):
    """PTX that loads some words side by side."""
    words = ", ".join(f"${number}" for number in numbers)
    kind = f"v{len(numbers)}.b32 {{{words}}}" if len(numbers) > 1 else f"b32 {words}"
    return f"ld.relaxed.gpu.global.{kind}, [{at}];"


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


@gluon.constexpr_function
def _list_kinds(count):
    return tuple([gl.int32] * count)


@gluon.jit
def wait_for_words(at, tags):
    """The floats at some addresses, one for each thread, once all have their tags."""
    words = gl.inline_asm_elementwise(
        _write_waiting((1,), 1, 0), _constrain(1, 1, 1), [at.to(gl.int64), tags],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    return take_float(words)


@gluon.jit
def _list_begins(at, thread, H: gl.constexpr):
    """Where a thread's words of the first part begin, and of the rest if there are some."""
    begins = ((at + thread * count_each(H, 0)).to(gl.int64),)
    if count_kinds(H) > 1:
        begins = begins + ((at + find_first(H) + thread * count_each(H, 1)).to(gl.int64),)
    return begins


@gluon.jit
def wait_for_states(at, tag, thread, H: gl.constexpr, BLOCKS: gl.constexpr):
    """A thread's numbers of as many states behind each other, once all are there."""
    COUNT: gl.constexpr = BLOCKS * count_all(H)
    words = gl.inline_asm_elementwise(
        _write_waiting(_list_widths(H), BLOCKS, H), _constrain(COUNT, count_kinds(H), 1),
        _list_begins(at, thread, H) + (tag + thread * 0,),
        dtype=_list_kinds(COUNT), is_pure=False, pack=1,
    )  # fmt: skip
    xs = ()
    for number in gl.static_range(COUNT):
        xs = xs + (take_float(words[number]),)
    return xs


@gluon.jit
def take_float(words):
    """The float of a word."""
    return (words >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)


@gluon.constexpr_function
def _write_waiting_for_parts(splits, widths, stride, weight_stride):
    """PTX for some words of each part, from each of the addresses some side by side, and the two words of the weight
    of what stands there.

    Operands: the parts' words; the parts' weights; addresses of the first part's words, then of its weights; the tag;
    how many parts there are. Parts are `stride` words apart, and their weights `weight_stride`.
    """
    count, kinds = sum(widths), len(widths)
    weights = splits * count
    at = weights + splits * kinds
    weights_at = at + kinds
    tag, used = f"${weights_at + kinds}", f"${weights_at + kinds + 1}"
    lines = ["{", ".reg .pred missing;", ".reg .b32 apart, other;"]
    halves = []
    for split in range(splits):  # a part that nobody writes weighs nothing
        lines += [f".reg .pred is_used{split};", f"setp.gt.s32 is_used{split}, {used}, {split};"]
        lines += [f"mov.b32 ${count * split + number}, {tag};" for number in range(count)]
        for kind in range(kinds):
            high, low = f"high{split}_{kind}", f"low{split}_{kind}"
            halves += [high, low]
            lines += [f".reg .b32 {high}, {low};", f"or.b32 {high}, {tag}, 0xff800000;", f"mov.b32 {low}, {tag};"]
    lines.append("AGAIN:")
    for split in range(splits):
        number = count * split
        for kind, width in enumerate(widths):
            load = _write_load(range(number, number + width), f"${at + kind}+{4 * stride * split}")
            words = f"{{high{split}_{kind}, low{split}_{kind}}}, [${weights_at + kind}+{4 * weight_stride * split}]"
            lines.append(f"@is_used{split} {load}")
            lines.append(f"@is_used{split} ld.relaxed.gpu.global.v2.b32 {words};")
            number += width
    lines += _write_comparison([*(f"${number}" for number in range(weights)), *halves], tag)
    lines += ["@!missing bra DONE;", f"nanosleep.u32 {_PAUSE};", "bra AGAIN;", "DONE:"]
    for split in range(splits):
        for kind in range(kinds):
            words = f"low{split}_{kind}, high{split}_{kind}"
            lines.append(f"prmt.b32 ${weights + kinds * split + kind}, {words}, 0x7632;")
    return "\n".join([*lines, "}"])


@gluon.jit
def wait_for_parts(
    values, weights, tag, used, thread, H: gl.constexpr, D: gl.constexpr, SPLITS: gl.constexpr
):  # fmt: skip
    """A thread's words of an attention's parts, and the logarithms of the parts' weights as whole numbers, of the first
    numbers and of the rest; from `used` on there are no parts."""
    KINDS: gl.constexpr = count_kinds(H)
    COUNT: gl.constexpr = SPLITS * (count_all(H) + KINDS)
    given = _list_begins(values, thread, H)
    for kind in gl.static_range(KINDS):
        head = (thread * count_each(H, kind) + kind * find_first(H)) // D
        given = given + ((weights + head * LINE).to(gl.int64),)
    return gl.inline_asm_elementwise(
        _write_waiting_for_parts(SPLITS, _list_widths(H), H, H // D * LINE), _constrain(COUNT, 2 * KINDS, 2),
        given + (tag + thread * 0, used + thread * 0),
        dtype=_list_kinds(COUNT), is_pure=False, pack=1,
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
