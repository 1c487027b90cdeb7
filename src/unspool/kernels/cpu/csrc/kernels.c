/* The step itself. Compiled once for every instruction set: US_NAME is the set's table, US_AVX2 and such its vectors. */
#include "internal.h"
#include "packed.h"
#include "supers.h"

#define JOIN(a, b) a##b
#define NAMED(a, b) JOIN(a, b)

static void split(int64_t count, int32_t thread, int32_t size, int64_t *first, int64_t *last) {
    *first = count * thread / size;
    *last = count * (thread + 1) / size;
}

/* --- norms and activations -------------------------------------------------------------------------------------- */
static void normalise(const us_norm *norm, const float *x, int32_t n, float *y) {
    vec squares = fill(0), total = fill(0);
    int32_t i = 0;
    if (norm->kind == US_COPY) {
        if (y != x) memcpy(y, x, sizeof(float) * (size_t)n);
        return;
    }
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
    case US_RELU2: {
        const vec kept = larger(x, fill(0));
        return kept * kept;
    }
    default: {
        const vec tail = normal_tail(magnitude(x));
        return x * choose(x < fill(0), tail, 1.0f - tail);
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

#include "floats.h"

/* One row of `columns` numbers as int8, to its place in its panel. */
static void quantise(const float *x, int32_t columns, int32_t row, panel p, int8_t *quants, float *scales, float *sums,
                     int32_t *offsets) {
    enum { VECTORS = US_BLOCK / LANES, HALF = US_BLOCK / 2 };
    const size_t blocks = (size_t)(columns / US_BLOCK), at = (size_t)p.first * blocks + (size_t)(row - p.first);
    quants += at * US_BLOCK;
    scales += at;
    sums += at;
    offsets += 2 * at;
    for (size_t b = 0; b < blocks;
         b++, x += US_BLOCK, quants += US_BLOCK * p.count, scales += p.count, sums += p.count, offsets += 2 * p.count) {
        vec v[VECTORS], most[2] = {fill(0), fill(0)};
        UNROLLED for (int i = 0; i < VECTORS; i++) {
            v[i] = load(x + i * LANES);
            most[i % 2] = larger(most[i % 2], magnitude(v[i]));
        }
        const float size = largest(larger(most[0], most[1])), inverse = size > 0 ? 127.0f / size : 0;
        int32_t whole[US_BLOCK], lower = 0, upper = 0;
        UNROLLED for (int i = 0; i < VECTORS; i++) {
            const veci q = nearest(v[i] * inverse);
            memcpy(whole + i * LANES, &q, sizeof q);
        }
        for (int i = 0; i < US_BLOCK; i++) quants[i] = (int8_t)whole[i];
        for (int i = 0; i < HALF; i++) {
            lower += whole[i];
            upper += whole[HALF + i];
        }
        *scales = size / 127.0f;
        *sums = *scales * (float)(lower + upper);
        offsets[0] = -32 * lower;
        offsets[1] = -32 * upper;
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
    const int32_t *rows; /* rows of y that results go to, if not their own; */
    const float *shares; /* and by what they are multiplied before; or NULL */
} output;

static void multiply_super(int32_t kind, const uint8_t *tile, int supers, activations a, int32_t num_rows, int is_pair,
                           float *out) {
#define SUPER(M)                                                                    \
    case M:                                                                         \
        if (kind == US_K4) tile_super(tile, supers, a, M, US_K4, is_pair, out);      \
        else if (kind == US_K5) tile_super(tile, supers, a, M, US_K5, is_pair, out); \
        else if (kind == US_K6) tile_super(tile, supers, a, M, US_K6, is_pair, out); \
        else tile_super(tile, supers, a, M, US_Q5, is_pair, out);                   \
        break;
    switch (num_rows) {
        SUPER(1) SUPER(2) SUPER(3) SUPER(4)
#if MOST_M == 8
        SUPER(5) SUPER(6) SUPER(7) SUPER(8)
#endif
    }
}

/* Up to OUTPUTS output rows from `first`, for a panel of activations: out[row][OUTPUTS]. */
static void multiply(const us_matrix *w, int32_t first, int32_t count, const input *in, panel p, float *out) {
    if (w->rest) { /* tiles of two kinds may be made together */
        const int32_t left = w->own - first;
        if (count > left) multiply(w->rest, left > 0 ? 0 : -left, left > 0 ? count - left : count, in, p, left > 0 ? out + left : out);
        if (left <= 0) return;
        count = count < left ? count : left;
    }
    const size_t blocks = (size_t)(w->columns / US_BLOCK), at = (size_t)p.first * blocks;
    if (us_is_plain(w->kind)) {
        const int size = us_number_bytes(w->kind);
        multiply_plain((const uint8_t *)w->data + (size_t)first * (size_t)w->columns * (size_t)size, size, w->columns, count,
                       in->x + (size_t)p.first * in->stride, in->stride, p, out);
        return;
    }
    const int is_q8 = w->kind == US_Q8;
    const activations a = {in->quantised.quants + at * US_BLOCK, in->quantised.scales + at, in->quantised.sums + at,
                           in->quantised.offsets + 2 * at};
    const uint8_t *tile = (const uint8_t *)w->data + (size_t)(first / US_TILE) * blocks * us_block_bytes(w->kind);
    if (w->kind >= US_K4) {
        multiply_super(w->kind, tile, (int)blocks / us_count_blocks(w->kind), a, p.count, count > US_TILE, out);
        return;
    }
#define TILE(M, name)                                          \
    case M:                                                    \
        if (is_q8) name##_q8(tile, (int)blocks, a, M, out);     \
        else name##_q4(tile, (int)blocks, a, M, out);           \
        break;
#if MOST_M == 8
#define EVERY(name) TILE(1, name) TILE(2, name) TILE(3, name) TILE(4, name) TILE(5, name) TILE(6, name) TILE(7, name) TILE(8, name)
#else
#define EVERY(name) TILE(1, name) TILE(2, name) TILE(3, name) TILE(4, name)
#endif
#if OUTPUTS > US_TILE
    if (count > US_TILE) {
        switch (p.count) { EVERY(tiles) }
        return;
    }
#endif
    switch (p.count) { EVERY(tile) }
}

static void put(const us_matrix *w, int32_t first, int32_t count, const float *made, int32_t row, const output *to) {
    float *y = to->y + (to->rows ? to->rows[row] : row) * to->stride + first;
    for (int32_t n = 0; n < count; n += LANES) {
        const int some = count - n < LANES ? count - n : LANES;
        vec result = load_some(made + n, some);
        if (w->bias) result += load_some(w->bias + first + n, some);
        if (to->shares) result *= to->shares[row];
        if (to->extra) result += load_some(to->extra + row * to->extra_stride + first + n, some);
        if (to->adds) result += load_some(y + n, some);
        store_some(y + n, result, some);
    }
}

/* How many output rows are made together from a tile on, of the tiles before `last`. */
static int32_t count_outputs(int64_t tile, int64_t last, int32_t rows) {
    const int32_t begin = (int32_t)tile * US_TILE, most = last - tile < OUTPUTS / US_TILE ? US_TILE : OUTPUTS;
    return rows - begin < most ? rows - begin : most;
}

/* One thread's part of a product for all rows. */
static void multiply_part(const us_matrix *w, int32_t num_rows, const input *in, const output *to, int32_t thread,
                          int32_t threads) {
    int64_t first, last;
    split((w->rows + US_TILE - 1) / US_TILE, thread, threads, &first, &last);
    float made[MOST_M * OUTPUTS];
    for (int64_t tile = first; tile < last; tile += OUTPUTS / US_TILE) {
        const int32_t begin = (int32_t)tile * US_TILE, count = count_outputs(tile, last, w->rows);
        for (int32_t row = 0; row < num_rows;) {
            const panel p = find_panel(w, row, num_rows);
            multiply(w, begin, count, in, p, made);
            for (int m = 0; m < p.count; m++) put(w, begin, count, made + OUTPUTS * m, row + m, to);
            row += p.count;
        }
    }
}

/* gpt-oss's gate: both sides are kept within a limit, and the value counts from -1. */
INLINE vec gate_clamped(const us_model *model, vec gate, vec value) {
    const vec most = fill(model->gate_limit);
    gate = -larger(-gate, -most);
    value = larger(-larger(-value, -most), -most);
    return gate * sigmoid(model->gate_gain * gate) * (value + 1.0f);
}

/* One thread's part of a feed-forward's first product, with its activation: gate rows come before the others. */
static void feed_part(const us_model *model, const us_matrix *w, int32_t ffn, int32_t num_rows, const input *in,
                      const output *to, int32_t thread, int32_t threads) {
    int64_t first, last;
    split((ffn + US_TILE - 1) / US_TILE, thread, threads, &first, &last);
    float gates[MOST_M * OUTPUTS], values[MOST_M * OUTPUTS];
    for (int64_t tile = first; tile < last; tile += OUTPUTS / US_TILE) {
        const int32_t begin = (int32_t)tile * US_TILE, count = count_outputs(tile, last, ffn);
        for (int32_t row = 0; row < num_rows;) {
            const panel p = find_panel(w, row, num_rows);
            multiply(w, begin, count, in, p, gates);
            if (model->is_gated) multiply(w, ffn + begin, count, in, p, values);
            for (int m = 0; m < p.count; m++)
                for (int32_t n = 0; n < count; n += LANES) {
                    const int some = count - n < LANES ? count - n : LANES;
                    vec gate = load_some(gates + OUTPUTS * m + n, some);
                    if (w->bias) gate += load_some(w->bias + begin + n, some);
                    vec value = fill(1);
                    if (model->is_gated) {
                        value = load_some(values + OUTPUTS * m + n, some);
                        if (w->bias) value += load_some(w->bias + ffn + begin + n, some);
                    }
                    const vec result = model->activation == US_CLAMPED ? gate_clamped(model, gate, value)
                                                                        : activate(model->activation, gate) * value;
                    store_some(to->y + (row + m) * to->stride + begin + n, result, some);
                }
            row += p.count;
        }
    }
}

/* --- attention --------------------------------------------------------------------------------------------------- */
/* Everything that one run needs at hand. */
typedef struct {
    const us_model *model;
    const us_job *job;
    us_scratch scratch;
    us_team *team;
    int32_t thread, threads;
    int32_t max_parts; /* attention's parts of a token are shared out among threads; 0: a token is one thread's */
    int32_t own_parts, source_parts; /* as many of them as a text and a source have */
    int32_t is_private; /* few rows: every thread prepares the input of products for itself */
    tiles tiles;        /* what this thread has unpacked */
} run;

/* Rotate pairs of neighbours; the numbers of a pair are brought together first if they stand in two halves. */
static void rotate(float *head, const float *table, int32_t width, int32_t is_halved) {
    if (is_halved) {
        float halves[US_WIDEST_HEAD];
        memcpy(halves, head, sizeof(float) * (size_t)width);
        for (int32_t i = 0; i < width / 2; i++) head[2 * i] = halves[i], head[2 * i + 1] = halves[width / 2 + i];
    }
    for (int32_t i = 0; i < width; i += 2) { /* table: cosine, sine */
        float a = head[i], b = head[i + 1], c = table[i], s = table[i + 1];
        head[i] = a * c - b * s;
        head[i + 1] = b * c + a * s;
    }
}

/* Where a place of a row lies. */
static float *find_place(const us_store *s, int32_t l, int32_t row, int32_t place) {
    if (s->tables)
        return s->layers[l] + s->tables[l][(int64_t)row * s->width + place / s->block] * s->row_stride +
               place % s->block * s->position_stride;
    if (s->rooms) return s->layers[l] + ((int64_t)row * s->rooms[l] + place % s->rooms[l]) * s->position_stride;
    return s->layers[l] + row * s->row_stride + place * s->position_stride;
}

/* How many places from one on lie one after the other. */
static int32_t count_run(const us_store *s, int32_t l, int32_t place) {
    if (s->tables) return s->block - place % s->block;
    return s->rooms ? s->rooms[l] - place % s->rooms[l] : INT32_MAX;
}

static void norm_head(const us_layer *layer, const us_norm *norm, float *head, int32_t number, int32_t D) {
    us_norm own = *norm;
    if (layer->head_norm == US_EACH) own.weight += (size_t)number * D;
    if (layer->head_norm == US_SHARED || layer->head_norm == US_EACH) normalise(&own, head, D, head);
}

/* Norms that go over all heads of a token's queries, and of its keys. */
static void norm_whole(run *r, const us_layer *layer) {
    const us_model *m = r->model;
    const int32_t query = m->num_heads * m->head_dim, key = m->num_kv_heads * m->head_dim;
    int64_t first, last;
    split(r->job->num_tokens, r->thread, r->threads, &first, &last);
    for (int64_t token = first; token < last; token++) {
        float *qkv = r->scratch.qkv + token * (query + 2 * key);
        normalise(&layer->q_norm, qkv, query, qkv);
        normalise(&layer->k_norm, qkv + query, key, qkv + query);
    }
    us_meet(r->team);
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
        norm_head(layer, &layer->q_norm, q, h, D);
        if (table) rotate(q, table, m->rope_width, layer->is_halved);
        for (int32_t i = 0; i < D; i++) q[i] *= layer->scale;
    }
    float *k = qkv + (size_t)(H + kv) * D, *v = qkv + (size_t)(H + KV + kv) * D;
    norm_head(layer, &layer->k_norm, k, kv, D);
    if (table) rotate(k, table, m->rope_width, layer->is_halved);
    if (job->own.rooms) return; /* kept once all have read what it is written over */
    float *to = find_place(&job->own, l, job->own_rows[token], job->own_places[token]) + (size_t)kv * D;
    memcpy(to, k, sizeof(float) * (size_t)D);
    memcpy(to + (size_t)KV * D, v, sizeof(float) * (size_t)D);
}

/* Let a ring have one token's keys and values, unless a later one of the call takes their place. */
static void keep_head(const run *r, int32_t l, int32_t token, int32_t kv) {
    const us_job *job = r->job;
    const int32_t D = r->model->head_dim, H = r->model->num_heads, KV = r->model->num_kv_heads, room = job->own.rooms[l];
    const int32_t later = job->num_tokens - token > room ? token + room : token;
    if (later > token && job->firsts[later] == job->firsts[token]) return;
    const float *k = r->scratch.qkv + ((size_t)token * (H + 2 * KV) + H + kv) * D;
    float *to = find_place(&job->own, l, job->own_rows[token], job->own_places[token]) + (size_t)kv * D;
    memcpy(to, k, sizeof(float) * (size_t)D);
    memcpy(to + (size_t)KV * D, k + (size_t)KV * D, sizeof(float) * (size_t)D);
}

/* The first and the last part of a token's keys. Parts begin at multiples of US_PART whatever else is computed, so that
 * the same token is read by the same arithmetic alone and in a batch, by one thread and by many. */
static void find_parts(const run *r, const us_layer *layer, int32_t token, int32_t *from, int32_t *first, int32_t *last) {
    const int32_t all = r->job->shared_counts[token] + r->job->own_places[token] + 1;
    *from = layer->window && all > layer->window ? all - layer->window : 0;
    *first = *from / US_PART;
    *last = (all - 1) / US_PART;
}

/* Where a token's own keys begin, of those that it reads. */
static const float *find_own(const run *r, const us_layer *layer, int32_t l, int32_t token, int32_t kv) {
    const us_job *job = r->job;
    int32_t from, first, last;
    find_parts(r, layer, token, &from, &first, &last);
    const int32_t place = first * US_PART - job->shared_counts[token];
    return find_place(&job->own, l, job->own_rows[token], place > 0 ? place : 0) + (int64_t)kv * r->model->head_dim;
}

#define MOST_SEGMENTS 8 /* a part of 64 places in blocks of 16, cut where own places begin; a ring's two ends and new ones */

/* The places from `begin` to `end` of a row, as segments from number `num` on; how many there are then. What lies a part
 * further, up to `last`, is read next. */
static int32_t cut_places(const us_store *s, int32_t l, int32_t row, int32_t begin, int32_t end, int32_t last, int64_t head,
                          int32_t values, segment *out, int32_t num) {
    while (begin < end) {
        const int32_t run = count_run(s, l, begin), count = end - begin < run ? end - begin : run;
        out[num] = (segment){.keys = find_place(s, l, row, begin) + head, .stride = s->position_stride, .count = count, .values = values};
        if (!s->rooms && begin + US_PART < last) out[num].ahead = find_place(s, l, row, begin + US_PART) + head;
        num++;
        begin += count;
    }
    return num;
}

/* One part of the keys of one key head, for some of its query heads. `next` is the token that is read after the last
 * part; -1: none. */
static void attend_part(run *r, const us_layer *layer, int32_t l, int32_t token, int32_t next, int32_t kv, int32_t head,
                        int32_t count, int32_t part, reading *got) {
    const us_model *m = r->model;
    const us_job *job = r->job;
    const int32_t D = m->head_dim, heads = m->num_heads + 2 * m->num_kv_heads, values = m->num_kv_heads * D;
    const int32_t shared = job->shared_counts[token], all = shared + job->own_places[token] + 1;
    const int64_t at = (int64_t)kv * D;
    int32_t begin = part * US_PART, end = begin + US_PART < all ? begin + US_PART : all, num = 0;
    if (layer->window && begin < all - layer->window) begin = all - layer->window;
    packed_segment packed = {0};
    segment segments[MOST_SEGMENTS];
    if (begin < shared) {
        const int32_t stop = end < shared ? end : shared;
        if (job->packed) {
            const us_packed_layer *from = job->packed + l;
            int64_t row = job->shared_rows[token];
            int32_t place = begin - (from->slides ? job->bases[token] : 0);
            if (from->table) { /* a part lies in one block */
                row = from->table[row * from->width + place / from->places];
                place %= from->places;
            }
            packed = (packed_segment){&job->packing, from, row * m->num_kv_heads + kv, place, stop - begin};
        } else
            num = cut_places(&job->shared, l, job->shared_rows[token], begin, stop, shared, at, values, segments, num);
    }
    if (end > shared) {
        const int32_t first = job->firsts[token], place = begin > shared ? begin - shared : 0;
        int32_t held = end - shared; /* places that the store holds; a ring gets the new ones later */
        if (job->own.rooms && held > job->own_places[first]) held = job->own_places[first];
        num = cut_places(&job->own, l, job->own_rows[token], place, held, all - shared, at, values, segments, num);
        if (held < end - shared) {
            const int32_t from = place > held ? place : held;
            const float *new = r->scratch.qkv + ((size_t)(first + from - held) * heads + m->num_heads) * D + at;
            segments[num++] = (segment){.keys = new, .stride = heads * D, .count = end - shared - from, .values = values};
        }
        if (end == all && next >= 0) segments[num - 1].ahead = find_own(r, layer, l, next, kv);
    }
    const float *q = r->scratch.qkv + ((size_t)token * heads + head) * D;
    const score_terms terms = {
        .slopes = m->slopes ? m->slopes + head : NULL,
        .biases = layer->biases ? layer->biases + (int64_t)head * m->num_distances + all - 1 - begin : NULL,
        .num_distances = m->num_distances,
    };
    read_part(m, q, &terms, count, &packed, segments, num, begin, &r->tiles, got);
}

static float *find_kept(const run *r, int32_t token, int32_t part, int32_t head) {
    return r->scratch.parts + (((size_t)token * r->max_parts + part) * r->model->num_heads + head) * (r->model->head_dim + 2);
}

/* One part of one token's key head, kept to be merged later. */
static void attend_kept(run *r, const us_layer *layer, int32_t l, int32_t token, int32_t kv, int32_t part) {
    const us_model *m = r->model;
    const int32_t D = m->head_dim, G = m->num_heads / m->num_kv_heads;
    int32_t from, first, last;
    find_parts(r, layer, token, &from, &first, &last);
    if (part < first || part > last) return;
    reading got;
    for (int32_t g0 = 0; g0 < G; g0 += MOST_GROUP) {
        const int32_t count = G - g0 < MOST_GROUP ? G - g0 : MOST_GROUP, head = kv * G + g0;
        attend_part(r, layer, l, token, -1, kv, head, count, part, &got);
        for (int g = 0; g < count; g++) {
            float *kept = find_kept(r, token, part, head + g);
            kept[0] = got.most[g];
            kept[1] = got.total[g];
            memcpy(kept + 2, got.read + (size_t)g * D, sizeof(float) * (size_t)D);
        }
    }
}

/* The share of attention that a head's sink takes, beside weights relative to their largest score. */
static float find_sink(const us_layer *layer, int32_t head, float most) {
    return layer->sinks ? expf(layer->sinks[head] - most) : 0.0f;
}

#define MOST_RUN 16 /* tokens that read a part one after the other, while it is in the cache */

/* Some key heads of a few tokens of one row. All heads read a part before any reads the next one: what lies side by side
 * in memory is read in one sweep. `next` is the token that this thread reads after them; -1: none. */
static void attend_run(run *r, const us_layer *layer, int32_t l, int32_t token, int32_t tokens, int32_t next, int32_t kv,
                       int32_t num_kv) {
    const us_model *m = r->model;
    const int32_t D = m->head_dim, H = m->num_heads, G = H / m->num_kv_heads;
    int32_t from, first[MOST_RUN], last[MOST_RUN], lowest = INT32_MAX, highest = 0;
    for (int32_t t = 0; t < tokens; t++) {
        find_parts(r, layer, token + t, &from, &first[t], &last[t]);
        lowest = first[t] < lowest ? first[t] : lowest;
        highest = last[t] > highest ? last[t] : highest;
    }
    reading got;
    for (int32_t part = lowest; part <= highest; part++)
        for (int32_t g0 = kv * G, head; g0 < (kv + num_kv) * G; g0 += head) {
            const int32_t left = G - g0 % G;
            head = left < MOST_GROUP ? left : MOST_GROUP; /* query heads at a time, all of one key head */
            for (int32_t t = 0; t < tokens; t++) {
                if (part < first[t] || part > last[t]) continue;
                const size_t at = (size_t)(token + t) * H + g0;
                float *read = r->scratch.read + at * D, *tally = r->scratch.tallies + 2 * at;
                attend_part(r, layer, l, token + t, next, g0 / G, g0, head, part, &got);
                for (int g = 0; g < head; g++, read += D, tally += 2) {
                    if (part == first[t]) {
                        memset(read, 0, sizeof(float) * (size_t)D);
                        tally[0] = -INFINITY, tally[1] = 0;
                    }
                    merge(&tally[0], &tally[1], read, got.most[g], got.total[g], got.read + (size_t)g * D, D);
                    const float whole = tally[1] + find_sink(layer, g0 + g, tally[0]);
                    for (int32_t i = 0; i < D && part == last[t]; i++) read[i] /= whole;
                }
            }
        }
}

static void attend(run *r, const us_layer *layer, int32_t l) {
    const int32_t KV = r->model->num_kv_heads, tokens = r->job->num_tokens, parts = r->own_parts;
    int64_t first, last;
    if (layer->head_norm == US_WHOLE) norm_whole(r, layer);
    split((int64_t)tokens * KV, r->thread, r->threads, &first, &last);
    for (int64_t i = first; i < last; i++) place_head(r, layer, l, (int32_t)(i / KV), (int32_t)(i % KV));
    us_meet(r->team); /* tokens of one row read each other's keys */
    if (parts) {
        split((int64_t)tokens * parts * KV, r->thread, r->threads, &first, &last);
        /* Many parts are read in one sweep over memory, all heads of each. The last part is short: where there are few,
         * a thread that got more of those would wait, so they are shared out head by head. */
        const int32_t sweeps = parts >= 4 * r->threads;
        for (int64_t i = first; i < last; i++) {
            const int32_t rest = (int32_t)(i % ((int64_t)parts * KV));
            attend_kept(r, layer, l, (int32_t)(i / ((int64_t)parts * KV)), sweeps ? rest % KV : rest / parts,
                        sweeps ? rest / KV : rest % parts);
        }
    } else
        for (int64_t i = first; i < last;) { /* whole tokens of one row together, and at the ends some heads of one */
            const int32_t token = (int32_t)(i / KV), kv = (int32_t)(i % KV), whole = kv ? 0 : (int32_t)((last - i) / KV);
            const int32_t *rows = r->job->own_rows + token, most = last - i < KV - kv ? (int32_t)(last - i) : KV - kv;
            int32_t count = 1;
            while (count < whole && count < MOST_RUN && rows[count] == rows[0]) count++;
            i += whole ? count * KV : most;
            attend_run(r, layer, l, token, count, i < last ? token + count : -1, kv, whole ? KV : most);
        }
    us_meet(r->team);
    if (!r->job->own.rooms) return;
    split((int64_t)tokens * KV, r->thread, r->threads, &first, &last);
    for (int64_t i = first; i < last; i++) keep_head(r, l, (int32_t)(i / KV), (int32_t)(i % KV));
}

/* Merge the kept parts of a token's heads, from the first to the last, into `out` (heads, width). */
static void join_parts(const run *r, const us_layer *layer, int32_t token, int32_t first, int32_t last, float *out) {
    const int32_t D = r->model->head_dim, H = r->model->num_heads;
    for (int32_t h = 0; h < H; h++, out += D) {
        float most = -INFINITY, total = 0;
        memset(out, 0, sizeof(float) * (size_t)D);
        for (int32_t part = first; part <= last; part++) {
            const float *kept = find_kept(r, token, part, h);
            merge(&most, &total, out, kept[0], kept[1], kept + 2, D);
        }
        total += find_sink(layer, h, most);
        for (int32_t i = 0; i < D; i++) out[i] /= total;
    }
}

#include "cross.h"

/* --- what goes into products ------------------------------------------------------------------------------------- */
enum source { NORMED, READ, CROSS_READ, FED, CHOSEN };

static int32_t count_read(const us_job *job) { return (1 + job->num_early) * job->num_wanted; }

/* Prepare the rows that a product multiplies, as the matrix wants them. */
static input prepare(run *r, const us_matrix *w, enum source source, const us_norm *norm, const us_layer *layer) {
    const us_scratch *s = &r->scratch;
    const us_job *job = r->job;
    const int32_t rows = source == CHOSEN ? count_read(job) : job->num_tokens, K = w->columns, H = r->model->hidden;
    const size_t at = r->is_private ? (size_t)r->thread : 0;
    float *normed = s->normed + at * s->normed_size, *scales = s->scales + at * s->scales_size;
    float *sums = s->sums + at * s->scales_size;
    int32_t *offsets = s->offsets + 2 * at * s->scales_size;
    int8_t *quants = s->quants + at * s->quants_size;
    input in = {.stride = (size_t)K, .x = normed, .quantised = {quants, scales, sums, offsets}};
    int64_t first = 0, last = rows;
    if (!r->is_private) split(rows, r->thread, r->threads, &first, &last);
    if (source == FED) in.x = s->fed;
    if ((source == READ || source == CROSS_READ) && !r->max_parts) in.x = s->read;
    for (int64_t row = first; row < last; row++) {
        if (source == NORMED) normalise(norm, s->x + row * H, H, normed + row * K);
        if (source == CHOSEN && row < job->num_wanted)
            normalise(norm, s->x + (int64_t)job->wanted[row] * H, H, normed + row * K);
        if (source == CHOSEN && row >= job->num_wanted) /* early states are read as they are */
            memcpy(normed + row * K, job->early_states + (row - job->num_wanted) * H, sizeof(float) * (size_t)H);
        if (source == CHOSEN && r->model->head_scale != 1.0f)
            for (int32_t i = 0; i < K; i++) normed[row * K + i] *= r->model->head_scale;
        if (source == READ && r->max_parts) {
            int32_t from, begin, end;
            find_parts(r, layer, (int32_t)row, &from, &begin, &end);
            join_parts(r, layer, (int32_t)row, begin, end, normed + row * K);
        }
        if (source == CROSS_READ && r->max_parts)
            join_parts(r, layer, (int32_t)row, 0, (job->source_lengths[row] - 1) / US_PART, normed + row * K);
        if (!us_is_plain(w->kind))
            quantise(in.x + row * K, K, (int32_t)row, find_panel(w, (int32_t)row, rows), quants, scales, sums, offsets);
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

/* Normalise the state after a residual sum, in models whose norms follow those. */
static void normalise_states(run *r, const us_norm *norm) {
    const int32_t H = r->model->hidden;
    int64_t first, last;
    if (!r->model->is_post) return;
    split(r->job->num_tokens, r->thread, r->threads, &first, &last);
    for (int64_t row = first; row < last; row++) normalise(norm, r->scratch.x + row * H, H, r->scratch.x + row * H);
    us_meet(r->team);
}

/* The norm before a part of a block: none where norms follow the sums. */
static const us_norm *find_norm(const us_model *m, const us_norm *norm) {
    static const us_norm none = {.kind = US_COPY};
    return m->is_post ? &none : norm;
}

/* The part of a block that reads the source. */
static void read_source(run *r, const us_layer *layer, int32_t l) {
    const us_scratch *s = &r->scratch;
    const int32_t rows = r->job->num_tokens;
    input in = prepare(r, &layer->cross_q, NORMED, find_norm(r->model, &layer->cross_norm), layer);
    multiply_part(&layer->cross_q, rows, &in, &(output){.y = s->qkv, .stride = (size_t)layer->cross_q.rows}, r->thread, r->threads);
    us_meet(r->team);
    attend_source(r, layer, l);
    us_meet(r->team);
    in = prepare(r, &layer->cross_out, CROSS_READ, NULL, layer);
    multiply_part(&layer->cross_out, rows, &in, &(output){.y = s->x, .stride = (size_t)r->model->hidden, .adds = 1}, r->thread,
                  r->threads);
    us_meet(r->team);
    normalise_states(r, &layer->cross_norm);
}

#include "mixture.h"

static void run_layer(run *r, int32_t l) {
    const us_model *m = r->model;
    const us_layer *layer = m->layers + l;
    const us_scratch *s = &r->scratch;
    const int32_t rows = r->job->num_tokens;
    const size_t hidden = (size_t)m->hidden;
    input in = prepare(r, &layer->qkv, NORMED, find_norm(m, &layer->attn_norm), layer);
    multiply_part(&layer->qkv, rows, &in, &(output){.y = s->qkv, .stride = (size_t)layer->qkv.rows}, r->thread, r->threads);
    us_meet(r->team);
    attend(r, layer, l);
    in = prepare(r, &layer->out, READ, NULL, layer);
    const int32_t sides = layer->has_post_norms || m->is_parallel;
    multiply_part(&layer->out, rows, &in, &(output){.y = sides ? s->side : s->x, .stride = hidden, .adds = !sides}, r->thread,
                  r->threads);
    us_meet(r->team);
    if (layer->has_post_norms) add_normed(r, &layer->post_attn_norm);
    normalise_states(r, &layer->attn_norm);
    if (m->has_cross) read_source(r, layer, l);
    if (layer->is_mixed) {
        feed_mixture(r, layer);
        return;
    }
    in = prepare(r, &layer->up, NORMED, find_norm(m, layer->has_ffn_norm ? &layer->ffn_norm : &layer->attn_norm), layer);
    feed_part(m, &layer->up, m->ffn, rows, &in, &(output){.y = s->fed, .stride = (size_t)m->ffn}, r->thread, r->threads);
    us_meet(r->team);
    in = prepare(r, &layer->down, FED, NULL, layer);
    output to = {.y = s->x, .stride = hidden, .adds = 1};
    if (layer->has_post_norms) to = (output){.y = s->side, .stride = hidden};
    else if (m->is_parallel) to = (output){.y = s->x, .stride = hidden, .adds = 1, .extra = s->side, .extra_stride = hidden};
    multiply_part(&layer->down, rows, &in, &to, r->thread, r->threads);
    us_meet(r->team);
    if (layer->has_post_norms) add_normed(r, &layer->post_ffn_norm);
    normalise_states(r, &layer->ffn_norm);
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
        for (int64_t i = first; i < last && m->logit_cap > 0; i += LANES) {
            const int some = last - i < LANES ? (int)(last - i) : LANES;
            store_some(logits + i, m->logit_cap * tangent(load_some(logits + i, some) / m->logit_cap), some);
        }
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
    const int32_t most = job->most_keys > job->most_source ? job->most_keys : job->most_source;
    run r = {
        .model = model,
        .job = job,
        .scratch = us_lay_out(model, tokens, count_read(job), team->size, most, job->scratch),
        .team = team,
        .thread = thread,
        .threads = team->size,
        .max_parts = us_count_parts(tokens, KV, team->size, most),
        .own_parts = us_count_parts(tokens, KV, team->size, job->most_keys),
        .source_parts = us_count_parts(tokens, KV, team->size, job->most_source),
        .is_private = us_is_private(tokens),
    };
    for (int which = 0; which < 2; which++)
        r.tiles.numbers[which] = r.scratch.tiles + (size_t)(2 * thread + which) * US_PART * (size_t)model->head_dim;
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
    int32_t *offsets = (int32_t *)(sums + (size_t)rows * blocks);
    int64_t first, last;
    if (!us_is_plain(w->kind)) {
        split(rows, thread, team->size, &first, &last);
        for (int64_t row = first; row < last; row++)
            quantise(task->x + row * K, K, (int32_t)row, find_panel(w, (int32_t)row, rows), quants, scales, sums, offsets);
        us_meet(team);
    }
    input in = {.stride = (size_t)K, .x = task->x, .quantised = {quants, scales, sums, offsets}};
    multiply_part(w, rows, &in, &(output){.y = task->y, .stride = (size_t)w->rows}, thread, team->size);
}

#include "marks.h"
#include "tournament.h"
#include "draws.h"
#include "own_lists.h"

#define TEXT(a) #a
#define QUOTED(a) TEXT(a)
const us_kernels NAMED(us_, US_NAME) = {QUOTED(US_NAME), run_once, run_steps, run_product, run_first, run_tournament,
                                         run_contexts, run_draws, run_row_draws, run_own_lists};
