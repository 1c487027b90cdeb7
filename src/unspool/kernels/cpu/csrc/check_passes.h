/* The same pass in other ways: several steps in one call, keys in blocks and rings. Part of check.c. */
#ifndef UNSPOOL_CHECK_PASSES_H
#define UNSPOOL_CHECK_PASSES_H

/* Steps in one call must be those of calls one by one, bit by bit: what they choose, and the keys they leave. */
static void check_steps(whole *w, int32_t rows, int32_t room) {
    enum { MOST = 6 };
    us_job job = {.num_tokens = rows, .num_wanted = rows, .own = w->job.own, .shared = w->job.shared, .packing = w->job.packing, .packed = w->job.packed, .cross = w->job.cross, .most_source = w->job.most_source};
    int32_t numbers[10][US_CHUNK] = {{0}}, first[3][US_CHUNK], num_steps = MOST, ends[2], chosen[MOST * 3], expected[MOST * 3];
    for (int32_t token = 0, row = 0; token < w->job.num_tokens; token++) {
        if (token && w->job.own_rows[token] == w->job.own_rows[token - 1]) continue;
        const int32_t *given[] = {w->job.tokens, w->job.positions, w->job.own_rows, w->job.own_places, w->job.shared_rows, w->job.shared_counts};
        for (int i = 0; i < 6; i++) numbers[i][row] = given[i][token];
        numbers[6][row] = row;
        numbers[7][row] = w->job.bases[token];
        if (w->model.has_cross) {
            numbers[8][row] = w->job.sources[token];
            numbers[9][row] = w->job.source_lengths[token];
        }
        if (room - numbers[3][row] < num_steps) num_steps = room - numbers[3][row];
        row++;
    }
    num_steps = 1 + below(num_steps);
    for (int32_t row = 0; row < rows; row++)
        if (numbers[1][row] + num_steps > job.most_keys) job.most_keys = numbers[1][row] + num_steps;
    const int moving[] = {0, 1, 3};
    for (int i = 0; i < 3; i++) memcpy(first[i], numbers[moving[i]], sizeof first[i]);
    job.tokens = numbers[0], job.positions = numbers[1], job.own_rows = numbers[2], job.own_places = numbers[3];
    job.shared_rows = numbers[4], job.shared_counts = numbers[5], job.wanted = numbers[6], job.bases = numbers[7], job.firsts = numbers[6], job.sources = numbers[8], job.source_lengths = numbers[9];
    job.scratch = get((size_t)us_scratch_bytes(&w->model, rows, rows, w->threads, count_most(&job)));
    job.logits = get(sizeof(float) * (size_t)rows * w->model.vocab);
    job.likeliest = get(sizeof(int64_t) * (size_t)rows);
    float **left = get(sizeof(float *) * (size_t)w->model.num_layers);
    for (int32_t l = 0; l < w->model.num_layers; l++) {
        left[l] = get(w->store_size * sizeof(float));
        memcpy(w->own[l], w->start[l], w->store_size * sizeof(float));
    }
    for (int32_t step = 0; step < num_steps; step++) {
        us_run(&w->model, &job, w->threads);
        for (int32_t row = 0; row < rows; row++) {
            numbers[0][row] = expected[step * rows + row] = (int32_t)job.likeliest[row];
            numbers[1][row]++;
            numbers[3][row]++;
        }
    }
    for (int has_end = 0; has_end < 2; has_end++) { /* then with an end among what is chosen */
        int32_t done = num_steps;
        us_steps steps = {num_steps, 2 * has_end, ends, numbers[0], numbers[1], numbers[3], chosen, 0, 0};
        ends[0] = -5, ends[1] = expected[below(num_steps * rows)];
        for (int32_t i = num_steps * rows - 1; has_end && i >= 0; i--)
            if (expected[i] == ends[1]) done = i / rows + 1;
        for (int i = 0; i < 3; i++) memcpy(numbers[moving[i]], first[i], sizeof first[i]);
        for (int32_t l = 0; l < w->model.num_layers; l++) {
            if (!has_end) memcpy(left[l], w->own[l], w->store_size * sizeof(float));
            memcpy(w->own[l], w->start[l], w->store_size * sizeof(float));
        }
        us_run_steps(&w->model, &job, &steps, w->threads);
        int is_wrong = steps.num_done != done || memcmp(chosen, expected, sizeof(int32_t) * (size_t)(done * rows));
        for (int32_t l = 0; !has_end && l < w->model.num_layers; l++)
            is_wrong |= memcmp(left[l], w->own[l], w->store_size * sizeof(float)) != 0;
        if (is_wrong) printf("%d steps of %d rows: %d done, %d expected\n", num_steps, rows, steps.num_done, done);
        num_wrong += is_wrong;
    }
    for (int32_t l = 0; l < w->model.num_layers; l++) free(left[l]);
    free(left);
    free(job.scratch);
    free(job.logits);
    free(job.likeliest);
}

/* Blocks through a table, and rings, give the same bits as rows that lie whole, and leave the same keys. */
static void check_layouts(whole *w, int32_t rows, int32_t room, size_t position) {
    const us_model *m = &w->model;
    const size_t count = (size_t)((1 + w->job.num_early) * w->job.num_wanted) * m->vocab;
    float *expected = get(sizeof(float) * count), *found = get(sizeof(float) * count);
    float **plain = get(sizeof(float *) * (size_t)m->num_layers); /* what the run leaves of keys */
    const us_store own = w->job.own;
    run(w, "rows that lie whole", expected);
    for (int32_t l = 0; l < m->num_layers; l++) {
        plain[l] = get(w->store_size * sizeof(float));
        memcpy(plain[l], w->own[l], w->store_size * sizeof(float));
    }
    for (int is_ring = 0; is_ring < 2; is_ring++) {
        const int32_t block = 16 << below(3), width = (room + block - 1) / block, blocks = rows * width + 1 + below(3);
        int32_t *rooms = get(sizeof(int32_t) * (size_t)m->num_layers), *table = get(sizeof(int32_t) * (size_t)(rows * width));
        for (int32_t i = 0; i < rows * width; i++) table[i] = blocks - 1 - i; /* from the last on: none lies where it would */
        for (int32_t l = 0; l < m->num_layers; l++) {
            const int32_t window = m->layers[l].window;
            rooms[l] = window && window < room ? window + below(room - window + 1) : room;
        }
        float **held = get(sizeof(float *) * (size_t)m->num_layers);
        for (int32_t l = 0; l < m->num_layers; l++) {
            const size_t places = is_ring ? (size_t)rows * rooms[l] : (size_t)blocks * block;
            held[l] = get(sizeof(float) * places * position);
            memset(held[l], 0xff, sizeof(float) * places * position); /* NaN: what was not written must not be read */
            for (int32_t row = 0; row < rows; row++) {
                int32_t first = 0;
                for (int32_t t = w->job.num_tokens - 1; t >= 0; t--)
                    if (w->job.own_rows[t] == row) first = w->job.own_places[t];
                for (int32_t j = is_ring && first > rooms[l] ? first - rooms[l] : 0; j < first; j++) {
                    const size_t to = is_ring ? (size_t)row * rooms[l] + j % rooms[l] : (size_t)table[row * width + j / block] * block + j % block;
                    memcpy(held[l] + to * position, w->start[l] + ((size_t)row * room + j) * position, sizeof(float) * position);
                }
            }
        }
        const int32_t **tables = get(sizeof(int32_t *) * (size_t)m->num_layers);
        for (int32_t l = 0; l < m->num_layers; l++) tables[l] = table;
        w->job.own = (us_store){held, (int64_t)((size_t)block * position), (int64_t)position, is_ring ? rooms : NULL,
                                is_ring ? NULL : tables, width, block};
        run(w, is_ring ? "rings" : "blocks", found);
        int is_wrong = memcmp(expected, found, sizeof(float) * count) != 0;
        for (int32_t l = 0; l < m->num_layers; l++)
            for (int32_t t = 0; t < w->job.num_tokens; t++) {
                const int32_t row = w->job.own_rows[t], j = w->job.own_places[t];
                int32_t last = j;
                for (int32_t other = 0; other < w->job.num_tokens; other++)
                    if (w->job.own_rows[other] == row && w->job.own_places[other] > last) last = w->job.own_places[other];
                if (is_ring && last - j >= rooms[l]) continue; /* written over */
                const size_t at = is_ring ? (size_t)row * rooms[l] + j % rooms[l] : (size_t)table[row * width + j / block] * block + j % block;
                is_wrong |= memcmp(held[l] + at * position, plain[l] + ((size_t)row * room + j) * position, sizeof(float) * position) != 0;
            }
        if (is_wrong) printf("%s: other numbers than those of rows that lie whole\n", is_ring ? "rings" : "blocks");
        num_wrong += is_wrong;
        for (int32_t l = 0; l < m->num_layers; l++) free(held[l]);
        free(held), free(rooms), free(table), free(tables);
    }
    w->job.own = own;
    for (int32_t l = 0; l < m->num_layers; l++) free(plain[l]);
    free(plain), free(expected), free(found);
}

#endif
