/* The step itself. Compiled once for every instruction set: US_NAME is the set's table, US_AVX2 and such its vectors. */
#include "internal.h"
#include "tiles.h"

#define JOIN(a, b) a##b
#define NAMED(a, b) JOIN(a, b)
#define MOST_GROUP 8 /* query heads of one key head that are read together */

static void split(int64_t count, int32_t thread, int32_t size, int64_t *first, int64_t *last) {
    *first = count * thread / size;
    *last = count * (thread + 1) / size;
}

/* --- norms and activations -------------------------------------------------------------------------------------- */
static void normalise(const us_norm *norm, const float *x, int32_t n, float *y) {
    vec squares = fill(0), total = fill(0);
    int32_t i = 0;
    float mean = 0, square = 0;
    if (norm->kind == US_LAYER) {
        for (; i + LANES <= n; i += LANES) total += load(x + i);
        mean = sum(total);
        for (; i < n; i++) mean += x[i];
        mean /= (float)n;
    }
    for (i = 0; i + LANES <= n; i += LANES) {
        vec v = load(x + i) - mean;
        squares += v * v;
    }
    square = sum(squares);
    for (; i < n; i++) square += (x[i] - mean) * (x[i] - mean);
    float scale = 1.0f / sqrtf(square / (float)n + norm->eps);
    for (i = 0; i + LANES <= n; i += LANES) {
        vec v = (load(x + i) - mean) * scale;
        if (norm->weight) v *= load(norm->weight + i);
        if (norm->bias) v += load(norm->bias + i);
        store(y + i, v);
    }
    for (; i < n; i++) {
        float v = (x[i] - mean) * scale;
        if (norm->weight) v *= norm->weight[i];
        y[i] = norm->bias ? v + norm->bias[i] : v;
    }
}

INLINE vec activate(int32_t kind, vec x) {
    switch (kind) {
    case US_SILU: return x * sigmoid(x);
    case US_GELU_TANH: return x * sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x));
    case US_RELU: return larger(x, fill(0));
    default: {
        vec y;
        for (int i = 0; i < LANES; i++) y[i] = 0.5f * x[i] * (1.0f + erff(x[i] * 0.70710678118654752f));
        return y;
    }
    }
}

/* A few numbers at the end of a row, as a whole vector. */
INLINE vec load_some(const float *p, int n) {
    if (n == LANES) return load(p);
    float some[LANES] = {0};
    memcpy(some, p, sizeof(float) * (size_t)n);
    return load(some);
}
INLINE void store_some(float *p, vec v, int n) {
    if (n == LANES) {
        store(p, v);
        return;
    }
    float some[LANES];
    store(some, v);
    memcpy(p, some, sizeof(float) * (size_t)n);
}

#define FLOAT_M 4 /* rows of floats that are multiplied together */

/* Rows that take their turn with a tile of weights: near-even parts of all rows, of at most MOST_M. */
typedef struct {
    int32_t first, count;
} panel;

static panel find_panel(const us_matrix *w, int32_t row, int32_t num_rows) {
    const int32_t most = w->kind == US_F32 ? FLOAT_M : MOST_M, parts = (num_rows + most - 1) / most, joined = MOST_M / most;
    const int32_t begin = ((row + 1) * parts - 1) / num_rows / joined * joined;
    const int32_t end = begin + joined < parts ? begin + joined : parts, first = num_rows * begin / parts;
    return (panel){first, num_rows * end / parts - first};
}

/* One row of `columns` numbers as int8, to its place in its panel. */
static void quantise(const float *x, int32_t columns, int32_t row, panel p, int8_t *quants, float *scales, float *sums) {
    enum { VECTORS = US_BLOCK / LANES };
    const size_t blocks = (size_t)(columns / US_BLOCK), at = (size_t)p.first * blocks + (size_t)(row - p.first);
    quants += at * US_BLOCK;
    scales += at;
    sums += at;
    for (size_t b = 0; b < blocks; b++, x += US_BLOCK, quants += US_BLOCK * p.count, scales += p.count, sums += p.count) {
        vec v[VECTORS], most[2] = {fill(0), fill(0)};
        UNROLLED for (int i = 0; i < VECTORS; i++) {
            v[i] = load(x + i * LANES);
            most[i % 2] = larger(most[i % 2], magnitude(v[i]));
        }
        const float size = largest(larger(most[0], most[1])), inverse = size > 0 ? 127.0f / size : 0;
        int32_t whole[US_BLOCK], total = 0;
        UNROLLED for (int i = 0; i < VECTORS; i++) {
            const veci q = nearest(v[i] * inverse);
            memcpy(whole + i * LANES, &q, sizeof q);
        }
        for (int i = 0; i < US_BLOCK; i++) {
            quants[i] = (int8_t)whole[i];
            total += whole[i];
        }
        *scales = size / 127.0f;
        *sums = *scales * (float)total;
    }
}

/* --- products ---------------------------------------------------------------------------------------------------- */
typedef struct {
    const float *x; /* rows of floats, `stride` apart */
    size_t stride;
    activations quantised; /* of all panels, one after the other */
} input;

/* Where results go: y = result, y += result, or y += result + extra; with `gate`, y = activation(gate) * result. */
typedef struct {
    float *y;
    size_t stride;
    const float *extra;
    size_t extra_stride;
    int32_t adds;
} output;

#if defined(__aarch64__) || defined(US_AVX512)
#define FLOAT_N 3 /* rows of weights that are multiplied together: with 4 of activations their sums fit 32 registers */
#else
#define FLOAT_N 1
#endif

/* N rows of weights times M of activations. Every pair has two running sums, whatever N and M are, so that a row has the
 * same bits alone and in a batch. One row of activations reads weights as fast as memory gives them, in one stream.
 * Several are bound by instructions, and each of `turns` groups of them brings its share of the weights that come next
 * into the second-level cache meanwhile: the first level is full of activations. */
INLINE void rows_f32(const float *w, int32_t columns, const float *x, size_t stride, const int N, const int M, int32_t turn,
                     int32_t turns, float *out) {
    vec even[FLOAT_N][FLOAT_M], odd[FLOAT_N][FLOAT_M];
    const size_t share = (size_t)N * 2 * LANES / (size_t)turns;
    const float *ahead = w + (size_t)FLOAT_N * (size_t)columns + 1024 + (size_t)turn * share * ((size_t)columns / (2 * LANES));
    UNROLLED for (int n = 0; n < N; n++) EACH_ROW even[n][m] = odd[n][m] = fill(0);
    int32_t k = 0;
    for (; k + 2 * LANES <= columns; k += 2 * LANES) {
        vec first[FLOAT_N], second[FLOAT_N];
        if (M == 1) __builtin_prefetch(w + k + 256);
        else __builtin_prefetch(ahead, 0, 2);
        ahead += share;
        UNROLLED for (int n = 0; n < N; n++) {
            first[n] = load(w + (size_t)n * columns + k);
            second[n] = load(w + (size_t)n * columns + k + LANES);
        }
        EACH_ROW {
            const vec left = load(x + m * stride + k), right = load(x + m * stride + k + LANES);
            UNROLLED for (int n = 0; n < N; n++) even[n][m] += first[n] * left;
            UNROLLED for (int n = 0; n < N; n++) odd[n][m] += second[n] * right;
        }
    }
    UNROLLED for (int n = 0; n < N; n++) {
        vec both[FLOAT_M];
        UNROLLED for (int m = 0; m < FLOAT_M; m++) both[m] = m < M ? even[n][m] + odd[n][m] : fill(0);
        const quad results = sums(both);
        EACH_ROW {
            float result = results[m];
            for (int32_t i = k; i < columns; i++) result += w[(size_t)n * columns + i] * x[m * stride + i];
            out[8 * m + n] = result;
        }
    }
}

/* Eight rows of plain floats (fewer at a matrix's end) times the rows of a panel: out[row][n]. */
static void multiply_f32(const float *w, int32_t columns, int32_t count, const float *x, size_t stride, int32_t num_rows,
                         float *out) {
    const int32_t turns = (num_rows + FLOAT_M - 1) / FLOAT_M;
    for (int32_t n = 0, N; n < count; n += N, w += (size_t)N * columns) {
        N = num_rows == 1 ? 1 : count - n < FLOAT_N ? count - n : FLOAT_N;
        for (int32_t turn = 0; turn < turns; turn++) {
            const int32_t row = num_rows * turn / turns, M = num_rows * (turn + 1) / turns - row;
            const float *from = x + (size_t)row * stride;
            float *to = out + 8 * row + n;
#define ROWS(N, M) case 8 * N + M: rows_f32(w, columns, from, stride, N, M, turn, turns, to); break
#define ROWS_OF(N) ROWS(N, 1); ROWS(N, 2); ROWS(N, 3); ROWS(N, 4)
            switch (8 * N + M) {
                ROWS_OF(1);
#if FLOAT_N == 3
                ROWS_OF(2);
                ROWS_OF(3);
#endif
            }
        }
    }
}

/* Eight output rows (fewer at a matrix's end) from `first`, for a panel of activations: out[row][8]. */
static void multiply(const us_matrix *w, int32_t first, int32_t count, const input *in, panel p, float *out) {
    const size_t blocks = (size_t)(w->columns / US_BLOCK), at = (size_t)p.first * blocks;
    if (w->kind == US_F32) {
        multiply_f32((const float *)w->data + (size_t)first * w->columns, w->columns, count, in->x + (size_t)p.first * in->stride,
                     in->stride, p.count, out);
        return;
    }
    const int is_q8 = w->kind == US_Q8;
    const activations a = {in->quantised.quants + at * US_BLOCK, in->quantised.scales + at, in->quantised.sums + at};
    const uint8_t *tile = (const uint8_t *)w->data + (size_t)(first / US_TILE) * blocks * (is_q8 ? Q8_BYTES : Q4_BYTES);
#define TILE(M)                                              \
    case M:                                                  \
        if (is_q8) tile_q8(tile, (int)blocks, a, M, out);     \
        else tile_q4(tile, (int)blocks, a, M, out);           \
        break;
    switch (p.count) {
        TILE(1)
        TILE(2)
        TILE(3)
        TILE(4)
#if MOST_M == 8
        TILE(5)
        TILE(6)
        TILE(7)
        TILE(8)
#endif
    }
}

static void put(const us_matrix *w, int32_t first, int32_t count, const float *made, int32_t row, const output *to) {
    float *y = to->y + row * to->stride + first;
    for (int32_t n = 0; n < count; n++) {
        float result = made[n];
        if (w->bias) result += w->bias[first + n];
        if (to->extra) result += to->extra[row * to->extra_stride + first + n];
        y[n] = to->adds ? y[n] + result : result;
    }
}

/* One thread's part of a product for all rows. */
static void multiply_part(const us_matrix *w, int32_t num_rows, const input *in, const output *to, int32_t thread,
                          int32_t threads) {
    int64_t first, last;
    split((w->rows + US_TILE - 1) / US_TILE, thread, threads, &first, &last);
    float made[MOST_M * 8];
    for (int64_t tile = first; tile < last; tile++) {
        int32_t begin = (int32_t)tile * US_TILE, count = w->rows - begin < US_TILE ? w->rows - begin : US_TILE;
        for (int32_t row = 0; row < num_rows;) {
            const panel p = find_panel(w, row, num_rows);
            multiply(w, begin, count, in, p, made);
            for (int m = 0; m < p.count; m++) put(w, begin, count, made + 8 * m, row + m, to);
            row += p.count;
        }
    }
}

/* One thread's part of a feed-forward's first product, with its activation: gate rows come before the others. */
static void feed_part(const us_model *model, const us_matrix *w, int32_t num_rows, const input *in, const output *to,
                      int32_t thread, int32_t threads) {
    int64_t first, last;
    split((model->ffn + US_TILE - 1) / US_TILE, thread, threads, &first, &last);
    float gates[MOST_M * 8], values[MOST_M * 8];
    for (int64_t tile = first; tile < last; tile++) {
        int32_t begin = (int32_t)tile * US_TILE, count = model->ffn - begin < US_TILE ? model->ffn - begin : US_TILE;
        for (int32_t row = 0; row < num_rows;) {
            const panel p = find_panel(w, row, num_rows);
            multiply(w, begin, count, in, p, gates);
            if (model->is_gated) multiply(w, model->ffn + begin, count, in, p, values);
            for (int m = 0; m < p.count; m++)
                for (int32_t n = 0; n < count; n += LANES) {
                    const int some = count - n < LANES ? count - n : LANES;
                    vec gate = load_some(gates + 8 * m + n, some);
                    if (w->bias) gate += load_some(w->bias + begin + n, some);
                    vec result = activate(model->activation, gate);
                    if (model->is_gated) {
                        vec value = load_some(values + 8 * m + n, some);
                        if (w->bias) value += load_some(w->bias + model->ffn + begin + n, some);
                        result *= value;
                    }
                    store_some(to->y + (row + m) * to->stride + begin + n, result, some);
                }
            row += p.count;
        }
    }
}

/* --- attention --------------------------------------------------------------------------------------------------- */
INLINE float dot(const float *a, const float *b, int32_t n) {
    vec total = fill(0);
    int32_t i = 0;
    for (; i + LANES <= n; i += LANES) total += load(a + i) * load(b + i);
    float result = sum(total);
    for (; i < n; i++) result += a[i] * b[i];
    return result;
}

/* What a group of queries has read: the largest score, the sum of weights, and the weighted values. */
typedef struct {
    float most[MOST_GROUP], total[MOST_GROUP];
    float read[MOST_GROUP * US_WIDEST_HEAD]; /* (group, width) */
} reading;

/* Keys of one store that a part covers. */
typedef struct {
    const float *keys;
    int64_t stride;
    int32_t count;
} segment;

#define AT_ONCE 4 /* keys that are scored together, and query heads */

/* Scores of a few keys for up to AT_ONCE queries. Missing keys are read as the last one, so that all take one way. */
INLINE void score_few(const float *q, const int32_t G, const int32_t D, segment s, int32_t j, float (*scores)[US_PART]) {
    const int32_t last = s.count - 1;
    const float *keys[AT_ONCE];
    vec total[AT_ONCE][AT_ONCE]; /* (query, key) */
    UNROLLED for (int k = 0; k < AT_ONCE; k++) keys[k] = s.keys + (j + k < last ? j + k : last) * s.stride;
    UNROLLED for (int g = 0; g < G; g++)
        UNROLLED for (int k = 0; k < AT_ONCE; k++) total[g][k] = fill(0);
    int32_t i = 0;
    for (; i + LANES <= D; i += LANES)
        UNROLLED for (int k = 0; k < AT_ONCE; k++) {
            const vec key = load(keys[k] + i);
            UNROLLED for (int g = 0; g < G; g++) total[g][k] += key * load(q + g * D + i);
        }
    UNROLLED for (int g = 0; g < G; g++) {
        quad made = sums(total[g]);
        for (int32_t rest = i; rest < D; rest++)
            for (int k = 0; k < AT_ONCE; k++) made[k] += q[g * D + rest] * keys[k][rest];
        if (j + AT_ONCE <= s.count) memcpy(&scores[g][j], &made, sizeof made);
        else
            for (int32_t k = 0; k < s.count - j; k++) scores[g][j + k] = made[k];
    }
}

INLINE void score(const float *q, const int32_t G, const int32_t D, segment s, int32_t values, float (*scores)[US_PART]) {
    for (int32_t j = 0; j < s.count; j += AT_ONCE) {
        int32_t g = 0;
        for (int32_t k = j; k < j + AT_ONCE && k < s.count; k++) /* what is read next */
            for (int32_t i = 0; i < D; i += 16) {
                __builtin_prefetch(s.keys + (k + 2 * AT_ONCE) * s.stride + i);
                __builtin_prefetch(s.keys + k * s.stride + values + i);
            }
        for (; g + AT_ONCE <= G; g += AT_ONCE) score_few(q + g * D, AT_ONCE, D, s, j, scores + g);
        if (G - g == 3) score_few(q + g * D, 3, D, s, j, scores + g);
        if (G - g == 2) score_few(q + g * D, 2, D, s, j, scores + g);
        if (G - g == 1) score_few(q + g * D, 1, D, s, j, scores + g);
    }
}

/* Weighted values of up to AT_ONCE queries, W vectors of their columns at a time. */
INLINE void weigh_few(float *read, const int32_t G, const int32_t D, const int W, segment s, int32_t column,
                      float (*scores)[US_PART]) {
    vec total[AT_ONCE][4];
    UNROLLED for (int g = 0; g < G; g++)
        UNROLLED for (int i = 0; i < W; i++) total[g][i] = load(read + g * D + i * LANES);
    const float *value = s.keys + column;
    for (int32_t j = 0; j < s.count; j++, value += s.stride)
        UNROLLED for (int i = 0; i < W; i++) {
            const vec v = load(value + i * LANES);
            UNROLLED for (int g = 0; g < G; g++) total[g][i] += v * scores[g][j];
        }
    UNROLLED for (int g = 0; g < G; g++)
        UNROLLED for (int i = 0; i < W; i++) store(read + g * D + i * LANES, total[g][i]);
}

#define WIDE (LANES == 8 ? 2 : 4) /* vectors whose sums fit the registers */

INLINE void weigh_columns(float *read, const int32_t G, const int32_t D, segment s, int32_t values, float (*scores)[US_PART]) {
    int32_t i = 0;
    for (; i + WIDE * LANES <= D; i += WIDE * LANES) weigh_few(read + i, G, D, WIDE, s, values + i, scores);
    for (; i + LANES <= D; i += LANES) weigh_few(read + i, G, D, 1, s, values + i, scores);
    for (; i < D; i++)
        for (int g = 0; g < G; g++)
            for (int32_t j = 0; j < s.count; j++) read[g * D + i] += s.keys[values + j * s.stride + i] * scores[g][j];
}

INLINE void weigh(float *read, const int32_t G, const int32_t D, segment s, int32_t values, float (*scores)[US_PART]) {
    int32_t g = 0;
    if (!s.count) return;
    for (; g + AT_ONCE <= G; g += AT_ONCE) weigh_columns(read + g * D, AT_ONCE, D, s, values, scores + g);
    if (G - g == 3) weigh_columns(read + g * D, 3, D, s, values, scores + g);
    if (G - g == 2) weigh_columns(read + g * D, 2, D, s, values, scores + g);
    if (G - g == 1) weigh_columns(read + g * D, 1, D, s, values, scores + g);
}

/* Loops unrolled for common shapes: query heads to a key head, and their width. */
#define FOR_SHAPE(CALL)                    \
    switch (G * 1000 + D) {                \
    case 1064: CALL(1, 64); break;         \
    case 2064: CALL(2, 64); break;         \
    case 3064: CALL(3, 64); break;         \
    case 4064: CALL(4, 64); break;         \
    case 8064: CALL(8, 64); break;         \
    case 1128: CALL(1, 128); break;        \
    case 4128: CALL(4, 128); break;        \
    case 8128: CALL(8, 128); break;        \
    default: CALL(G, D);                   \
    }

/* Read one part: keys of two stores, the first of which has position `position`. */
static void read_part(const us_model *model, const float *q, const float *slopes, int32_t G, segment first, segment second,
                      int32_t position, reading *r) {
    const int32_t D = model->head_dim, values = model->num_kv_heads * D, n = first.count + second.count;
    const float cap = model->attention_cap;
    float scores[MOST_GROUP][US_PART];
    float(*later)[US_PART] = (float(*)[US_PART])(&scores[0][first.count]);
#define SCORE(G, D)                        \
    score(q, G, D, first, values, scores); \
    score(q, G, D, second, values, later)
    FOR_SHAPE(SCORE)
    for (int g = 0; g < G; g++) {
        if (cap > 0)
            for (int32_t j = 0; j < n; j++) scores[g][j] = cap * tanhf(scores[g][j] / cap);
        if (slopes)
            for (int32_t j = 0; j < n; j++) scores[g][j] += slopes[g] * (float)(position + j);
        for (int32_t j = n; j % LANES; j++) scores[g][j] = -INFINITY; /* whole vectors */
        vec highest = load(scores[g]), total = fill(0);
        for (int32_t j = LANES; j < n; j += LANES) highest = larger(highest, load(&scores[g][j]));
        const float most = largest(highest);
        for (int32_t j = 0; j < n; j += LANES) {
            const vec s = load(&scores[g][j]);
            const vec e = choose(s > fill(-INFINITY), exponential(s - most), fill(0));
            store(&scores[g][j], e);
            total += e;
        }
        r->total[g] = sum(total);
        r->most[g] = most;
    }
    memset(r->read, 0, sizeof(float) * (size_t)G * (size_t)D);
#define WEIGH(G, D)                                   \
    weigh(r->read, G, D, first, values, scores);      \
    weigh(r->read, G, D, second, values, later)
    FOR_SHAPE(WEIGH)
}

/* Let one head's reading take in another part's. */
static void merge(float *most, float *total, float *read, float other_most, float other_total, const float *other, int32_t D) {
    const float top = *most > other_most ? *most : other_most;
    const float mine = *most == -INFINITY ? 0 : expf(*most - top), theirs = expf(other_most - top);
    *most = top;
    *total = *total * mine + other_total * theirs;
    for (int32_t i = 0; i < D; i++) read[i] = read[i] * mine + other[i] * theirs;
}

/* Everything that one run needs at hand. */
typedef struct {
    const us_model *model;
    const us_job *job;
    us_scratch scratch;
    us_team *team;
    int32_t thread, threads;
    int32_t max_parts; /* attention's parts of a token are shared out among threads; 0: a token is one thread's */
    int32_t is_private; /* few rows: every thread prepares the input of products for itself */
} run;

static void rotate(float *head, const float *table, int32_t width) {
    for (int32_t i = 0; i < width; i += 2) { /* pairs are neighbours; table: cosine, sine */
        float a = head[i], b = head[i + 1], c = table[i], s = table[i + 1];
        head[i] = a * c - b * s;
        head[i + 1] = b * c + a * s;
    }
}

/* Norm, rotation and, for keys and values, the cache: heads of one token that belong to one key head. */
static void place_head(const run *r, const us_layer *layer, int32_t l, int32_t token, int32_t kv) {
    const us_model *m = r->model;
    const us_job *job = r->job;
    const int32_t D = m->head_dim, H = m->num_heads, KV = m->num_kv_heads, G = H / KV;
    float *qkv = r->scratch.qkv + (size_t)token * (H + 2 * KV) * D;
    const float *table = layer->rope ? layer->rope + (size_t)job->positions[token] * m->rope_width : NULL;
    for (int32_t h = kv * G; h < (kv + 1) * G; h++) {
        float *q = qkv + (size_t)h * D;
        if (layer->has_qk_norm) normalise(&layer->q_norm, q, D, q);
        if (table) rotate(q, table, m->rope_width);
        for (int32_t i = 0; i < D; i++) q[i] *= layer->scale;
    }
    float *k = qkv + (size_t)(H + kv) * D, *v = qkv + (size_t)(H + KV + kv) * D;
    if (layer->has_qk_norm) normalise(&layer->k_norm, k, D, k);
    if (table) rotate(k, table, m->rope_width);
    float *to = job->own.layers[l] + job->own_rows[token] * job->own.row_stride +
                job->own_places[token] * job->own.position_stride + (size_t)kv * D;
    memcpy(to, k, sizeof(float) * (size_t)D);
    memcpy(to + (size_t)KV * D, v, sizeof(float) * (size_t)D);
}

/* The first and the last part of a token's keys. Parts begin at multiples of US_PART whatever else is computed, so that
 * the same token is read by the same arithmetic alone and in a batch, by one thread and by many. */
static void find_parts(const run *r, const us_layer *layer, int32_t token, int32_t *from, int32_t *first, int32_t *last) {
    const int32_t all = r->job->shared_counts[token] + r->job->own_places[token] + 1;
    *from = layer->window && all > layer->window ? all - layer->window : 0;
    *first = *from / US_PART;
    *last = (all - 1) / US_PART;
}

/* One part of the keys of one key head, for some of its query heads. */
static void attend_part(const run *r, const us_layer *layer, int32_t l, int32_t token, int32_t kv, int32_t head, int32_t count,
                        int32_t part, reading *got) {
    const us_model *m = r->model;
    const us_job *job = r->job;
    const int32_t D = m->head_dim, heads = m->num_heads + 2 * m->num_kv_heads;
    const int32_t shared = job->shared_counts[token], all = shared + job->own_places[token] + 1;
    int32_t begin = part * US_PART, end = begin + US_PART < all ? begin + US_PART : all;
    if (layer->window && begin < all - layer->window) begin = all - layer->window;
    segment first = {0}, second = {0};
    if (begin < shared) {
        first.stride = job->shared.position_stride;
        first.count = (end < shared ? end : shared) - begin;
        first.keys = job->shared.layers[l] + job->shared_rows[token] * job->shared.row_stride + begin * first.stride + (int64_t)kv * D;
    }
    if (end > shared) {
        const int32_t place = begin > shared ? begin - shared : 0;
        second.stride = job->own.position_stride;
        second.count = end - shared - place;
        second.keys = job->own.layers[l] + job->own_rows[token] * job->own.row_stride + place * second.stride + (int64_t)kv * D;
    }
    const float *q = r->scratch.qkv + ((size_t)token * heads + head) * D;
    read_part(m, q, m->slopes ? m->slopes + head : NULL, count, first, second, begin, got);
}

static float *find_kept(const run *r, int32_t token, int32_t part, int32_t head) {
    return r->scratch.parts + (((size_t)token * r->max_parts + part) * r->model->num_heads + head) * (r->model->head_dim + 2);
}

/* One part of one token's key head, kept to be merged later. */
static void attend_kept(const run *r, const us_layer *layer, int32_t l, int32_t token, int32_t kv, int32_t part) {
    const us_model *m = r->model;
    const int32_t D = m->head_dim, G = m->num_heads / m->num_kv_heads;
    int32_t from, first, last;
    find_parts(r, layer, token, &from, &first, &last);
    if (part < first || part > last) return;
    reading got;
    for (int32_t g0 = 0; g0 < G; g0 += MOST_GROUP) {
        const int32_t count = G - g0 < MOST_GROUP ? G - g0 : MOST_GROUP, head = kv * G + g0;
        attend_part(r, layer, l, token, kv, head, count, part, &got);
        for (int g = 0; g < count; g++) {
            float *kept = find_kept(r, token, part, head + g);
            kept[0] = got.most[g];
            kept[1] = got.total[g];
            memcpy(kept + 2, got.read + (size_t)g * D, sizeof(float) * (size_t)D);
        }
    }
}

#define MOST_RUN 16 /* tokens that read a part one after the other, while it is in the cache */

/* All parts of a key head for a few tokens, and some of its query heads. */
static void attend_run(const run *r, const us_layer *layer, int32_t l, int32_t token, int32_t tokens, int32_t kv, int32_t head,
                       int32_t count) {
    const us_model *m = r->model;
    const int32_t D = m->head_dim;
    float most[MOST_RUN][MOST_GROUP], total[MOST_RUN][MOST_GROUP] = {{0}};
    int32_t from, first[MOST_RUN], last[MOST_RUN], lowest = INT32_MAX, highest = 0;
    for (int32_t t = 0; t < tokens; t++) {
        find_parts(r, layer, token + t, &from, &first[t], &last[t]);
        lowest = first[t] < lowest ? first[t] : lowest;
        highest = last[t] > highest ? last[t] : highest;
        for (int g = 0; g < count; g++) most[t][g] = -INFINITY;
        memset(r->scratch.read + ((size_t)(token + t) * m->num_heads + head) * D, 0, sizeof(float) * (size_t)count * (size_t)D);
    }
    reading got;
    for (int32_t part = lowest; part <= highest; part++)
        for (int32_t t = 0; t < tokens; t++) {
            if (part < first[t] || part > last[t]) continue;
            float *read = r->scratch.read + ((size_t)(token + t) * m->num_heads + head) * D;
            attend_part(r, layer, l, token + t, kv, head, count, part, &got);
            for (int g = 0; g < count; g++, read += D)
                merge(&most[t][g], &total[t][g], read, got.most[g], got.total[g], got.read + (size_t)g * D, D);
        }
    for (int32_t t = 0; t < tokens; t++) {
        float *read = r->scratch.read + ((size_t)(token + t) * m->num_heads + head) * D;
        for (int g = 0; g < count; g++, read += D)
            for (int32_t i = 0; i < D; i++) read[i] /= total[t][g];
    }
}

static void attend(run *r, const us_layer *layer, int32_t l) {
    const int32_t KV = r->model->num_kv_heads, G = r->model->num_heads / KV, tokens = r->job->num_tokens, parts = r->max_parts;
    int64_t first, last;
    split((int64_t)tokens * KV, r->thread, r->threads, &first, &last);
    for (int64_t i = first; i < last; i++) place_head(r, layer, l, (int32_t)(i / KV), (int32_t)(i % KV));
    us_meet(r->team); /* tokens of one row read each other's keys */
    if (parts) {
        split((int64_t)tokens * KV * parts, r->thread, r->threads, &first, &last);
        for (int64_t i = first; i < last; i++)
            attend_kept(r, layer, l, (int32_t)(i / parts / KV), (int32_t)(i / parts % KV), (int32_t)(i % parts));
    } else
        for (int64_t i = first; i < last;) { /* tokens of one row together, one key head after the other */
            const int32_t token = (int32_t)(i / KV), kv = (int32_t)(i % KV), whole = kv ? 0 : (int32_t)((last - i) / KV);
            const int32_t *rows = r->job->own_rows + token, heads = whole ? KV : 1;
            int32_t count = 1;
            while (count < whole && count < MOST_RUN && rows[count] == rows[0]) count++;
            for (int32_t h = kv; h < kv + heads; h++)
                for (int32_t g = 0; g < G; g += MOST_GROUP)
                    attend_run(r, layer, l, token, count, h, h * G + g, G - g < MOST_GROUP ? G - g : MOST_GROUP);
            i += count * heads;
        }
    us_meet(r->team);
}

/* Merge the kept parts of a token's heads into `out` (heads, width). */
static void join_parts(const run *r, const us_layer *layer, int32_t token, float *out) {
    const int32_t D = r->model->head_dim, H = r->model->num_heads;
    int32_t from, first, last;
    find_parts(r, layer, token, &from, &first, &last);
    for (int32_t h = 0; h < H; h++, out += D) {
        float most = -INFINITY, total = 0;
        memset(out, 0, sizeof(float) * (size_t)D);
        for (int32_t part = first; part <= last; part++) {
            const float *kept = find_kept(r, token, part, h);
            merge(&most, &total, out, kept[0], kept[1], kept + 2, D);
        }
        for (int32_t i = 0; i < D; i++) out[i] /= total;
    }
}

/* --- what goes into products ------------------------------------------------------------------------------------- */
enum source { NORMED, READ, FED, CHOSEN };

static int32_t count_read(const us_job *job) { return (1 + job->num_early) * job->num_wanted; }

/* Prepare the rows that a product multiplies, as the matrix wants them. */
static input prepare(run *r, const us_matrix *w, enum source source, const us_norm *norm, const us_layer *layer) {
    const us_scratch *s = &r->scratch;
    const us_job *job = r->job;
    const int32_t rows = source == CHOSEN ? count_read(job) : job->num_tokens, K = w->columns, H = r->model->hidden;
    const size_t at = r->is_private ? (size_t)r->thread : 0;
    float *normed = s->normed + at * s->normed_size, *scales = s->scales + at * s->scales_size;
    float *sums = s->sums + at * s->scales_size;
    int8_t *quants = s->quants + at * s->quants_size;
    input in = {.stride = (size_t)K, .x = normed, .quantised = {quants, scales, sums}};
    int64_t first = 0, last = rows;
    if (!r->is_private) split(rows, r->thread, r->threads, &first, &last);
    if (source == FED) in.x = s->fed;
    if (source == READ && !r->max_parts) in.x = s->read;
    for (int64_t row = first; row < last; row++) {
        if (source == NORMED) normalise(norm, s->x + row * H, H, normed + row * K);
        if (source == CHOSEN && row < job->num_wanted)
            normalise(norm, s->x + (int64_t)job->wanted[row] * H, H, normed + row * K);
        if (source == CHOSEN && row >= job->num_wanted) /* early states are read as they are */
            memcpy(normed + row * K, job->early_states + (row - job->num_wanted) * H, sizeof(float) * (size_t)H);
        if (source == READ && r->max_parts) join_parts(r, layer, (int32_t)row, normed + row * K);
        if (w->kind != US_F32)
            quantise(in.x + row * K, K, (int32_t)row, find_panel(w, (int32_t)row, rows), quants, scales, sums);
    }
    if (!r->is_private) us_meet(r->team);
    return in;
}

/* Add a block's result, normalised, to the state (Gemma 2). */
static void add_normed(run *r, const us_norm *norm) {
    const int32_t H = r->model->hidden;
    int64_t first, last;
    split(r->job->num_tokens, r->thread, r->threads, &first, &last);
    for (int64_t row = first; row < last; row++) {
        float *side = r->scratch.side + row * H, *x = r->scratch.x + row * H;
        normalise(norm, side, H, side);
        for (int32_t i = 0; i < H; i++) x[i] += side[i];
    }
    us_meet(r->team);
}

static void run_layer(run *r, int32_t l) {
    const us_model *m = r->model;
    const us_layer *layer = m->layers + l;
    const us_scratch *s = &r->scratch;
    const int32_t rows = r->job->num_tokens;
    const size_t hidden = (size_t)m->hidden;
    input in = prepare(r, &layer->qkv, NORMED, &layer->attn_norm, layer);
    multiply_part(&layer->qkv, rows, &in, &(output){.y = s->qkv, .stride = (size_t)layer->qkv.rows}, r->thread, r->threads);
    us_meet(r->team);
    attend(r, layer, l);
    in = prepare(r, &layer->out, READ, NULL, layer);
    const int32_t sides = layer->has_post_norms || m->is_parallel;
    multiply_part(&layer->out, rows, &in, &(output){.y = sides ? s->side : s->x, .stride = hidden, .adds = !sides}, r->thread,
                  r->threads);
    us_meet(r->team);
    if (layer->has_post_norms) add_normed(r, &layer->post_attn_norm);
    in = prepare(r, &layer->up, NORMED, layer->has_ffn_norm ? &layer->ffn_norm : &layer->attn_norm, layer);
    feed_part(m, &layer->up, rows, &in, &(output){.y = s->fed, .stride = (size_t)m->ffn}, r->thread, r->threads);
    us_meet(r->team);
    in = prepare(r, &layer->down, FED, NULL, layer);
    output to = {.y = s->x, .stride = hidden, .adds = 1};
    if (layer->has_post_norms) to = (output){.y = s->side, .stride = hidden};
    else if (m->is_parallel) to = (output){.y = s->x, .stride = hidden, .adds = 1, .extra = s->side, .extra_stride = hidden};
    multiply_part(&layer->down, rows, &in, &to, r->thread, r->threads);
    us_meet(r->team);
    if (layer->has_post_norms) add_normed(r, &layer->post_ffn_norm);
}

static void embed(run *r) {
    const us_model *m = r->model;
    const us_job *job = r->job;
    int64_t first, last;
    split(job->num_tokens, r->thread, r->threads, &first, &last);
    for (int64_t row = first; row < last; row++) {
        float *x = r->scratch.x + row * m->hidden;
        us_read_rows(&m->embedding, job->tokens + row, 1, x);
        const float *place = m->positions ? m->positions + (int64_t)job->positions[row] * m->hidden : NULL;
        for (int32_t i = 0; i < m->hidden; i++) x[i] = x[i] * m->embedding_scale + (place ? place[i] : 0.0f);
        if (m->has_embedding_norm) normalise(&m->embedding_norm, x, m->hidden, x);
    }
    us_meet(r->team);
}

/* The first of the highest numbers from `begin` to `end`; no token where all are -infinity, or one is none at all. */
static us_top find_top(const float *logits, int32_t begin, int32_t end) {
    vec highest = fill(-INFINITY);
    veci bad = {0};
    int32_t i = begin, is_bad = 0;
    for (; i + LANES <= end; i += LANES) {
        const vec v = load(logits + i);
        highest = larger(highest, v);
        bad |= v != v;
    }
    float most = largest(highest);
    for (int n = 0; n < LANES; n++) is_bad |= bad[n];
    for (; i < end; i++) {
        most = logits[i] > most ? logits[i] : most;
        is_bad |= logits[i] != logits[i];
    }
    if (is_bad) return (us_top){INFINITY, -1};
    for (i = begin; i < end && most > -INFINITY; i++)
        if (logits[i] == most) return (us_top){most, i};
    return (us_top){-INFINITY, -1};
}

static void choose_tops(const run *r) {
    const us_job *job = r->job;
    for (int32_t row = 0; row < job->num_wanted; row++) {
        us_top best = r->scratch.tops[row];
        for (int32_t t = 1; t < r->threads; t++) {
            const us_top other = r->scratch.tops[t * job->num_wanted + row];
            const int is_bad = other.token < 0 && other.value > 0;
            if (other.value > best.value || is_bad) best = other;
        }
        job->likeliest[row] = best.token;
    }
}

static void finish(run *r) {
    const us_model *m = r->model;
    const us_job *job = r->job;
    int64_t first, last;
    if (job->states) {
        split(job->num_tokens, r->thread, r->threads, &first, &last);
        for (int64_t row = first; row < last; row++)
            normalise(&m->final_norm, r->scratch.x + row * m->hidden, m->hidden, job->states + row * m->hidden);
    }
    if (!job->num_wanted) return;
    input in = prepare(r, &m->head, CHOSEN, &m->final_norm, NULL);
    multiply_part(&m->head, count_read(job), &in, &(output){.y = job->logits, .stride = (size_t)m->vocab}, r->thread, r->threads);
    split((m->vocab + US_TILE - 1) / US_TILE, r->thread, r->threads, &first, &last); /* the columns that were made here */
    first *= US_TILE;
    last = last * US_TILE < m->vocab ? last * US_TILE : m->vocab;
    for (int32_t row = 0; row < job->num_wanted; row++) {
        float *logits = job->logits + (size_t)row * m->vocab;
        if (m->logit_cap > 0)
            for (int64_t i = first; i < last; i++) logits[i] = m->logit_cap * tanhf(logits[i] / m->logit_cap);
        if (job->likeliest)
            r->scratch.tops[r->thread * job->num_wanted + row] = find_top(logits, (int32_t)first, (int32_t)last);
    }
    if (!job->likeliest) return;
    us_meet(r->team);
    if (!r->thread) choose_tops(r);
}

/* Keep the wanted tokens' states before a layer that is read early. */
static void keep_early(run *r, int32_t l) {
    const us_job *job = r->job;
    const size_t H = (size_t)r->model->hidden;
    if (r->thread) return; /* the state is changed only after all threads have met again */
    for (int32_t e = 0; e < job->num_early; e++)
        for (int32_t row = 0; row < job->num_wanted && job->early[e] == l; row++)
            memcpy(job->early_states + (size_t)(e * job->num_wanted + row) * H, r->scratch.x + (size_t)job->wanted[row] * H,
                   sizeof(float) * H);
}

static void run_pass(const us_model *model, const us_job *job, int32_t thread, us_team *team) {
    const int32_t KV = model->num_kv_heads, tokens = job->num_tokens;
    run r = {
        .model = model,
        .job = job,
        .scratch = us_lay_out(model, tokens, count_read(job), team->size, job->most_keys, job->scratch),
        .team = team,
        .thread = thread,
        .threads = team->size,
        .max_parts = us_count_parts(tokens, KV, team->size, job->most_keys),
        .is_private = us_is_private(tokens),
    };
    embed(&r);
    for (int32_t l = 0; l < r.model->num_layers; l++) {
        keep_early(&r, l);
        run_layer(&r, l);
    }
    finish(&r);
}

static void run_once(const void *argument, int32_t thread, us_team *team) {
    const us_run_task *task = argument;
    run_pass(task->model, task->job, thread, team);
}

/* Whether no step follows one that chose these tokens. */
static int ends_here(const us_steps *steps, const int64_t *chosen, int32_t count) {
    for (int32_t row = 0; row < count; row++) {
        if (chosen[row] < 0) return 1;
        for (int32_t i = 0; i < steps->num_ends; i++)
            if (chosen[row] == steps->ends[i]) return 1;
    }
    return 0;
}

static void run_steps(const void *argument, int32_t thread, us_team *team) {
    const us_steps_task *task = argument;
    const us_job *job = task->job;
    us_steps *steps = task->steps;
    for (int32_t step = 1;; step++) {
        run_pass(task->model, job, thread, team);
        us_meet(team); /* the tokens are chosen */
        const int is_last = step == steps->num_steps || ends_here(steps, job->likeliest, job->num_tokens);
        if (!thread)
            for (int32_t row = 0; row < job->num_tokens; row++) {
                const int32_t token = (int32_t)job->likeliest[row];
                steps->chosen[(int64_t)(step - 1) * job->num_tokens + row] = token;
                steps->num_done = step;
                if (is_last) continue;
                steps->tokens[row] = token;
                steps->positions[row]++;
                steps->own_places[row]++;
            }
        if (is_last) return;
        us_meet(team); /* they stand where the next step reads them */
    }
}

static void run_product(const void *argument, int32_t thread, us_team *team) {
    const us_product_task *task = argument;
    const us_matrix *w = task->matrix;
    const int32_t K = w->columns, blocks = K / US_BLOCK, rows = task->num_rows;
    int8_t *quants = task->scratch;
    float *scales = (float *)(quants + (((size_t)rows * K + 63) & ~(size_t)63)), *sums = scales + (size_t)rows * blocks;
    int64_t first, last;
    if (w->kind != US_F32) {
        split(rows, thread, team->size, &first, &last);
        for (int64_t row = first; row < last; row++)
            quantise(task->x + row * K, K, (int32_t)row, find_panel(w, (int32_t)row, rows), quants, scales, sums);
        us_meet(team);
    }
    input in = {.stride = (size_t)K, .x = task->x, .quantised = {quants, scales, sums}};
    multiply_part(w, rows, &in, &(output){.y = task->y, .stride = (size_t)w->rows}, thread, team->size);
}

#define TEXT(a) #a
#define QUOTED(a) TEXT(a)
const us_kernels NAMED(us_, US_NAME) = {QUOTED(US_NAME), run_once, run_steps, run_product};
