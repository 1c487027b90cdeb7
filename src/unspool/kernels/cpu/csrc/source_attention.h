/* Attention of all tokens of a source over all of them, as encoders have it. Included by kernels.c.
 *
 * Queries stand side by side in two vectors, so that a score's maximum and sum are those of vectors too: scores (keys, queries) are
 * a product of keys and turned queries, and what is read (numbers of a head, queries) is one of turned values and weights. In both
 * a few numbers of one side meet the vectors of the other in registers. A token's sums have one order, whatever else is in the call.
 */
#ifndef UNSPOOL_SOURCE_ATTENTION_H
#define UNSPOOL_SOURCE_ATTENTION_H

/* Tokens that see all tokens of their own source, which lie one behind the other, and what they read. */
typedef struct {
    const float *qkv;       /* of a token: its queries, keys and values, (heads, width) each */
    float *read;            /* (tokens, heads, width) */
    const int32_t *lengths; /* num_sources */
    const float *biases;    /* (heads, 2 * num_places - 1): of a score, by how far the key lies behind, from the farthest ahead on; or NULL */
    int32_t num_sources, num_heads, width, num_places;
    float scale;
} token_sources;

#define BESIDE (2 * LANES) /* queries of a block */
#define FEW_KEYS 128       /* that they meet before what they have read is rescaled */
#define KEYS_AHEAD 8       /* keys before one is laid out, it is asked for */
#if defined(US_AVX512) /* with two vectors of each, and what they are made of, these fill the registers */
#define SCORED 12 /* keys that meet the queries at once */
#define SUMMED 8  /* numbers of values */
#elif defined(__aarch64__)
#define SCORED 8
#define SUMMED 8
#else
#define SCORED 6
#define SUMMED 6
#endif

/* One head of a source, as a thread has laid it out, and a block of its queries. */
typedef struct {
    float *keys, *values;           /* (count, width), whole SCORED; (count, padded) */
    float *biases;                  /* by how far a key lies behind, from the farthest ahead on */
    float *queries, *scores, *read; /* (width, BESIDE), (FEW_KEYS, BESIDE), (padded, BESIDE) */
    int32_t count, width, padded;   /* keys; numbers of a head, and the same as whole SUMMED */
} source_head;

INLINE int32_t round_to(int32_t count, int32_t unit) { return (count + unit - 1) / unit * unit; }

static source_head lay_room(const token_sources *s, int32_t count, float *room) {
    const int32_t D = s->width, padded = round_to(D, SUMMED);
    source_head h = {.queries = room, .count = count, .width = D, .padded = padded};
    h.scores = h.queries + (size_t)D * BESIDE;
    h.read = h.scores + FEW_KEYS * BESIDE;
    h.keys = h.read + (size_t)padded * BESIDE;
    h.values = h.keys + (size_t)round_to(count, SCORED) * (size_t)D;
    h.biases = h.values + (size_t)count * (size_t)padded;
    return h;
}

/* Lay a head's keys, values and biases out; `qkv` is its first token's query. */
static void lay_head(const token_sources *s, const float *qkv, int32_t head, source_head *h) {
    const size_t D = (size_t)h->width, width = (size_t)s->num_heads * D, padded = (size_t)h->padded, count = (size_t)h->count;
    for (size_t j = 0; j < count; j++) {
        const float *key = qkv + j * 3 * width + width;
        for (size_t i = 0; i < 2 * D && j + KEYS_AHEAD < count; i += US_LINE / 4) __builtin_prefetch(key + KEYS_AHEAD * 3 * width + (i < D ? i : width + i - D));
        memcpy(h->keys + j * D, key, sizeof(float) * D);
        memcpy(h->values + j * padded, key + width, sizeof(float) * D);
        for (size_t i = D; i < padded; i++) h->values[j * padded + i] = 0;
    }
    memset(h->keys + count * D, 0, sizeof(float) * ((size_t)round_to(h->count, SCORED) - count) * D);
    if (!s->biases) return;
    const size_t places = (size_t)s->num_places, all = 2 * count - 1;
    memcpy(h->biases, s->biases + (size_t)head * (2 * places - 1) + places - count, sizeof(float) * all);
    memset(h->biases + all, 0, sizeof(float) * BESIDE); /* of queries that are not there */
}

/* The first two numbers of a and b in turns, and the others. GCC before 12 has no shufflevector. */
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define FIRST_TWO(a, b) __builtin_shufflevector(a, b, 0, 4, 1, 5)
#define LAST_TWO(a, b) __builtin_shufflevector(a, b, 2, 6, 3, 7)
#endif
#endif
#if !defined(FIRST_TWO)
#define FIRST_TWO(a, b) ((quad){(a)[0], (b)[0], (a)[1], (b)[1]})
#define LAST_TWO(a, b) ((quad){(a)[2], (b)[2], (a)[3], (b)[3]})
#endif

/* Turn four rows of four numbers into columns. */
INLINE void turn_four(const float *from, size_t from_stride, float scale, float *to, size_t to_stride) {
    quad a[4], b[4];
    UNROLLED for (int k = 0; k < 4; k++) memcpy(a + k, from + (size_t)k * from_stride, sizeof *a);
    UNROLLED for (int k = 0; k < 2; k++) b[2 * k] = FIRST_TWO(a[k], a[k + 2]) * scale, b[2 * k + 1] = LAST_TWO(a[k], a[k + 2]) * scale;
    UNROLLED for (int k = 0; k < 2; k++) a[2 * k] = FIRST_TWO(b[k], b[k + 2]), a[2 * k + 1] = LAST_TWO(b[k], b[k + 2]);
    UNROLLED for (int k = 0; k < 4; k++) memcpy(to + (size_t)k * to_stride, a + k, sizeof *a);
}

/* Turn rows of numbers into columns: row by row of those that lie far apart. */
INLINE void turn(const float *from, size_t from_stride, int32_t rows, int32_t columns, const int by_column, float scale, float *to,
                 size_t to_stride) {
    const int32_t few = rows & ~3, some = columns & ~3;
    if (by_column)
        for (int32_t i = 0; i < some; i += 4)
            for (int32_t row = 0; row < few; row += 4)
                turn_four(from + (size_t)row * from_stride + i, from_stride, scale, to + (size_t)i * to_stride + row, to_stride);
    else
        for (int32_t row = 0; row < few; row += 4)
            for (int32_t i = 0; i < some; i += 4)
                turn_four(from + (size_t)row * from_stride + i, from_stride, scale, to + (size_t)i * to_stride + row, to_stride);
    for (int32_t row = 0; row < rows; row++)
        for (int32_t i = row < few ? some : 0; i < columns; i++)
            to[(size_t)i * to_stride + (size_t)row] = from[(size_t)row * from_stride + (size_t)i] * scale;
}

/* Add products of M rows of numbers and `depth` pairs of vectors. The rows lie `apart`, and a row's numbers `step`. */
INLINE void add_products(const float *rows, const size_t apart, const size_t step, const int M, const float *pairs, int32_t depth,
                         vec (*total)[2]) {
    for (int32_t k = 0; k < depth; k++, pairs += BESIDE, rows += step) {
        const vec first = load(pairs), second = load(pairs + LANES);
        UNROLLED for (int m = 0; m < M; m++) {
            const float number = rows[(size_t)m * apart];
            total[m][0] += first * number;
            total[m][1] += second * number;
        }
    }
}

/* The queries' scores with keys from `begin` on. */
INLINE void score_keys_of(const source_head *h, const int32_t D, int32_t begin, int32_t count) {
    for (int32_t j = 0; j < count; j += SCORED) {
        vec made[SCORED][2];
        UNROLLED for (int m = 0; m < SCORED; m++) made[m][0] = made[m][1] = fill(0);
        add_products(h->keys + (size_t)(begin + j) * (size_t)D, (size_t)D, 1, SCORED, h->queries, D, made);
        UNROLLED for (int m = 0; m < SCORED; m++)
            UNROLLED for (int half = 0; half < 2; half++)
                if (j + m < FEW_KEYS) store(h->scores + (j + m) * BESIDE + half * LANES, made[m][half]);
    }
}

/* e to the x, of which none is above zero; below -87 it is e to that. The nearest whole number is the low bits of a float so
 * large that it has no others. N vectors side by side, as in vector.h. */
INLINE void falling_exponentials(vec *x, const int N) {
    static const float factors[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
    vec n[4], r[4], p[4];
    UNROLLED for (int i = 0; i < N; i++) x[i] = larger(x[i], fill(-87.0f));
    UNROLLED for (int i = 0; i < N; i++) n[i] = x[i] * 1.44269504f + 12582912.0f;
    UNROLLED for (int i = 0; i < N; i++) {
        const vec whole = n[i] - 12582912.0f;
        r[i] = x[i] - whole * 0.693359375f;
        r[i] = r[i] + whole * 2.12194440e-4f;
        p[i] = fill(1.9875691500e-4f);
    }
    UNROLLED for (int k = 0; k < 5; k++)
        UNROLLED for (int i = 0; i < N; i++) p[i] = p[i] * r[i] + factors[k];
    UNROLLED for (int i = 0; i < N; i++) p[i] = p[i] * (r[i] * r[i]) + (r[i] + 1.0f);
    UNROLLED for (int i = 0; i < N; i++) x[i] = as_floats(as_bits(p[i]) + (as_bits(n[i]) << 23));
}

/* Turn the scores of some keys into weights beside the highest score so far, and say how what was read before them fades. */
static void weigh_keys_of(const source_head *h, int32_t count, const float *biases, vec *most, vec *total, vec *fades) {
    vec highest[2] = {most[0], most[1]};
    for (int32_t j = 0; j < count; j++)
        UNROLLED for (int half = 0; half < 2; half++) {
            float *scores = h->scores + j * BESIDE + half * LANES;
            vec s = load(scores);
            if (biases) {
                s += load(biases - j + half * LANES);
                store(scores, s);
            }
            highest[half] = larger(highest[half], s);
        }
    for (int half = 0; half < 2; half++) {
        highest[half] = choose(highest[half] > fill(-INFINITY), highest[half], fill(-1e30f)); /* never a difference of infinities */
        fades[half] = most[half] - highest[half];
        most[half] = highest[half];
    }
    falling_exponentials(fades, 2);
    vec sums_of[2] = {total[0] * fades[0], total[1] * fades[1]};
    int32_t j = 0;
    for (; j + 2 <= count; j += 2) {
        vec e[4];
        UNROLLED for (int i = 0; i < 4; i++) e[i] = load(h->scores + j * BESIDE + i * LANES) - highest[i % 2];
        falling_exponentials(e, 4);
        UNROLLED for (int i = 0; i < 4; i++) {
            store(h->scores + j * BESIDE + i * LANES, e[i]);
            sums_of[i % 2] += e[i];
        }
    }
    for (; j < count; j++)
        for (int half = 0; half < 2; half++) {
            vec e = load(h->scores + j * BESIDE + half * LANES) - highest[half];
            falling_exponentials(&e, 1);
            store(h->scores + j * BESIDE + half * LANES, e);
            sums_of[half] += e;
        }
    total[0] = sums_of[0], total[1] = sums_of[1];
}

/* Add what is read of some keys' values to what was read before. */
static void sum_values_of(const source_head *h, int32_t begin, int32_t count, const vec *fades) {
    const size_t padded = (size_t)h->padded;
    for (int32_t i = 0; i < h->padded; i += SUMMED) {
        vec made[SUMMED][2];
        float *read = h->read + i * BESIDE;
        UNROLLED for (int m = 0; m < SUMMED; m++)
            UNROLLED for (int half = 0; half < 2; half++) made[m][half] = load(read + m * BESIDE + half * LANES) * fades[half];
        add_products(h->values + (size_t)begin * padded + i, 1, padded, SUMMED, h->scores, count, made);
        UNROLLED for (int m = 0; m < SUMMED; m++)
            UNROLLED for (int half = 0; half < 2; half++) store(read + m * BESIDE + half * LANES, made[m][half]);
    }
}

/* A block of queries from `first` on over all keys. */
static void read_head(const token_sources *s, const source_head *h, const float *qkv, int32_t first, float *out) {
    const size_t D = (size_t)h->width, width = (size_t)s->num_heads * D;
    const int32_t left = h->count - first, num = left < BESIDE ? left : BESIDE;
    for (int32_t m = BESIDE; m < 2 * BESIDE && m < left; m++) /* the next block's queries */
        for (size_t i = 0; i < D; i += US_LINE / 4) __builtin_prefetch(qkv + (size_t)(first + m) * 3 * width + i, 0, 2);
    vec most[2] = {fill(-INFINITY), fill(-INFINITY)}, total[2] = {fill(0), fill(0)}, fades[2];
    if (num < BESIDE) memset(h->queries, 0, sizeof(float) * D * BESIDE);
    turn(qkv + (size_t)first * 3 * width, 3 * width, num, h->width, 0, s->scale, h->queries, BESIDE);
    memset(h->read, 0, sizeof(float) * (size_t)h->padded * BESIDE);
    for (int32_t begin = 0; begin < h->count; begin += FEW_KEYS) {
        const int32_t count = h->count - begin < FEW_KEYS ? h->count - begin : FEW_KEYS;
        if (D == 64) score_keys_of(h, 64, begin, count);
        else score_keys_of(h, h->width, begin, count);
        weigh_keys_of(h, count, s->biases ? h->biases + h->count - 1 + first - begin : NULL, most, total, fades);
        sum_values_of(h, begin, count, fades);
    }
    for (int32_t i = 0; i < h->width; i++)
        for (int half = 0; half < 2; half++) {
            float *read = h->read + i * BESIDE + half * LANES;
            store(read, load(read) / total[half]);
        }
    turn(h->read, BESIDE, h->width, num, 1, 1.0f, out + (size_t)first * width, width);
}

/* This thread's share of the blocks of all heads of all sources, each of which costs as much as its source is long. */
static void attend_sources(const token_sources *s, float *room, int32_t thread, int32_t threads) {
    const size_t D = (size_t)s->width, width = (size_t)s->num_heads * D;
    int64_t all = 0, before = 0, begin, end;
    for (int32_t i = 0; i < s->num_sources; i++) all += (int64_t)s->lengths[i] * (round_to(s->lengths[i], BESIDE) / BESIDE);
    split(all * s->num_heads, thread, threads, &begin, &end);
    size_t token = 0;
    for (int32_t i = 0; i < s->num_sources; token += (size_t)s->lengths[i], i++)
        for (int32_t head = 0; head < s->num_heads; head++) {
            const float *qkv = s->qkv + token * 3 * width + (size_t)head * D;
            source_head h = {.count = 0};
            for (int32_t first = 0; first < s->lengths[i]; first += BESIDE, before += s->lengths[i]) {
                if (before < begin || before >= end) continue;
                if (!h.count) {
                    h = lay_room(s, s->lengths[i], room);
                    lay_head(s, qkv, head, &h);
                }
                read_head(s, &h, qkv, first, s->read + token * width + (size_t)head * D);
            }
        }
}

#endif
