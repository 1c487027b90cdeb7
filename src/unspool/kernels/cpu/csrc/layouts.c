/* Matrices laid out as tiles, straight from where they are read: a file's blocks, or blocks in memory; and floats
 * rounded to blocks. Plain C, a row of a block at a time, with the bits of torch's operators in kernels/cpu/tiles.py and blocks.py. */
#include "internal.h"
#include "vector.h"

#define LEAST_SCALE 0x1p-24f /* the least positive float16 */
#define LEAST_SHARED 16384   /* blocks; fewer are laid out by the caller alone */

/* --- float16 ----------------------------------------------------------------------------------------------------- */
static uint16_t read_half(const uint8_t *p) {
    uint16_t half;
    memcpy(&half, p, sizeof half);
    return half;
}

/* The nearest float16, of two equally near ones the even; infinity from 65520 on. */
static uint16_t to_half(float number) {
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    const uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (size >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (size >= 0x38800000) return (uint16_t)(sign | ((size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13));
    float small;
    memcpy(&small, &size, sizeof small);
    const float steps = small * 0x1p24f; /* of the least float16: below 1024, exact */
    uint32_t whole = (uint32_t)steps;
    const float rest = steps - (float)whole;
    whole += rest > 0.5f || (rest == 0.5f && (whole & 1));
    return (uint16_t)(sign | whole);
}

static int is_infinite(uint16_t half) { return (half & 0x7fff) == 0x7c00; }
static int is_none(uint16_t half) { return (half & 0x7fff) > 0x7c00; }

static float widen(uint16_t half) { return is_infinite(half) ? (half >> 15 ? -INFINITY : INFINITY) : half_to_float(half); }

/* --- reading ----------------------------------------------------------------------------------------------------- */
/* 32 columns of a row. */
typedef struct {
    uint16_t scale, minimum;
    uint8_t codes[US_BLOCK];
} row_block;

/* 256 columns of a row. */
typedef struct {
    uint8_t header[18], codes[US_SUPER];
} row_super;

static const size_t stored_bytes[] = { /* of a block in a file; us_form */
    [US_STORED_Q8_0] = 34, [US_STORED_Q4_0] = 18, [US_STORED_Q4_1] = 20, [US_STORED_Q5_0] = 22,
    [US_STORED_Q5_1] = 24, [US_STORED_Q4_K] = 144, [US_STORED_Q5_K] = 176, [US_STORED_Q6_K] = 210};

static size_t count_header(int32_t kind) { return kind == US_K6 ? 18 : kind == US_Q5 ? 4 : 16; }

static void read_nibbles(const uint8_t *p, uint8_t *codes) {
    for (int i = 0; i < 16; i++) {
        codes[i] = p[i] & 15;
        codes[16 + i] = p[i] >> 4;
    }
}

static void add_fifth_bits(const uint8_t *p, uint8_t *codes) {
    uint32_t bits;
    memcpy(&bits, p, sizeof bits);
    for (int i = 0; i < US_BLOCK; i++) codes[i] |= (uint8_t)((bits >> i & 1) << 4);
}

/* The nearest block to 32 floats, as blocks.quantise_rows rounds. What is no number becomes 0. */
static void round_block(const float *x, int32_t kind, row_block *out) {
    float least = x[0], most = x[0], size = 0;
    for (int i = 0; i < US_BLOCK; i++) {
        const float positive = x[i] < 0 ? -x[i] : x[i];
        size = positive > size ? positive : size;
        least = x[i] < least ? x[i] : least;
        most = x[i] > most ? x[i] : most;
    }
    const int is_q8 = kind == US_Q8;
    const float low = is_q8 ? -127.0f : 0.0f, high = is_q8 ? 127.0f : 15.0f;
    out->scale = to_half(is_q8 ? size / 127.0f : (most - least) / 15.0f);
    out->minimum = is_q8 ? 0 : to_half(least);
    if (out->minimum == 0x8000) out->minimum = 0; /* of zeros with both signs either may be the least */
    const float scale = widen(out->scale), step = scale > LEAST_SCALE ? scale : LEAST_SCALE;
    const float from = is_q8 ? 0.0f : widen(out->minimum);
    for (int i = 0; i < US_BLOCK; i++) {
        float steps = (x[i] - from) / step;
        steps = steps >= low ? steps : steps == steps ? low : 0.0f;
        steps = steps <= high ? steps : high;
        out->codes[i] = (uint8_t)(int32_t)((steps + 0x1.8p23f) - 0x1.8p23f); /* the nearest whole number, or the even one */
    }
}

static void read_block(const us_rows *part, int64_t row, int64_t place, int64_t blocks, int32_t kind, row_block *out) {
    const int64_t at = row * blocks + place;
    const uint8_t *p = (const uint8_t *)part->data + (size_t)at * (part->form == US_CODES ? US_BLOCK : stored_bytes[part->form]);
    if (part->form == US_CODES) {
        memcpy(out->codes, p, US_BLOCK);
        if (kind == US_Q5) {
            out->scale = read_half(part->scales + 4 * at);
            out->minimum = read_half(part->scales + 4 * at + 2);
            return;
        }
        out->scale = read_half(part->scales + 2 * at);
        out->minimum = kind == US_Q4 ? read_half(part->minimums + 2 * at) : 0;
        return;
    }
    out->scale = read_half(p);
    out->minimum = 0;
    if (part->form == US_STORED_Q8_0) {
        memcpy(out->codes, p + 2, US_BLOCK);
        return;
    }
    read_nibbles(p + stored_bytes[part->form] - 16, out->codes);
    if (part->form == US_STORED_Q4_0) out->minimum = to_half(half_to_float(out->scale) * -8.0f);
    if (part->form == US_STORED_Q5_0) out->minimum = to_half(half_to_float(out->scale) * -16.0f);
    if (part->form == US_STORED_Q4_1 || part->form == US_STORED_Q5_1) out->minimum = read_half(p + 2);
    if (part->form == US_STORED_Q5_0 || part->form == US_STORED_Q5_1)
        add_fifth_bits(p + stored_bytes[part->form] - 20, out->codes);
    for (int i = 0; i < US_BLOCK && part->form == US_STORED_Q5_0 && kind == US_Q8; i++) out->codes[i] = (uint8_t)(out->codes[i] - 16);
}

static void read_super(const us_rows *part, int64_t row, int64_t place, int64_t supers, int32_t kind, row_super *out) {
    const int64_t at = row * supers + place;
    if (part->form == US_CODES) {
        memcpy(out->codes, (const uint8_t *)part->data + at * US_SUPER, US_SUPER);
        memcpy(out->header, part->scales + at * (int64_t)count_header(kind), count_header(kind));
        return;
    }
    const uint8_t *p = (const uint8_t *)part->data + (size_t)at * stored_bytes[part->form];
    if (kind == US_K6) { /* a half (128 values) is 64 bytes of nibbles and 32 bytes that hold four pairs of high bits each */
        memcpy(out->header, p + 192, 18);
        for (int half = 0; half < 2; half++)
            for (int i = 0; i < 128; i++) {
                const uint8_t nibble = p[64 * half + i % 64] >> (i < 64 ? 0 : 4) & 15;
                out->codes[128 * half + i] = (uint8_t)(nibble | (p[128 + 32 * half + i % 32] >> (2 * (i / 32)) & 3) << 4);
            }
        return;
    }
    memcpy(out->header, p, 16);
    const uint8_t *nibbles = p + (kind == US_K5 ? 48 : 16);
    for (int b = 0; b < 8; b++)
        for (int i = 0; i < US_BLOCK; i++) {
            uint8_t code = nibbles[32 * (b / 2) + i] >> (4 * (b % 2)) & 15;
            if (kind == US_K5) code |= (uint8_t)((p[16 + i] >> b & 1) << 4);
            out->codes[US_BLOCK * b + i] = code;
        }
}

/* --- writing ----------------------------------------------------------------------------------------------------- */
/* Low bits of 32 columns, two to a byte: groups of 4 columns, `row`'s place in each. */
static void write_nibbles(const uint8_t *codes, int row, uint8_t *to) {
    for (int g = 0; g < 4; g++)
        for (int c = 0; c < 4; c++) to[32 * g + 4 * row + c] = (uint8_t)((codes[4 * g + c] & 15) | codes[16 + 4 * g + c] << 4);
}

static void write_fifth_bits(const uint8_t *codes, int row, uint8_t *to) {
    for (int c = 0; c < 4; c++) {
        uint8_t bits = 0;
        for (int g = 0; g < 8; g++) bits |= (uint8_t)((codes[4 * g + c] >> 4) << g);
        to[4 * row + c] = bits;
    }
}

static void write_high_pairs(const uint8_t *codes, int row, uint8_t *to) {
    for (int part = 0; part < 2; part++)
        for (int c = 0; c < 4; c++) {
            uint8_t bits = 0;
            for (int i = 0; i < 4; i++) bits |= (uint8_t)((codes[4 * (2 * part + i % 2 + i / 2 * 4) + c] >> 4) << (2 * i));
            to[32 * part + 4 * row + c] = bits;
        }
}

static void write_block(const row_block *in, int32_t kind, int row, uint8_t *tile) {
    memcpy(tile + 2 * row, &in->scale, 2);
    if (kind == US_Q8) {
        for (int g = 0; g < 8; g++) memcpy(tile + 16 + 32 * g + 4 * row, in->codes + 4 * g, 4);
        return;
    }
    memcpy(tile + 16 + 2 * row, &in->minimum, 2);
    if (kind == US_Q5) write_fifth_bits(in->codes, row, tile + 32);
    write_nibbles(in->codes, row, tile + (kind == US_Q5 ? 64 : 32));
}

static void write_super(const row_super *in, int32_t kind, int row, uint8_t *tile) {
    const int halves = kind == US_K6 ? 1 : 2, scales = kind == US_K6 ? 16 : 12;
    const uint8_t *first = in->header + (kind == US_K6 ? 16 : 0), *packed = in->header + (kind == US_K6 ? 0 : 4);
    for (int i = 0; i < halves; i++) memcpy(tile + 16 * i + 2 * row, first + 2 * i, 2);
    tile += 16 * halves;
    for (int i = 0; i < scales; i++) tile[8 * i + row] = packed[i];
    tile += 8 * scales;
    for (int b = 0; b < 8; b++) {
        const uint8_t *codes = in->codes + US_BLOCK * b;
        if (kind == US_K5) write_fifth_bits(codes, row, tile), tile += 32;
        if (kind == US_K6) write_high_pairs(codes, row, tile), tile += 64;
        write_nibbles(codes, row, tile);
        tile += 128;
    }
}

/* --- calls ------------------------------------------------------------------------------------------------------- */
typedef struct {
    const us_rows *parts;
    const int64_t *order;
    int32_t rows, columns, kind;
    uint8_t *tiles;
} layout_task;

static void lay_out(const void *argument, int32_t thread, us_team *team) {
    const layout_task *task = argument;
    const int32_t kind = task->kind, is_super = kind >= US_K4 && kind <= US_K6;
    const int64_t units = task->columns / (is_super ? US_SUPER : US_BLOCK), num_tiles = (task->rows + US_TILE - 1) / US_TILE;
    const size_t bytes = is_super ? US_TILE * us_block_bytes(kind) : us_block_bytes(kind);
    for (int64_t t = num_tiles * thread / team->size; t < num_tiles * (thread + 1) / team->size; t++) {
        uint8_t *tile = task->tiles + (size_t)(t * units) * bytes;
        if ((t + 1) * US_TILE > task->rows) memset(tile, 0, (size_t)units * bytes); /* rows that are missing */
        for (int r = 0; r < US_TILE && t * US_TILE + r < task->rows; r++) {
            int64_t row = task->order ? task->order[t * US_TILE + r] : t * US_TILE + r;
            const us_rows *part = task->parts;
            for (; row >= part->rows; part++) row -= part->rows;
            for (int64_t u = 0; u < units; u++) {
                row_block block;
                row_super whole;
                if (is_super) {
                    read_super(part, row, u, units, kind, &whole);
                    write_super(&whole, kind, r, tile + (size_t)u * bytes);
                } else {
                    read_block(part, row, u, units, kind, &block);
                    write_block(&block, kind, r, tile + (size_t)u * bytes);
                }
            }
        }
    }
}

/* Few blocks are not worth waking others for. */
static void do_shared(us_task task, const void *argument, int64_t blocks, int32_t threads) {
    us_team alone = {.size = 1};
    if (blocks < LEAST_SHARED) {
        task(argument, 0, &alone);
        return;
    }
    us_gather(threads);
    us_do(task, argument);
}

void us_lay_out_rows(const us_rows *parts, const int64_t *order, int32_t rows, int32_t columns, int32_t kind, uint8_t *tiles,
                     int32_t threads) {
    const layout_task task = {parts, order, rows, columns, kind, tiles};
    do_shared(lay_out, &task, (int64_t)rows * columns / US_BLOCK, threads);
}

typedef struct {
    const float *numbers;
    int64_t blocks;
    int32_t kind;
    uint8_t *codes;
    uint16_t *scales, *minimums;
} quantise_task;

static void quantise(const void *argument, int32_t thread, us_team *team) {
    const quantise_task *task = argument;
    const int64_t last = task->blocks * (thread + 1) / team->size;
    for (int64_t b = task->blocks * thread / team->size; b < last; b++) {
        row_block made;
        round_block(task->numbers + b * US_BLOCK, task->kind, &made);
        memcpy(task->codes + b * US_BLOCK, made.codes, US_BLOCK);
        task->scales[b] = made.scale;
        if (task->minimums) task->minimums[b] = made.minimum;
    }
}

void us_quantise_rows(const float *numbers, int32_t rows, int32_t columns, int32_t kind, uint8_t *codes, uint16_t *scales,
                      uint16_t *minimums, int32_t threads) {
    const int64_t blocks = (int64_t)rows * (columns / US_BLOCK);
    do_shared(quantise, &(quantise_task){numbers, blocks, kind, codes, scales, minimums}, blocks, threads);
}

int32_t us_scan_rows(const uint8_t *data, int32_t form, int64_t count) {
    const int is_k = form >= US_STORED_Q4_K, is_last = form == US_STORED_Q6_K;
    const int num = form == US_STORED_Q4_1 || form == US_STORED_Q5_1 || (is_k && !is_last) ? 2 : 1;
    int32_t found = 0;
    for (int64_t i = 0; i < count; i++, data += stored_bytes[form])
        for (int n = 0; n < num; n++) {
            const uint16_t half = read_half(data + (is_last ? 208 : 2 * n));
            if (is_none(half)) found |= US_HAS_NAN;
            else if (form == US_STORED_Q5_0 && !is_infinite(half) && is_infinite(to_half(half_to_float(half) * 16.0f)))
                found |= US_OVERFLOWS;
            else if (form == US_STORED_Q5_1 && n && is_infinite(half) && !is_infinite(read_half(data))) found |= US_OVERFLOWS;
        }
    return found;
}
