/* The step itself. Compiled once for every instruction set: US_NAME is the set's table, US_AVX2 and such its vectors. */
#include "internal.h"
#include "tiles.h"

#define JOIN(a, b) a##b
#define NAMED(a, b) JOIN(a, b)
#define KEYS_AT_ONCE 64
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
    float some[LANES] = {0};
    memcpy(some, p, sizeof(float) * (size_t)n);
    return load(some);
}
INLINE void store_some(float *p, vec v, int n) {
    float some[LANES];
    store(some, v);
    memcpy(p, some, sizeof(float) * (size_t)n);
}

static void quantise(const float *x, int32_t columns, int8_t *quants, float *scales, float *sums) {
    for (int32_t b = 0; b < columns / US_BLOCK; b++, x += US_BLOCK, quants += US_BLOCK) {
        vec most = magnitude(load(x));
        for (int i = LANES; i < US_BLOCK; i += LANES) most = larger(most, magnitude(load(x + i)));
        float size = largest(most), inverse = size > 0 ? 127.0f / size : 0;
        int32_t total = 0;
        for (int i = 0; i < US_BLOCK; i++) {
            float scaled = x[i] * inverse;
            int32_t q = (int32_t)(scaled + (scaled < 0 ? -0.5f : 0.5f));
            quants[i] = (int8_t)q;
            total += q;
        }
        scales[b] = size / 127.0f;
        sums[b] = scales[b] * (float)total;
    }
}

/* --- products ---------------------------------------------------------------------------------------------------- */
typedef struct {
    const float *x; /* rows of floats, `stride` apart */
    activations quantised;
    size_t stride;
} input;

/* Where results go: y = result, y += result, or y += result + extra; with `gate`, y = activation(gate) * result. */
typedef struct {
    float *y;
    size_t stride;
    const float *extra;
    size_t extra_stride;
    int32_t adds;
} output;

INLINE void rows_f32(const float *w, int32_t columns, const float *x, size_t stride, const int N, const int M, float *out) {
    vec total[4][4];
    for (int n = 0; n < N; n++)
        for (int m = 0; m < M; m++) total[n][m] = fill(0);
    int32_t k = 0;
    for (; k + LANES <= columns; k += LANES) {
        vec v[4];
        for (int m = 0; m < M; m++) v[m] = load(x + m * stride + k);
        for (int n = 0; n < N; n++) {
            vec row = load(w + (size_t)n * columns + k);
            for (int m = 0; m < M; m++) total[n][m] += row * v[m];
        }
    }
    for (int n = 0; n < N; n++)
        for (int m = 0; m < M; m++) {
            float result = sum(total[n][m]);
            for (int32_t i = k; i < columns; i++) result += w[(size_t)n * columns + i] * x[m * stride + i];
            out[8 * m + n] = result;
        }
}

/* Four rows times one: bound by memory, so the lines of the next four rows are asked for on the way. */
static void four_rows_f32(const float *w, int32_t columns, const float *x, float *out) {
    enum { STEP = 16 };
    vec total[4];
    for (int n = 0; n < 4; n++) total[n] = fill(0);
    int32_t k = 0;
    for (; k + STEP <= columns; k += STEP)
        for (int n = 0; n < 4; n++) {
            const float *row = w + (size_t)n * columns + k;
            __builtin_prefetch(row + 4 * (size_t)columns);
            for (int i = 0; i < STEP; i += LANES) total[n] += load(row + i) * load(x + k + i);
        }
    for (; k + LANES <= columns; k += LANES)
        for (int n = 0; n < 4; n++) total[n] += load(w + (size_t)n * columns + k) * load(x + k);
    for (int n = 0; n < 4; n++) {
        float result = sum(total[n]);
        for (int32_t i = k; i < columns; i++) result += w[(size_t)n * columns + i] * x[i];
        out[n] = result;
    }
}

#define MOST_M 4
#define MOST_F32 (LANES == 8 ? 2 : 4) /* accumulators that fit 16 registers */

/* Eight output rows (fewer at a matrix's end) from `first`, for M rows of activations: out[m][row]. */
static void multiply(const us_matrix *w, int32_t first, int32_t count, const input *in, int32_t row, int M, float *out) {
    const int32_t blocks = w->columns / US_BLOCK;
    if (w->kind == US_F32) {
        const float *x = in->x + (size_t)row * in->stride, *rows = (const float *)w->data;
        for (int32_t n = 0; n < count; n += 4) {
            const float *part = rows + (size_t)(first + n) * w->columns;
            float *to = out + n;
            if (count - n >= 4) {
                if (M == 4) rows_f32(part, w->columns, x, in->stride, 4, 4, to);
                else if (M == 2) rows_f32(part, w->columns, x, in->stride, 4, 2, to);
                else four_rows_f32(part, w->columns, x, to);
            } else
                for (int32_t i = 0; i < count - n; i++)
                    for (int m = 0; m < M; m++)
                        rows_f32(part + (size_t)i * w->columns, w->columns, x + m * in->stride, 0, 1, 1, to + 8 * m + i);
        }
        return;
    }
    activations a = in->quantised;
    a.quants += row * a.stride;
    a.scales += row * a.scale_stride;
    a.sums += row * a.scale_stride;
    const uint8_t *tile = (const uint8_t *)w->data;
    if (w->kind == US_Q8) {
        tile += (size_t)(first / US_TILE) * blocks * Q8_BYTES;
        if (M == 4) tile_q8(tile, blocks, a, 4, out);
        else if (M == 2) tile_q8(tile, blocks, a, 2, out);
        else tile_q8(tile, blocks, a, 1, out);
    } else {
        tile += (size_t)(first / US_TILE) * blocks * Q4_BYTES;
        if (M == 4) tile_q4(tile, blocks, a, 4, out);
        else if (M == 2) tile_q4(tile, blocks, a, 2, out);
        else tile_q4(tile, blocks, a, 1, out);
    }
}

INLINE int most_rows(const us_matrix *w, int32_t left) {
    int most = w->kind == US_F32 ? MOST_F32 : MOST_M;
    return left >= 4 && most == 4 ? 4 : left >= 2 ? 2 : 1;
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
    float made[4 * 8];
    for (int64_t tile = first; tile < last; tile++) {
        int32_t begin = (int32_t)tile * US_TILE, count = w->rows - begin < US_TILE ? w->rows - begin : US_TILE;
        for (int32_t row = 0; row < num_rows;) {
            int M = most_rows(w, num_rows - row);
            multiply(w, begin, count, in, row, M, made);
            for (int m = 0; m < M; m++) put(w, begin, count, made + 8 * m, row + m, to);
            row += M;
        }
    }
}

/* One thread's part of a feed-forward's first product, with its activation: gate rows come before the others. */
static void feed_part(const us_model *model, const us_matrix *w, int32_t num_rows, const input *in, const output *to,
                      int32_t thread, int32_t threads) {
    int64_t first, last;
    split((model->ffn + US_TILE - 1) / US_TILE, thread, threads, &first, &last);
    float gates[4 * 8], values[4 * 8];
    for (int64_t tile = first; tile < last; tile++) {
        int32_t begin = (int32_t)tile * US_TILE, count = model->ffn - begin < US_TILE ? model->ffn - begin : US_TILE;
        for (int32_t row = 0; row < num_rows;) {
            int M = most_rows(w, num_rows - row);
            multiply(w, begin, count, in, row, M, gates);
            if (model->is_gated) multiply(w, model->ffn + begin, count, in, row, M, values);
            for (int m = 0; m < M; m++)
                for (int32_t n = 0; n < count; n += LANES) {
                    int some = count - n < LANES ? count - n : LANES;
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
            row += M;
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

INLINE void score(const float *q, const int32_t G, const int32_t D, segment s, float (*scores)[US_PART]) {
    int32_t j = 0;
    for (; j + 2 <= s.count; j += 2) {
        const float *k0 = s.keys + j * s.stride, *k1 = k0 + s.stride;
        vec t0[MOST_GROUP], t1[MOST_GROUP];
        for (int g = 0; g < G; g++) t0[g] = t1[g] = fill(0);
        int32_t i = 0;
        for (; i + LANES <= D; i += LANES) {
            vec a = load(k0 + i), b = load(k1 + i);
            for (int g = 0; g < G; g++) {
                vec v = load(q + g * D + i);
                t0[g] += v * a;
                t1[g] += v * b;
            }
        }
        for (int g = 0; g < G; g++) {
            float s0 = sum(t0[g]), s1 = sum(t1[g]);
            for (int32_t k = i; k < D; k++) {
                s0 += q[g * D + k] * k0[k];
                s1 += q[g * D + k] * k1[k];
            }
            scores[g][j] = s0;
            scores[g][j + 1] = s1;
        }
    }
    for (; j < s.count; j++)
        for (int g = 0; g < G; g++) scores[g][j] = dot(q + g * D, s.keys + j * s.stride, D);
}

INLINE void weigh(float *read, const int32_t G, const int32_t D, segment s, int32_t values, float (*scores)[US_PART]) {
    int32_t i = 0;
    for (; i + LANES <= D; i += LANES) {
        vec total[MOST_GROUP];
        for (int g = 0; g < G; g++) total[g] = load(read + g * D + i);
        for (int32_t j = 0; j < s.count; j++) {
            vec v = load(s.keys + values + j * s.stride + i);
            for (int g = 0; g < G; g++) total[g] += v * scores[g][j];
        }
        for (int g = 0; g < G; g++) store(read + g * D + i, total[g]);
    }
    for (; i < D; i++)
        for (int g = 0; g < G; g++)
            for (int32_t j = 0; j < s.count; j++) read[g * D + i] += s.keys[values + j * s.stride + i] * scores[g][j];
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
    score(q, G, D, first, scores);         \
    score(q, G, D, second, later)
    FOR_SHAPE(SCORE)
    for (int g = 0; g < G; g++) {
        float most = -INFINITY;
        for (int32_t j = 0; j < n; j++) {
            float s = scores[g][j];
            if (cap > 0) s = cap * tanhf(s / cap);
            if (slopes) s += slopes[g] * (float)(position + j);
            scores[g][j] = s;
            most = s > most ? s : most;
        }
        vec total = fill(0);
        for (int32_t j = 0; j < n; j += LANES) {
            vec e = exponential(load(&scores[g][j]) - most);
            if (j + LANES > n)
                for (int32_t k = n - j; k < LANES; k++) e[k] = 0;
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

/* All parts of one token's key head, or only `only`, which is kept to be merged later. */
static void attend_head(const run *r, const us_layer *layer, int32_t l, int32_t token, int32_t kv, int32_t only) {
    const us_model *m = r->model;
    const int32_t D = m->head_dim, G = m->num_heads / m->num_kv_heads;
    int32_t from, first, last;
    find_parts(r, layer, token, &from, &first, &last);
    reading got;
    for (int32_t g0 = 0; g0 < G; g0 += MOST_GROUP) {
        const int32_t count = G - g0 < MOST_GROUP ? G - g0 : MOST_GROUP, head = kv * G + g0;
        if (only >= 0) {
            if (only < first || only > last) return;
            attend_part(r, layer, l, token, kv, head, count, only, &got);
            for (int g = 0; g < count; g++) {
                float *kept = find_kept(r, token, only, head + g);
                kept[0] = got.most[g];
                kept[1] = got.total[g];
                memcpy(kept + 2, got.read + (size_t)g * D, sizeof(float) * (size_t)D);
            }
            continue;
        }
        float most[MOST_GROUP], total[MOST_GROUP] = {0}, *read = r->scratch.read + ((size_t)token * m->num_heads + head) * D;
        for (int g = 0; g < count; g++) most[g] = -INFINITY;
        memset(read, 0, sizeof(float) * (size_t)count * (size_t)D);
        for (int32_t part = first; part <= last; part++) {
            attend_part(r, layer, l, token, kv, head, count, part, &got);
            for (int g = 0; g < count; g++)
                merge(&most[g], &total[g], read + (size_t)g * D, got.most[g], got.total[g], got.read + (size_t)g * D, D);
        }
        for (int g = 0; g < count; g++)
            for (int32_t i = 0; i < D; i++) read[(size_t)g * D + i] /= total[g];
    }
}

static void attend(run *r, const us_layer *layer, int32_t l) {
    const int32_t KV = r->model->num_kv_heads, tokens = r->job->num_tokens, parts = r->max_parts;
    int64_t first, last;
    split((int64_t)tokens * KV, r->thread, r->threads, &first, &last);
    for (int64_t i = first; i < last; i++) place_head(r, layer, l, (int32_t)(i / KV), (int32_t)(i % KV));
    us_meet(r->team); /* tokens of one row read each other's keys */
    if (!parts) {
        for (int64_t i = first; i < last; i++) attend_head(r, layer, l, (int32_t)(i / KV), (int32_t)(i % KV), -1);
    } else {
        split((int64_t)tokens * KV * parts, r->thread, r->threads, &first, &last);
        for (int64_t i = first; i < last; i++)
            attend_head(r, layer, l, (int32_t)(i / parts / KV), (int32_t)(i / parts % KV), (int32_t)(i % parts));
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

/* Prepare the rows that a product multiplies, as the matrix wants them. */
static input prepare(run *r, const us_matrix *w, enum source source, const us_norm *norm, const us_layer *layer) {
    const us_scratch *s = &r->scratch;
    const us_job *job = r->job;
    const int32_t rows = source == CHOSEN ? job->num_wanted : job->num_tokens, K = w->columns, H = r->model->hidden;
    const size_t at = r->is_private ? (size_t)r->thread : 0, blocks = (size_t)K / US_BLOCK;
    float *normed = s->normed + at * s->normed_size, *scales = s->scales + at * s->scales_size;
    float *sums = s->sums + at * s->scales_size;
    int8_t *quants = s->quants + at * s->quants_size;
    input in = {.stride = (size_t)K, .x = normed, .quantised = {quants, scales, sums, (size_t)K, blocks}};
    int64_t first = 0, last = rows;
    if (!r->is_private) split(rows, r->thread, r->threads, &first, &last);
    if (source == FED) in.x = s->fed;
    if (source == READ && !r->max_parts) in.x = s->read;
    for (int64_t row = first; row < last; row++) {
        if (source == NORMED) normalise(norm, s->x + row * H, H, normed + row * K);
        if (source == CHOSEN) normalise(norm, s->x + (int64_t)job->wanted[row] * H, H, normed + row * K);
        if (source == READ && r->max_parts) join_parts(r, layer, (int32_t)row, normed + row * K);
        if (w->kind != US_F32)
            quantise(in.x + row * K, K, quants + row * K, scales + row * (int64_t)blocks, sums + row * (int64_t)blocks);
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
    multiply_part(&m->head, job->num_wanted, &in, &(output){.y = job->logits, .stride = (size_t)m->vocab}, r->thread, r->threads);
    if (m->logit_cap <= 0) return;
    us_meet(r->team);
    split((int64_t)job->num_wanted * m->vocab, r->thread, r->threads, &first, &last);
    for (int64_t i = first; i < last; i++) job->logits[i] = m->logit_cap * tanhf(job->logits[i] / m->logit_cap);
}

static void run_all(const void *argument, int32_t thread, us_team *team) {
    const us_run_task *task = argument;
    const us_job *job = task->job;
    const int32_t KV = task->model->num_kv_heads, tokens = job->num_tokens;
    run r = {
        .model = task->model,
        .job = job,
        .scratch = us_lay_out(task->model, tokens, team->size, job->most_keys, job->scratch),
        .team = team,
        .thread = thread,
        .threads = team->size,
        .max_parts = us_count_parts(tokens, KV, team->size, job->most_keys),
        .is_private = us_is_private(tokens),
    };
    embed(&r);
    for (int32_t l = 0; l < r.model->num_layers; l++) run_layer(&r, l);
    finish(&r);
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
            quantise(task->x + row * K, K, quants + row * K, scales + row * blocks, sums + row * blocks);
        us_meet(team);
    }
    input in = {.stride = (size_t)K, .x = task->x, .quantised = {quants, scales, sums, (size_t)K, (size_t)blocks}};
    multiply_part(w, rows, &in, &(output){.y = task->y, .stride = (size_t)w->rows}, thread, team->size);
}

#define TEXT(a) #a
#define QUOTED(a) TEXT(a)
const us_kernels NAMED(us_, US_NAME) = {QUOTED(US_NAME), run_all, run_product};
