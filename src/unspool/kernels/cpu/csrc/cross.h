/* Attention of a decoder's tokens over the keys of their sources. Included by kernels.c.
 *
 * A source's keys lie in memory once. Tokens that read the same source stand side by side (beams, or a text's tokens), so
 * that a few of them read a part of its keys together, as query heads of one key head do elsewhere. Parts begin at
 * multiples of US_PART and are merged in order, so that a token has the same bits alone and in a batch.
 */
#ifndef UNSPOOL_CROSS_H
#define UNSPOOL_CROSS_H

/* Keys and values that tokens read, (rows, positions, 2, heads, width), and the queries of all tokens, (tokens, heads, width). */
typedef struct {
    const void *keys;
    int64_t row_stride, position_stride;
    const float *queries;
    size_t query_stride;
    int32_t is_half;
    float scale;
} source_keys;

static source_keys find_sources(const run *r, const us_layer *layer, int32_t l) {
    const us_store *s = &r->job->cross;
    return (source_keys){.keys = s->layers[l], .row_stride = s->row_stride, .position_stride = s->position_stride, .queries = r->scratch.qkv,
                         .query_stride = (size_t)(r->model->num_heads * r->model->head_dim), .is_half = s->is_half, .scale = layer->scale};
}

/* One head's keys and values of a part, which are float16, as floats in this thread's tiles. The next part is asked for. */
static segment widen_part(run *r, const uint16_t *keys, int64_t stride, int32_t count, int has_next) {
    const int32_t D = r->model->head_dim, width = r->model->num_heads * D;
    float *to[2] = {r->tiles.numbers[0], r->tiles.numbers[1]};
    r->tiles.held[0].layer = r->tiles.held[1].layer = NULL;
    for (int32_t j = 0; j < count; j++, keys += stride)
        for (int which = 0; which < 2; which++) {
            const uint16_t *from = keys + which * width;
            for (int32_t k = 0; has_next && k < D; k += US_LINE / 2) __builtin_prefetch(from + US_PART * stride + k, 0, 2);
            int32_t i = 0;
            for (; i + LANES <= D; i += LANES) store(to[which] + i, widen_halves(from + i));
            for (; i < D; i++) to[which][i] = half_to_float(from[i]);
            to[which] += D;
        }
    return (segment){.keys = r->tiles.numbers[0], .stride = D, .count = count, .values = US_PART * D, .is_near = 1};
}

/* One part of a source's keys, for one head of `count` tokens from `token` on. */
static void read_source_part(run *r, const source_keys *from, int32_t token, int32_t count, int32_t head, int32_t part, reading *got) {
    const us_model *m = r->model;
    const us_job *job = r->job;
    const int32_t D = m->head_dim, width = m->num_heads * D, length = job->source_lengths[token], begin = part * US_PART;
    const int32_t num_keys = length - begin < US_PART ? length - begin : US_PART, has_next = begin + 2 * US_PART <= length;
    const int64_t stride = from->position_stride, at = job->sources[token] * from->row_stride + begin * stride + (int64_t)head * D;
    segment s;
    if (from->is_half) s = widen_part(r, (const uint16_t *)from->keys + at, stride, num_keys, has_next);
    else {
        const float *keys = (const float *)from->keys + at;
        s = (segment){.keys = keys, .ahead = has_next ? keys + US_PART * stride : NULL, .stride = stride, .count = num_keys, .values = width};
    }
    float q[MOST_GROUP * US_WIDEST_HEAD];
    for (int32_t t = 0; t < count; t++) {
        const float *query = from->queries + (size_t)(token + t) * from->query_stride + (size_t)head * D;
        for (int32_t i = 0; i < D; i++) q[t * D + i] = query[i] * from->scale;
    }
    const packed_segment none = {0};
    const score_terms terms = {0};
    read_part(m, q, &terms, count, &none, &s, 1, begin, &r->tiles, got);
}

/* One head of a few tokens of one source, all parts in turn. */
static void read_whole_source(run *r, const source_keys *from, int32_t token, int32_t count, int32_t head) {
    const int32_t D = r->model->head_dim, H = r->model->num_heads, length = r->job->source_lengths[token];
    float most[MOST_GROUP], total[MOST_GROUP];
    reading got;
    for (int32_t part = 0; part * US_PART < length; part++) {
        read_source_part(r, from, token, count, head, part, &got);
        for (int32_t t = 0; t < count; t++) {
            float *read = r->scratch.read + ((size_t)(token + t) * H + head) * D;
            if (!part) {
                memset(read, 0, sizeof(float) * (size_t)D);
                most[t] = -INFINITY, total[t] = 0;
            }
            merge(&most[t], &total[t], read, got.most[t], got.total[t], got.read + (size_t)t * D, D);
        }
    }
    for (int32_t t = 0; t < count; t++) {
        float *read = r->scratch.read + ((size_t)(token + t) * H + head) * D;
        for (int32_t i = 0; i < D; i++) read[i] /= total[t];
    }
}

/* Tokens from `token` on that read the same source, at most MOST_GROUP. */
static int32_t count_alike(const us_job *job, int32_t token) {
    int32_t count = 1;
    while (token + count < job->num_tokens && count < MOST_GROUP && job->sources[token + count] == job->sources[token]) count++;
    return count;
}

/* This thread's share of groups of tokens, each with all its keys. */
static void read_sources(run *r, const source_keys *from) {
    const us_job *job = r->job;
    const int32_t H = r->model->num_heads;
    int64_t first, last, groups = 0, group = 0;
    for (int32_t token = 0; token < job->num_tokens; token += count_alike(job, token)) groups++;
    split(groups * H, r->thread, r->threads, &first, &last);
    for (int32_t token = 0, count; token < job->num_tokens && group * H < last; token += count, group++) {
        count = count_alike(job, token);
        for (int32_t head = 0; head < H; head++)
            if (group * H + head >= first && group * H + head < last) read_whole_source(r, from, token, count, head);
    }
}

/* This thread's part of the attention over sources: q of all tokens lies in scratch, (tokens, heads, width). */
static void attend_source(run *r, const us_layer *layer, int32_t l) {
    const us_job *job = r->job;
    const int32_t H = r->model->num_heads, D = r->model->head_dim, parts = r->source_parts;
    const source_keys from = find_sources(r, layer, l);
    int64_t first, last;
    if (!parts) {
        read_sources(r, &from);
        return;
    }
    split((int64_t)job->num_tokens * parts * H, r->thread, r->threads, &first, &last); /* few tokens, many threads */
    for (int64_t i = first; i < last; i++) {
        const int32_t token = (int32_t)(i / ((int64_t)parts * H)), rest = (int32_t)(i % ((int64_t)parts * H));
        const int32_t part = rest / H, head = rest % H;
        if (part * US_PART >= job->source_lengths[token]) continue;
        reading got;
        read_source_part(r, &from, token, 1, head, part, &got);
        float *kept = find_kept(r, token, part, head);
        kept[0] = got.most[0];
        kept[1] = got.total[0];
        memcpy(kept + 2, got.read, sizeof(float) * (size_t)D);
    }
}

#endif
