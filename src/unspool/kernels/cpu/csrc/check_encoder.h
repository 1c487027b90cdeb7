/* An encoder's pass with every instruction set, beside plain C; a source has the same bits alone, beside others, and with any
 * number of threads. Part of check.c. */
#ifndef UNSPOOL_CHECK_ENCODER_H
#define UNSPOOL_CHECK_ENCODER_H

enum { MOST_SOURCES = 4 };

typedef struct {
    us_model model;
    int32_t num, lengths[MOST_SOURCES], threads;
    const float *embeddings; /* (tokens, hidden) */
} sources;

/* Encode `num` sources from `first` on. */
static void encode_some(const sources *s, int32_t first, int32_t num, int32_t threads, float *out) {
    int32_t before = 0, count = 0, longest = 0;
    for (int32_t i = 0; i < first; i++) before += s->lengths[i];
    for (int32_t i = first; i < first + num; i++) {
        count += s->lengths[i];
        longest = s->lengths[i] > longest ? s->lengths[i] : longest;
    }
    void *scratch = get((size_t)us_encoder_bytes(&s->model, count, threads, longest));
    memcpy(out, s->embeddings + (size_t)before * s->model.hidden, sizeof(float) * (size_t)count * s->model.hidden);
    us_encode(&s->model, num, s->lengths + first, out, scratch, threads);
    free(scratch);
}

static void encode_all(void *argument, const char *set, float *out) {
    const sources *s = argument;
    (void)set;
    encode_some(s, 0, s->num, s->threads, out);
}

static void check_encoder(void) {
    sources s = {.num = 1 + below(MOST_SOURCES), .threads = 1 + below(3)};
    us_model *m = &s.model;
    const int32_t kind = below(11), norm = below(2), bias = below(2), heads[] = {1, 2, 4, 8};
    int32_t tokens = 0, longest = 0;
    for (int32_t i = 0; i < s.num; i++) {
        s.lengths[i] = 1 + below(below(3) ? 30 : below(4) ? 150 : 400);
        tokens += s.lengths[i];
        longest = s.lengths[i] > longest ? s.lengths[i] : longest;
    }
    m->num_layers = 1 + below(2);
    m->num_heads = m->num_kv_heads = is_super(kind) ? 8 : heads[below(4)];
    m->head_dim = kind == US_F32 ? 8 * (1 + below(10)) : 32;
    m->hidden = is_super(kind) ? US_SUPER : 32 * (1 + below(3));
    m->ffn = is_super(kind) ? US_SUPER : 32 * (1 + below(3));
    m->is_gated = below(2);
    m->activation = below(5);
    m->is_post = below(2);
    m->num_distances = longest + below(3);
    m->final_norm = below(2) ? random_norm(norm, m->hidden) : (us_norm){.kind = US_COPY};
    us_layer *layers = keep(calloc((size_t)m->num_layers, sizeof(us_layer)));
    for (int32_t l = 0; l < m->num_layers; l++) {
        us_layer *y = layers + l;
        y->attn_norm = random_norm(norm, m->hidden);
        y->ffn_norm = random_norm(norm, m->hidden);
        y->has_ffn_norm = 1;
        y->qkv = random_mixture(kind, 3 * m->num_heads * m->head_dim, m->hidden, bias);
        y->out = random_matrix(kind, m->hidden, m->num_heads * m->head_dim, bias);
        y->up = random_mixture(kind, m->ffn * (1 + m->is_gated), m->hidden, bias);
        y->down = random_matrix(kind, m->hidden, m->ffn, bias);
        y->scale = 1.0f / sqrtf((float)m->head_dim);
        y->biases = below(2) ? keep(floats((size_t)m->num_heads * (2 * (size_t)m->num_distances - 1), 1.0f)) : NULL;
    }
    m->layers = layers;
    s.embeddings = keep(floats((size_t)tokens * m->hidden, 1.0f));
    const size_t count = (size_t)tokens * m->hidden;
    for_each_set(encode_all, &s, "an encoder", count, is_float(kind) ? 1e-3f : 0.1f);
    float *whole = get(sizeof(float) * count), *part = get(sizeof(float) * count);
    char names[128];
    strcpy(names, us_available());
    for (char *rest = names, *name; (name = strtok(rest, ",")); rest = NULL) {
        if (us_use_instructions(name)) abort();
        encode_some(&s, 0, s.num, s.threads, whole);
        for (int32_t i = 0, at = 0; i < s.num; at += s.lengths[i++]) {
            encode_some(&s, i, 1, 1 + below(3), part);
            if (!memcmp(part, whole + (size_t)at * m->hidden, sizeof(float) * (size_t)s.lengths[i] * m->hidden)) continue;
            printf("an encoder with %s: source %d of %d has other numbers alone\n", name, (int)i, (int)s.num);
            num_wrong++;
        }
    }
    free(whole), free(part);
    let_go();
}

#endif
