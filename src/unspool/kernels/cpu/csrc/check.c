/* Random shapes and values through every instruction set that the machine has, each against plain C.
 *
 * Every buffer has exactly the size that Python gives it, so that the sanitizers see one byte too many. A program of
 * its own: `make sanitize` builds it with the sanitizers, tools/check_cpu_library.py for other processors.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "crowding.h"
#include "unspool_cpu.h"

#include "check_random.h"

static int num_wrong;

static void compare(const char *what, const char *set, const float *a, const float *b, size_t n, float tolerance) {
    double off = 0, size = 0;
    for (size_t i = 0; i < n; i++) {
        if (!isfinite(a[i])) {
            printf("%s with %s: number %zu is not finite\n", what, set, i);
            num_wrong++;
            return;
        }
        off += (double)(a[i] - b[i]) * (a[i] - b[i]);
        size += (double)b[i] * b[i];
    }
    if (off > (double)tolerance * tolerance * (size + 1e-12)) {
        printf("%s with %s: off by %g\n", what, set, sqrt(off / (size + 1e-12)));
        num_wrong++;
    }
}

/* Call `each` for plain C, then for every other set, with a place for its results. */
static void for_each_set(void (*each)(void *, const char *, float *), void *argument, const char *what, size_t n, float tolerance) {
    float *expected = get(n * sizeof(float)), *made = get(n * sizeof(float));
    char names[128];
    us_use_instructions("plain");
    each(argument, "plain", expected);
    compare(what, "plain", expected, expected, n, 1);
    strcpy(names, us_available());
    for (char *rest = names, *name; (name = strtok(rest, ",")); rest = NULL) {
        if (!strcmp(name, "plain")) continue;
        if (us_use_instructions(name)) abort();
        each(argument, name, made);
        compare(what, name, made, expected, n, tolerance);
    }
    free(expected);
    free(made);
}

typedef struct {
    us_matrix matrix;
    const float *x;
    int32_t num_rows, threads;
} product;

static void multiply(void *argument, const char *set, float *y) {
    const product *p = argument;
    void *scratch = get((size_t)us_product_bytes(&p->matrix, p->num_rows));
    (void)set;
    us_product(&p->matrix, p->x, p->num_rows, y, scratch, p->threads);
    free(scratch);
}

static void check_product(void) {
    product p = {.num_rows = 1 + below(below(2) ? 9 : below(4) ? 40 : 260), .threads = 1 + below(3)};
    const int32_t kind = below(11), unit = kind == US_F32 && below(2) ? US_BLOCK : count_columns(kind);
    const int32_t columns = unit * (1 + below(unit == 1 ? 200 : is_super(kind) ? 2 : 6));
    p.matrix = random_mixture(kind, 1 + below(50), columns, below(2));
    p.x = keep(floats((size_t)p.num_rows * columns, 1.0f));
    for_each_set(multiply, &p, "a product", (size_t)p.num_rows * p.matrix.rows, 1e-5f);
    let_go();
}

typedef struct {
    us_model model;
    us_job job;
    float **start, **own, **shared; /* start: what the own store holds before the run */
    size_t store_size;
    int32_t threads;
} whole;

static int32_t count_most(const us_job *job) { return job->most_keys > job->most_source ? job->most_keys : job->most_source; }

static void run(void *argument, const char *set, float *out) {
    whole *w = argument;
    for (int32_t l = 0; l < w->model.num_layers; l++) memcpy(w->own[l], w->start[l], w->store_size * sizeof(float));
    w->job.scratch = get((size_t)us_scratch_bytes(&w->model, w->job.num_tokens, (1 + w->job.num_early) * w->job.num_wanted, w->threads,
                                                   count_most(&w->job)));
    w->job.logits = out;
    us_run(&w->model, &w->job, w->threads);
    for (int32_t row = 0; row < w->job.num_wanted; row++) {
        const float *logits = out + (size_t)row * w->model.vocab;
        int32_t best = 0;
        for (int32_t i = 1; i < w->model.vocab; i++) best = logits[i] > logits[best] ? i : best;
        if (w->job.likeliest[row] != best) {
            printf("the likeliest token with %s: %d, not %d\n", set, (int)w->job.likeliest[row], best);
            num_wrong++;
        }
    }
    free(w->job.scratch);
}

/* How many threads there are changes no bit. */
static void check_threads(whole *w, size_t n) {
    float *alone = get(n * sizeof(float)), *made = get(n * sizeof(float));
    const int32_t threads = w->threads;
    char names[128];
    strcpy(names, us_available());
    for (char *rest = names, *name; (name = strtok(rest, ",")); rest = NULL) {
        if (us_use_instructions(name)) abort();
        w->threads = 1;
        run(w, name, alone);
        for (w->threads = 2; w->threads <= 3; w->threads++) {
            run(w, name, made);
            if (!memcmp(alone, made, n * sizeof(float))) continue;
            printf("a run with %s: %d threads change it\n", name, (int)w->threads);
            num_wrong++;
        }
    }
    w->threads = threads;
    free(alone);
    free(made);
}

#include "check_passes.h"
#include "check_sketch.h"
#include "check_encoder.h"
#include "check_layouts.h"

/* Let the shared keys of a run be packed ones: so many positions of each row, in some layers from the row's base on. */
static void pack_keys(const us_model *m, us_job *job, int32_t rows, int32_t block, const int32_t *packed, const int32_t *bases) {
    us_packed_layer *made = keep(calloc((size_t)m->num_layers, sizeof *made));
    const size_t heads = (size_t)rows * m->num_kv_heads;
    job->packing = (us_packing){random_scheme(m->head_dim, block), random_scheme(m->head_dim, block)};
    for (int32_t l = 0; l < m->num_layers; l++) {
        us_packed_layer *y = made + l;
        y->slides = m->layers[l].window && below(2);
        for (int32_t row = 0; row < rows; row++) {
            const int32_t held = packed[row] - (y->slides ? bases[row] : 0);
            y->places = held > y->places ? held : y->places;
        }
        y->keys = random_packed(&job->packing.keys, heads, (int32_t)y->places, m->head_dim);
        y->values = random_packed(&job->packing.values, heads, (int32_t)y->places, m->head_dim);
    }
    job->packed = made;
}

/* Let every row of a run read a source, some the same one. */
static void add_sources(const us_model *m, us_job *job) {
    const int32_t num = 1 + below(3), room = 1 + below(200);
    const size_t position = (size_t)2 * m->num_heads * m->head_dim;
    float **layers = keep(get(sizeof(float *) * (size_t)m->num_layers));
    for (int32_t l = 0; l < m->num_layers; l++) layers[l] = keep(floats((size_t)num * room * position, 1.0f));
    int32_t lengths[3], *sources = keep(get(sizeof(int32_t) * US_CHUNK)), *counts = keep(get(sizeof(int32_t) * US_CHUNK));
    for (int32_t i = 0; i < num; i++) lengths[i] = 1 + below(room);
    for (int32_t token = 0; token < job->num_tokens; token++) {
        sources[token] = job->own_rows[token] * num / 3;
        counts[token] = lengths[sources[token]];
        job->most_source = counts[token] > job->most_source ? counts[token] : job->most_source;
    }
    job->cross = (us_store){layers, (int64_t)((size_t)room * position), (int64_t)position, NULL, NULL, 0, 0};
    job->sources = sources;
    job->source_lengths = counts;
}

/* Let a layer have experts. Which of them tokens choose must not depend on an instruction set's rounding, so biases of the
 * choice lie far apart. */
static void add_experts(const us_model *m, us_layer *y, int32_t kind, int32_t bias) {
    float *choice = keep(floats((size_t)m->num_experts, 0.0f));
    for (int32_t e = 0; e < m->num_experts; e++) choice[e] = (float)((e * 5 + below(2)) % 7) * 3.0f + 0.1f * (float)e;
    y->is_mixed = 1;
    y->choice_bias = choice;
    y->router = random_matrix(US_F32, m->num_experts, m->hidden, bias);
    y->up = random_matrix(kind, m->num_experts * 2 * m->expert_ffn, m->hidden, bias);
    y->down = random_matrix(kind, m->num_experts * m->hidden, m->expert_ffn, bias);
    if (!m->shared_ffn) return;
    y->shared_up = random_matrix(kind, 2 * m->shared_ffn, m->hidden, bias);
    y->shared_down = random_matrix(kind, m->hidden, m->shared_ffn, bias);
    y->shared_gate = below(2) ? keep(floats((size_t)m->hidden, 0.3f)) : NULL;
}

static void check_run(void) {
    whole w = {.threads = 1 + below(3)};
    us_model *m = &w.model;
    us_job *job = &w.job;
    const int32_t group = 1 + below(9), widths[] = {8, 16, 64, 80};
    const int32_t kind = below(11), norm = below(2), bias = below(2), width = is_super(kind) ? US_SUPER : 32;
    m->num_layers = 1 + below(2);
    m->num_kv_heads = 1 + below(3);
    m->num_heads = m->num_kv_heads * group;
    m->head_dim = kind == US_F32 ? widths[below(4)] : 32 * (1 + below(2));
    if (is_super(kind)) {
        m->num_kv_heads = 1 << below(3);
        m->num_heads = 8;
        m->head_dim = 32;
    }
    m->hidden = is_super(kind) ? US_SUPER : 32 * (1 + below(3));
    m->ffn = is_super(kind) ? US_SUPER * (1 + below(2)) : 32 * (1 + below(4));
    m->vocab = 8 + below(90);
    m->rope_width = 2 * (1 + below(m->head_dim / 2));
    m->is_parallel = below(2);
    m->is_gated = below(2);
    m->activation = below(6);
    m->gate_gain = 1.7f, m->gate_limit = 0.5f;
    m->embedding_scale = 1.5f;
    m->head_scale = below(2) ? 1.0f : 0.5f;
    m->is_post = !m->is_parallel && below(2);
    m->has_cross = !m->is_parallel && below(2);
    const int has_experts = !m->is_parallel && !m->is_post && below(2);
    if (has_experts) {
        m->is_gated = 1;
        m->num_experts = 1 + below(6);
        m->num_chosen = 1 + below(m->num_experts);
        m->expert_ffn = width * (1 + below(2));
        m->shared_ffn = below(2) ? width * (1 + below(2)) : 0;
        m->is_sigmoid = below(2), m->is_normalised = below(2);
        m->weight_scale = 1.3f;
    }
    m->attention_cap = below(2) ? 20.0f : 0;
    m->logit_cap = below(2) ? 10.0f : 0;
    m->embedding = random_matrix(kind, m->vocab, m->hidden, 0);
    m->head = random_matrix(kind, m->vocab, m->hidden, bias);
    m->has_embedding_norm = below(2);
    m->embedding_norm = random_norm(norm, m->hidden);
    m->final_norm = random_norm(norm, m->hidden);
    m->slopes = below(2) ? keep(floats((size_t)m->num_heads, 0.1f)) : NULL;
    us_layer *layers = keep(calloc((size_t)m->num_layers, sizeof(us_layer)));
    const int32_t rows = 1 + below(3), room = 1 + below(300), shared_room = below(2) ? 1 + below(200) : 0;
    const int32_t longest = room + shared_room;
    m->positions = below(2) ? keep(floats((size_t)longest * m->hidden, 0.1f)) : NULL;
    m->num_distances = longest + below(3);
    for (int32_t l = 0; l < m->num_layers; l++) {
        us_layer *y = layers + l;
        y->attn_norm = random_norm(norm, m->hidden);
        y->ffn_norm = random_norm(norm, m->hidden);
        y->post_attn_norm = random_norm(norm, m->hidden);
        y->post_ffn_norm = random_norm(norm, m->hidden);
        y->head_norm = below(4);
        y->q_norm = random_norm(US_RMS, m->head_dim * (y->head_norm < US_EACH ? 1 : m->num_heads));
        y->k_norm = random_norm(US_RMS, m->head_dim * (y->head_norm < US_EACH ? 1 : m->num_kv_heads));
        y->has_ffn_norm = below(2);
        y->has_post_norms = !m->is_parallel && !m->is_post && below(2);
        y->window = below(2) ? 1 + below(longest) : 0;
        y->qkv = random_mixture(kind, (m->num_heads + 2 * m->num_kv_heads) * m->head_dim, m->hidden, bias);
        y->out = random_matrix(kind, m->hidden, m->num_heads * m->head_dim, bias);
        y->up = random_mixture(kind, m->ffn * (1 + m->is_gated), m->hidden, bias);
        y->down = random_matrix(kind, m->hidden, m->ffn, bias);
        y->rope = below(2) ? keep(floats((size_t)longest * m->rope_width, 1.0f)) : NULL;
        y->scale = 1.0f / sqrtf((float)m->head_dim);
        y->is_halved = below(2);
        y->cross_norm = random_norm(norm, m->hidden);
        y->cross_q = random_matrix(kind, m->num_heads * m->head_dim, m->hidden, bias);
        y->cross_out = random_matrix(kind, m->hidden, m->num_heads * m->head_dim, bias);
        y->biases = below(2) ? keep(floats((size_t)m->num_heads * m->num_distances, 1.0f)) : NULL;
        y->sinks = below(2) ? keep(floats((size_t)m->num_heads, 2.0f)) : NULL;
        if (has_experts && below(3)) add_experts(m, y, kind, bias);
    }
    m->layers = layers;
    const size_t position = (size_t)2 * m->num_kv_heads * m->head_dim;
    w.store_size = (size_t)rows * room * position;
    float ***stores[] = {&w.start, &w.own, &w.shared};
    for (int s = 0; s < 3; s++) {
        *stores[s] = keep(get(sizeof(float *) * (size_t)m->num_layers));
        const size_t n = s == 2 ? (size_t)rows * shared_room * position : w.store_size;
        for (int32_t l = 0; l < m->num_layers; l++) (*stores[s])[l] = keep(floats(n, 1.0f));
    }
    job->own = (us_store){w.own, (int64_t)(room * position), (int64_t)position};
    job->shared = (us_store){w.shared, (int64_t)(shared_room * position), (int64_t)position};
    int32_t *numbers[9], count = 0;
    for (int i = 0; i < 9; i++) numbers[i] = keep(get(sizeof(int32_t) * US_CHUNK));
    const int32_t block = shared_room && below(2) ? 1 + below(shared_room < 70 ? shared_room : 70) : 0; /* 0: nothing is packed */
    int32_t shortest[3], packed[3];
    for (int32_t row = 0; row < rows; row++) {
        const int32_t start = below(room), most = room - start < 20 ? room - start : 20, shared = shared_room ? below(shared_room + 1) : 0;
        const int32_t tokens = 1 + below(most), held = block ? shared / block * block : shared;
        shortest[row] = held + start + 1, packed[row] = held;
        for (int32_t i = 0; i < tokens; i++, count++) {
            numbers[0][count] = below(m->vocab);
            numbers[1][count] = held + start + i;
            numbers[2][count] = row;
            numbers[3][count] = start + i;
            numbers[4][count] = row;
            numbers[5][count] = held;
            numbers[8][count] = count - i;
            if (held + start + i + 1 > job->most_keys) job->most_keys = held + start + i + 1;
        }
        numbers[6][job->num_wanted++] = count - 1;
    }
    job->num_tokens = count;
    job->tokens = numbers[0];
    job->positions = numbers[1];
    job->own_rows = numbers[2];
    job->own_places = numbers[3];
    job->shared_rows = numbers[4];
    job->shared_counts = numbers[5];
    job->wanted = numbers[6];
    job->bases = numbers[7];
    job->firsts = numbers[8];
    if (m->has_cross) add_sources(m, job);
    if (block) {
        int32_t bases[3];
        for (int32_t row = 0; row < rows; row++) { /* as far as every window that slides has left it behind */
            bases[row] = packed[row];
            for (int32_t l = 0; l < m->num_layers; l++) {
                const int32_t behind = layers[l].window && shortest[row] > layers[l].window ? shortest[row] - layers[l].window : 0;
                if (layers[l].window && behind < bases[row]) bases[row] = behind / block * block;
            }
            bases[row] = bases[row] / block * block;
        }
        for (int32_t token = 0; token < count; token++) numbers[7][token] = bases[numbers[2][token]];
        pack_keys(m, job, rows, block, packed, bases);
    }
    int32_t *early = keep(get(sizeof(int32_t) * (size_t)m->num_layers));
    for (int32_t l = 0; l < m->num_layers; l++)
        if (below(2)) early[job->num_early++] = l;
    job->early = early;
    job->early_states = keep(get(sizeof(float) * (size_t)(job->num_early * job->num_wanted * m->hidden)));
    job->likeliest = keep(get(sizeof(int64_t) * (size_t)job->num_wanted));
    job->states = below(2) ? keep(floats((size_t)count * m->hidden, 1.0f)) : NULL;
    /* Where a number lies between two of 8 bits, sets may round it to different sides. */
    const size_t num_logits = (size_t)((1 + job->num_early) * job->num_wanted) * m->vocab;
    for_each_set(run, &w, "a run", num_logits, is_float(kind) ? 1e-3f : 0.1f);
    check_threads(&w, num_logits);
    check_layouts(&w, rows, room, position);
    check_steps(&w, rows, room);
    check_sketch(&w);
    let_go();
}

#include "check_halves.h"
#include "check_marks.h"
#include "check_sums.h"

static void expect_threads(int is_so, const char *what) {
    if (is_so) return;
    printf("crowding: %s\n", what);
    num_wrong++;
}

/* Fewer threads after a call that waited, all of them after one that did not, and pauses that double up to a second. */
static void check_crowding(void) {
    const int64_t ms = 1000000;
    for (int32_t most = 2; most <= 64; most *= 2) {
        us_crowding c = {0};
        int64_t now = 5000 * ms, longest = 0;
        us_note_call(&c, most, most, ms / 2, ms, now);
        expect_threads(us_choose_size(&c, most, now) == most, "a short wait took threads away");
        us_note_call(&c, most, most, 2 * ms, 10 * ms, now);
        expect_threads(us_choose_size(&c, most, now) == most, "a fifth of the time took threads away");
        for (int turn = 0; turn < 20; turn++) {
            us_note_call(&c, most, most, 9 * ms, 10 * ms, now);
            const int32_t fewer = us_choose_size(&c, most, now);
            expect_threads(fewer >= 1 && fewer < most, "a crowded call left all threads");
            us_note_call(&c, fewer, most, 0, 10 * ms, now);
            expect_threads(us_choose_size(&c, most, now) == fewer, "a good call of few ended the pause");
            expect_threads(us_choose_size(&c, most, c.until) == most, "a pause that is over did not end");
            expect_threads(c.pause >= longest && c.pause <= LONGEST_PAUSE, "pauses don't grow");
            longest = c.pause;
            now = c.until;
        }
        us_note_call(&c, most, most, 0, 10 * ms, now);
        expect_threads(us_choose_size(&c, most, now) == most && !c.pause, "a good call of all left a pause");
    }
}

int main(int argc, char **argv) {
    const int rounds = argc > 1 ? atoi(argv[1]) : 200;
    if (argc > 2) state ^= strtoull(argv[2], NULL, 10) * 0x9e3779b97f4a7c15ull;
    check_crowding();
    for (int i = 0; i < rounds; i++) check_product();
    for (int i = 0; i < rounds; i++) check_run();
    for (int i = 0; i < rounds; i++) check_encoder();
    for (int i = 0; i < rounds; i++) check_halves();
    for (int i = 0; i < rounds; i++) check_marks();
    for (int i = 0; i < rounds; i++) check_sums();
    for (int i = 0; i < 10 * rounds; i++) check_layout(), check_quantised();
    printf("%d products, runs, encoders, halves, marks, masks, sums and layouts each on %s: %d wrong\n", rounds, us_available(), num_wrong);
    return num_wrong > 0;
}
