/* An encoder's pass: tokens that read all tokens of their source. Included by kernels.c.
 *
 * Sources lie one behind the other, without padding. A block's keys and values stay where its first product puts them.
 */
#ifndef UNSPOOL_ENCODER_H
#define UNSPOOL_ENCODER_H

static void encode_layer(run *r, const us_encoder_task *task, const us_layer *layer) {
    const us_model *m = r->model;
    const us_scratch *s = &r->scratch;
    const int32_t rows = r->job->num_tokens;
    input in = prepare(r, &layer->qkv, NORMED, find_norm(m, &layer->attn_norm), layer);
    multiply_part(&layer->qkv, rows, &in, &(output){.y = s->qkv, .stride = (size_t)layer->qkv.rows}, r->thread, r->threads);
    us_meet(r->team);
    const token_sources sources = {.qkv = s->qkv, .read = s->read, .lengths = task->lengths, .biases = layer->biases,
                                .num_sources = task->num_sources, .num_heads = m->num_heads, .width = m->head_dim,
                                .num_places = m->num_distances, .scale = layer->scale};
    attend_sources(&sources, task->rooms + (size_t)r->thread * task->room_size, r->thread, r->threads);
    us_meet(r->team);
    in = prepare(r, &layer->out, READ, NULL, layer);
    multiply_part(&layer->out, rows, &in, &(output){.y = s->x, .stride = (size_t)m->hidden, .adds = 1}, r->thread, r->threads);
    us_meet(r->team);
    normalise_states(r, &layer->attn_norm);
    feed(r, layer);
}

static void run_encoder(const void *argument, int32_t thread, us_team *team) {
    const us_encoder_task *task = argument;
    const us_model *m = task->model;
    const us_job *job = task->job;
    run r = {
        .model = m,
        .job = job,
        .scratch = us_lay_out(m, job->num_tokens, 0, team->size, 0, job->scratch),
        .team = team,
        .thread = thread,
        .threads = team->size,
        .is_private = us_is_private(job->num_tokens),
    };
    int64_t first, last;
    split(job->num_tokens, thread, team->size, &first, &last);
    const size_t begin = (size_t)first * (size_t)m->hidden, count = (size_t)(last - first) * (size_t)m->hidden;
    const int32_t from = task->progress->first;
    if (!from) memcpy(r.scratch.x + begin, job->states + begin, sizeof(float) * count);
    us_meet(team);
    for (int32_t l = from; l < m->num_layers; l++) {
        encode_layer(&r, task, m->layers + l);
        if (stops_behind(&r, l, task->progress)) return;
    }
    for (int64_t row = first; row < last; row++)
        normalise(&m->final_norm, r.scratch.x + row * m->hidden, m->hidden, job->states + row * m->hidden);
}

#endif
