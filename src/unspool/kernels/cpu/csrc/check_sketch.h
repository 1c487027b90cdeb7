/* The likeliest tokens by a head's sketch are those of all logits, with every instruction set. Part of check.c. */
#ifndef UNSPOOL_CHECK_SKETCH_H
#define UNSPOOL_CHECK_SKETCH_H

/* A head's sketch, of columns of different size. */
static us_sketch make_sketch(const us_matrix *head) {
    const size_t tiles = (size_t)((head->rows + US_TILE - 1) / US_TILE) * (size_t)(head->columns / US_BLOCK);
    int32_t *all = get(sizeof(int32_t) * (size_t)head->rows);
    float *rows = get(sizeof(float) * (size_t)head->rows * head->columns), *inverses = get(sizeof(float) * (size_t)head->columns);
    us_sketch made = {.matrix = {.kind = US_Q8, .rows = head->rows, .columns = head->columns, .bias = head->bias}, .margin = 1e-6f};
    float *powers = keep(get(sizeof(float) * (size_t)head->columns)), *reaches = keep(get(2 * sizeof(float) * (size_t)head->rows));
    uint8_t *data = keep(get(tiles * 272));
    for (int32_t i = 0; i < head->rows; i++) all[i] = i;
    for (int32_t i = 0; i < head->columns; i++) {
        powers[i] = ldexpf(1.0f, below(7) - 3);
        inverses[i] = 1.0f / powers[i];
    }
    us_read_rows(head, all, head->rows, rows);
    if (!us_sketch_rows(rows, head->rows, head->columns, inverses, data, reaches, head->rows)) abort();
    made.matrix.data = data, made.powers = powers, made.reaches = reaches;
    free(all), free(rows), free(inverses);
    return made;
}

static void check_sketch(whole *w) {
    us_job *job = &w->job;
    const us_job before = *job;
    const int32_t rows = job->num_wanted;
    char names[128];
    int32_t forbidden[3] = {below(w->model.vocab), below(w->model.vocab), below(w->model.vocab)};
    int64_t expected[3], num_close;
    if (!is_float(w->model.head.kind) || has_table(w->model.head.kind) || w->model.logit_cap > 0) return;
    float *logits = get(sizeof(float) * (size_t)rows * w->model.vocab);
    w->model.sketch = make_sketch(&w->model.head);
    job->num_early = 0, job->logits = logits, job->forbidden = forbidden, job->num_forbidden = below(4);
    job->scratch = get((size_t)us_scratch_bytes(&w->model, job->num_tokens, rows, w->threads, count_most(job)));
    strcpy(names, us_available());
    for (char *rest = names, *name; (name = strtok(rest, ",")); rest = NULL) {
        if (us_use_instructions(name)) abort();
        for (int sketched = 0; sketched < 2; sketched++) {
            for (int32_t l = 0; l < w->model.num_layers; l++) memcpy(w->own[l], w->start[l], w->store_size * sizeof(float));
            num_close = 0;
            job->num_close = sketched ? &num_close : NULL;
            us_run(&w->model, job, w->threads);
            if (!sketched) memcpy(expected, job->likeliest, sizeof(int64_t) * (size_t)rows);
        }
        if (!memcmp(expected, job->likeliest, sizeof(int64_t) * (size_t)rows) && num_close >= rows) continue;
        printf("a sketch with %s: other tokens, %d looked at\n", name, (int)num_close);
        num_wrong++;
    }
    free(logits), free(job->scratch);
    *job = before;
    w->model.sketch = (us_sketch){0};
}

#endif
