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

#include "norms.h"
#include "floats.h"
#include "products.h"
#include "bit_sums.h"
#include "halves.h"
#include "half_attention.h"

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

#include "self_attention.h"
#include "cross.h"
#include "source_attention.h"

/* --- what goes into products ------------------------------------------------------------------------------------- */
enum source { NORMED, READ, CROSS_READ, FED, CHOSEN };

static int32_t count_read(const us_job *job) { return (1 + job->num_early) * job->num_wanted; }

/* Prepare the rows that a product multiplies, as the matrix wants them. */
static input prepare(run *r, const us_matrix *w, enum source source, const us_norm *norm, const us_layer *layer) {
    const us_scratch *s = &r->scratch;
    const us_job *job = r->job;
    const int32_t rows = source == CHOSEN ? count_read(job) : job->num_tokens, K = w->columns, H = r->model->hidden;
    const size_t at = r->is_private ? (size_t)r->thread : 0;
    float *normed = s->normed + at * s->normed_size;
    input in = {.stride = (size_t)K, .x = normed, .pieces = s->pieces + at * s->pieces_size,
                .quantised = {s->quants + at * s->quants_size, s->scales + at * s->scales_size, s->sums + at * s->scales_size,
                              s->offsets + 2 * at * s->scales_size}};
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
            join_parts(r, layer->sinks, (int32_t)row, begin, end, normed + row * K);
        }
        if (source == CROSS_READ && r->max_parts)
            join_parts(r, NULL, (int32_t)row, 0, (job->source_lengths[row] - 1) / US_PART, normed + row * K);
        prepare_row(w, in.x + row * K, (int32_t)row, rows, &in);
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

/* The feed-forward of a block. */
static void feed(run *r, const us_layer *layer) {
    const us_model *m = r->model;
    const us_scratch *s = &r->scratch;
    const int32_t rows = r->job->num_tokens;
    const size_t hidden = (size_t)m->hidden;
    input in = prepare(r, &layer->up, NORMED, find_norm(m, layer->has_ffn_norm ? &layer->ffn_norm : &layer->attn_norm), layer);
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
    feed(r, layer);
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

/* Keep tokens from being the likeliest, among those that a thread makes. */
static void forbid(const us_job *job, int64_t first, int64_t last, float *logits) {
    for (int32_t i = 0; i < job->num_forbidden; i++)
        if (job->forbidden[i] >= first && job->forbidden[i] < last) logits[job->forbidden[i]] = -INFINITY;
}

#include "sketch.h"

/* All logits, and this thread's likeliest tokens. */
static void make_logits(run *r, const input *in) {
    const us_model *m = r->model;
    const us_job *job = r->job;
    int64_t first, last;
    multiply_part(&m->head, count_read(job), in, &(output){.y = job->logits, .stride = (size_t)m->vocab}, r->thread, r->threads);
    split_outputs(&m->head, m->vocab, r->thread, r->threads, &first, &last); /* the columns that were made here */
    for (int32_t row = 0; row < job->num_wanted; row++) {
        float *logits = job->logits + (size_t)row * m->vocab;
        for (int64_t i = first; i < last && m->logit_cap > 0; i += LANES) {
            const int some = last - i < LANES ? (int)(last - i) : LANES;
            store_some(logits + i, m->logit_cap * tangent(load_some(logits + i, some) / m->logit_cap), some);
        }
        if (!job->likeliest) continue;
        forbid(job, first, last, logits);
        r->scratch.tops[r->thread * job->num_wanted + row] = find_top(logits, (int32_t)first, (int32_t)last);
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
    const input in = prepare(r, &m->head, CHOSEN, &m->final_norm, NULL);
    input rough;
    if (prepare_sketch(r, &in, &rough)) find_by_sketch(r, &in, &rough);
    else make_logits(r, &in);
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

/* Whether the pass stops behind a layer, to go on with fewer threads. All of them say the same. */
static int stops_behind(const run *r, int32_t layer, us_progress *progress) {
    if (layer + 1 == r->model->num_layers || !us_meet_late(r->team)) return 0;
    if (!r->thread) progress->next = layer + 1; /* read when all have left */
    return 1;
}

#include "encoder.h"

/* A pass from a layer on; whether it was made to its end. */
static int run_pass(const us_model *model, const us_job *job, int32_t first, us_progress *progress, int32_t thread, us_team *team) {
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
    if (!first) embed(&r);
    for (int32_t l = first; l < r.model->num_layers; l++) {
        keep_early(&r, l);
        run_layer(&r, l);
        if (stops_behind(&r, l, progress)) return 0;
    }
    finish(&r);
    return 1;
}

static void run_once(const void *argument, int32_t thread, us_team *team) {
    const us_run_task *task = argument;
    run_pass(task->model, task->job, task->progress->first, task->progress, thread, team);
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
    int32_t first = task->progress->first;
    for (int32_t step = steps->num_done + 1;; step++, first = 0) {
        if (!run_pass(task->model, job, first, task->progress, thread, team)) return;
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
        if (us_meet_late(team)) { /* they stand where the next step reads them */
            if (!thread) task->progress->next = 0;
            return;
        }
    }
}

static void run_product(const void *argument, int32_t thread, us_team *team) {
    const us_product_task *task = argument;
    const us_matrix *w = task->matrix;
    const int32_t K = w->columns, blocks = K / US_BLOCK, rows = task->num_rows;
    const int8_t *quants = task->scratch;
    const float *scales = (const float *)(quants + (((size_t)rows * K + 63) & ~(size_t)63)), *sums = scales + (size_t)rows * blocks;
    const int32_t *offsets = (const int32_t *)(sums + (size_t)rows * blocks);
    const input in = {.stride = (size_t)K, .x = task->x, .quantised = {quants, scales, sums, offsets}, .pieces = task->scratch};
    int64_t first, last;
    if (w->kind != US_F32 || is_paneled(w)) {
        split(rows, thread, team->size, &first, &last);
        for (int64_t row = first; row < last; row++) prepare_row(w, task->x + row * K, (int32_t)row, rows, &in);
        us_meet(team);
    }
    multiply_part(w, rows, &in, &(output){.y = task->y, .stride = (size_t)w->rows}, thread, team->size);
}

#include "marks.h"
#include "gumbel.h"
#include "tournament.h"
#include "draws.h"
#include "own_lists.h"
#include "ranks.h"

#define TEXT(a) #a
#define QUOTED(a) TEXT(a)
const us_kernels NAMED(us_, US_NAME) = {QUOTED(US_NAME), run_once, run_steps, run_product, run_first, run_lists, run_listed, run_marked, run_tournament,
                                         run_contexts, run_draws, run_row_draws, run_own_lists, run_ranks, run_normalise, run_halves,
                                         run_widen, run_sums, run_attend, run_encoder};
