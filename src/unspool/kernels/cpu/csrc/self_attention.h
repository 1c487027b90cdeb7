/* Attention of tokens over the keys of their own texts. Included by kernels.c.
 *
 * New keys are turned and written first. Keys are read in parts of US_PART places; long texts' parts are shared out among
 * threads and merged in order, so that a token has the same bits with one thread and with many.
 */
#ifndef UNSPOOL_SELF_ATTENTION_H
#define UNSPOOL_SELF_ATTENTION_H

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
 * part; -1: none. A part `is_near` if the token before has just read it. */
static void attend_part(run *r, const us_layer *layer, int32_t l, int32_t token, int32_t next, int32_t kv, int32_t head,
                        int32_t count, int32_t part, int32_t is_near, reading *got) {
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
    for (int32_t i = 0; i < num; i++) segments[i].is_near = is_near;
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
        attend_part(r, layer, l, token, -1, kv, head, count, part, 0, &got);
        for (int g = 0; g < count; g++) {
            float *kept = find_kept(r, token, part, head + g);
            kept[0] = got.most[g];
            kept[1] = got.total[g];
            memcpy(kept + 2, got.read + (size_t)g * D, sizeof(float) * (size_t)D);
        }
    }
}

/* The share of attention that a head's sink takes, beside weights relative to their largest score. */
static float find_sink(const float *sinks, int32_t head, float most) { return sinks ? expf(sinks[head] - most) : 0.0f; }

#define LEAST_KEYS 16 /* what a token costs beside its keys, in keys */
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
                attend_part(r, layer, l, token + t, next, g0 / G, g0, head, part, t > 0 && part <= last[t - 1], &got);
                for (int g = 0; g < head; g++, read += D, tally += 2) {
                    if (part == first[t]) {
                        memset(read, 0, sizeof(float) * (size_t)D);
                        tally[0] = -INFINITY, tally[1] = 0;
                    }
                    merge(&tally[0], &tally[1], read, got.most[g], got.total[g], got.read + (size_t)g * D, D);
                    const float whole = tally[1] + find_sink(layer->sinks, g0 + g, tally[0]);
                    for (int32_t i = 0; i < D && part == last[t]; i++) read[i] /= whole;
                }
            }
        }
}

/* Where a thread's share of the call's tokens and key heads begins: all have about as many keys to read. */
static int64_t find_share(const run *r, const us_layer *layer, int32_t thread) {
    const int32_t KV = r->model->num_kv_heads, tokens = r->job->num_tokens;
    int64_t costs[US_CHUNK], all = 0;
    for (int32_t token = 0; token < tokens; token++) {
        const int32_t keys = r->job->shared_counts[token] + r->job->own_places[token] + 1;
        costs[token] = LEAST_KEYS + (layer->window && keys > layer->window ? layer->window : keys);
        all += KV * costs[token];
    }
    int64_t left = all * thread / r->threads;
    for (int32_t token = 0; token < tokens; left -= KV * costs[token++])
        if (left < KV * costs[token]) return (int64_t)token * KV + left / costs[token];
    return (int64_t)tokens * KV;
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
    } else {
        first = find_share(r, layer, r->thread);
        last = find_share(r, layer, r->thread + 1);
        for (int64_t i = first; i < last;) { /* whole tokens of one row together, and at the ends some heads of one */
            const int32_t token = (int32_t)(i / KV), kv = (int32_t)(i % KV), whole = kv ? 0 : (int32_t)((last - i) / KV);
            const int32_t *rows = r->job->own_rows + token, most = last - i < KV - kv ? (int32_t)(last - i) : KV - kv;
            int32_t count = 1;
            while (count < whole && count < MOST_RUN && rows[count] == rows[0]) count++;
            i += whole ? count * KV : most;
            attend_run(r, layer, l, token, count, i < last ? token + count : -1, kv, whole ? KV : most);
        }
    }
    us_meet(r->team);
    if (!r->job->own.rooms) return;
    split((int64_t)tokens * KV, r->thread, r->threads, &first, &last);
    for (int64_t i = first; i < last; i++) keep_head(r, l, (int32_t)(i / KV), (int32_t)(i % KV));
}

/* Merge the kept parts of a token's heads, from the first to the last, into `out` (heads, width); `sinks`: the heads', or
 * NULL. */
static void join_parts(const run *r, const float *sinks, int32_t token, int32_t first, int32_t last, float *out) {
    const int32_t D = r->model->head_dim, H = r->model->num_heads;
    for (int32_t h = 0; h < H; h++, out += D) {
        float most = -INFINITY, total = 0;
        memset(out, 0, sizeof(float) * (size_t)D);
        for (int32_t part = first; part <= last; part++) {
            const float *kept = find_kept(r, token, part, h);
            merge(&most, &total, out, kept[0], kept[1], kept + 2, D);
        }
        total += find_sink(sinks, h, most);
        for (int32_t i = 0; i < D; i++) out[i] /= total;
    }
}

#endif
