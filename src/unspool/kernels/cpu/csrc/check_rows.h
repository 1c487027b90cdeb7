/* Rows of scores drawn from, ranked and normalised: every instruction set against a few plain lines here. Part of check.c. */
#ifndef UNSPOOL_CHECK_ROWS_H
#define UNSPOOL_CHECK_ROWS_H

static int compare_falling(const void *one, const void *two) {
    const double a = *(const double *)one, b = *(const double *)two;
    return (a < b) - (a > b);
}

/* What each of a row's tokens has of the probability after all that a draw leaves out; how sure that is. */
static int32_t spread_plainly(const float *given, int32_t vocab, const us_draw *draw, double *probs) {
    double *values = get(sizeof(double) * (size_t)vocab), *sorted = get(sizeof(double) * (size_t)vocab), highest = -INFINITY, total = 0;
    int32_t is_sure = 1;
    for (int32_t v = 0; v < vocab; v++) {
        values[v] = sorted[v] = (double)(float)((double)given[v] / draw->temperature);
        highest = values[v] > highest ? values[v] : highest;
    }
    qsort(sorted, (size_t)vocab, sizeof *sorted, compare_falling);
    double lowest = draw->top_k > 0 && draw->top_k < vocab ? sorted[draw->top_k - 1] : -INFINITY;
    for (int32_t v = 0; v < vocab; v++) total += values[v] >= lowest ? exp(values[v] - highest) : 0;
    if (draw->top_p < 1) {
        double reached = 0;
        int32_t i = 0;
        for (; i < vocab && sorted[i] >= lowest; i++) {
            if (i && fabs(reached / total - draw->top_p) < 2e-5) is_sure = 0;
            if (reached / total >= draw->top_p && i >= draw->fewest) break;
            reached += exp(sorted[i] - highest);
        }
        if (i < vocab && sorted[i] == sorted[i - 1]) is_sure = 0; /* of equals the first are left */
        lowest = sorted[i - 1] > lowest ? sorted[i - 1] : lowest;
    }
    lowest = highest + draw->below > lowest ? highest + draw->below : lowest;
    total = 0;
    for (int32_t v = 0; v < vocab; v++) total += probs[v] = values[v] >= lowest ? exp(values[v] - highest) : 0;
    for (int32_t v = 0; v < vocab; v++) probs[v] /= total;
    free(values);
    free(sorted);
    return is_sure;
}

static void check_row_draws(const char *set) {
    const int32_t rows = 1 + below(4), vocab = 1 + below(3) * below(3000), threads = 1 + below(3);
    float *scores = keep(floats((size_t)rows * vocab, 4.0f));
    us_draw *draws = keep(get(sizeof(us_draw) * (size_t)rows));
    int32_t *tokens = keep(get(sizeof(int32_t) * (size_t)rows));
    double *probs = keep(get(sizeof(double) * (size_t)vocab));
    for (int32_t row = 0; row < rows; row++)
        draws[row] = (us_draw){below(2) ? 1 : 0.2 + 0.1 * below(20), below(2) ? 1 : 0.01 * below(100), below(2) ? -INFINITY : -0.5 * below(20),
                               below(5) ? next() * 0x1p-32 : below(2) ? 0 : 1, below(2) ? 0 : 1 + below(below(2) ? 40 : 2000), 1 + below(3)};
    for (int32_t i = below(4) * vocab / 3; i > 0; i--) scores[below(rows * vocab)] = -INFINITY;
    if (!below(6)) scores[below(rows * vocab)] = below(2) ? NAN : INFINITY;
    expect(!us_draw_rows(scores, rows, vocab, draws, tokens, threads), "the memory of draws", set);
    for (int32_t row = 0; row < rows; row++) {
        const float *given = scores + (size_t)row * vocab;
        double highest = -INFINITY, before = 0;
        const int32_t drawn = tokens[row];
        int32_t is_sound = 1;
        for (int32_t v = 0; v < vocab; v++) is_sound &= given[v] < INFINITY, highest = given[v] > highest ? given[v] : highest;
        if (!is_sound || highest == -INFINITY) {
            expect(drawn == -1, "a row without a draw", set);
            continue;
        }
        const int32_t is_sure = spread_plainly(given, vocab, &draws[row], probs);
        if (drawn == -2) {
            expect(draws[row].top_p < 1, "a draw that is not sure", set);
            continue;
        }
        expect(drawn >= 0 && drawn < vocab && given[drawn] > -INFINITY, "a drawn token", set);
        if (!is_sure) continue;
        expect(probs[drawn] > 0, "a token that is left", set);
        for (int32_t v = 0; v < drawn; v++) before += probs[v];
        expect(before < draws[row].uniform + 1e-5 && before + probs[drawn] > draws[row].uniform - 1e-5, "where a draw lies", set);
    }
}

static void check_ranks(const char *set) {
    const int32_t rows = 1 + below(4), vocab = 1 + below(3) * below(3000), threads = 1 + below(3), normalises = below(2);
    const int32_t count = 1 + below(vocab < 12 ? vocab : below(2) ? 12 : vocab);
    float *scores = keep(floats((size_t)rows * vocab, 4.0f)), *values = keep(get(sizeof(float) * (size_t)rows * count));
    int32_t *tokens = keep(get(sizeof(int32_t) * (size_t)rows * count));
    for (int32_t i = below(4) * vocab / 3; i > 0; i--) scores[below(rows * vocab)] = below(2) ? -INFINITY : 1;
    if (!below(6)) scores[below(rows * vocab)] = below(2) ? NAN : INFINITY;
    expect(!us_rank_rows(scores, rows, vocab, count, normalises, values, tokens, threads), "the memory of ranks", set);
    for (int32_t row = 0; row < rows; row++) {
        const float *given = scores + (size_t)row * vocab, *value = values + (size_t)row * count;
        const int32_t *token = tokens + (size_t)row * count;
        int32_t is_sound = 1, num_finite = 0;
        double total = 0;
        for (int32_t v = 0; v < vocab; v++) is_sound &= given[v] < INFINITY, num_finite += given[v] > -INFINITY, total += exp((double)given[v]);
        if (!is_sound || num_finite < count) {
            expect(token[0] == -1, "a row without ranks", set);
            continue;
        }
        for (int32_t i = 0; i < count; i++) {
            const double expected = (double)given[token[i]] - (normalises ? log(total) : 0);
            expect(fabs((double)value[i] - expected) < 1e-5 * (1 + fabs(expected)), "the value of a rank", set);
            if (!i) continue;
            const float before = given[token[i - 1]], now = given[token[i]];
            expect(before > now || (before == now && token[i - 1] < token[i]), "the order of ranks", set);
        }
        int32_t num_higher = 0;
        for (int32_t v = 0; v < vocab; v++) {
            const float last = given[token[count - 1]];
            num_higher += given[v] > last || (given[v] == last && v < token[count - 1]);
        }
        expect(num_higher == count - 1, "which tokens are ranked", set);
    }
}

static void check_normalised(const char *set) {
    const int32_t rows = 1 + below(4), vocab = 1 + below(3) * below(3000);
    float *scores = keep(floats((size_t)rows * vocab, 4.0f)), *out = keep(get(sizeof(float) * (size_t)rows * vocab));
    for (int32_t i = below(4) * vocab / 3; i > 0; i--) scores[below(rows * vocab)] = -INFINITY;
    if (!below(6)) scores[below(rows * vocab)] = below(2) ? NAN : INFINITY;
    int32_t is_sound = 1;
    for (int32_t row = 0; row < rows; row++) {
        int32_t num_finite = 0;
        for (int32_t v = 0; v < vocab; v++) {
            const float score = scores[(size_t)row * vocab + v];
            is_sound &= score < INFINITY, num_finite += score > -INFINITY;
        }
        is_sound &= num_finite > 0;
    }
    expect(us_normalise_rows(scores, rows, vocab, out, 1 + below(3)) == is_sound - 1, "rows that can be normalised", set);
    for (int32_t row = 0; is_sound && row < rows; row++) {
        double total = 0;
        for (int32_t v = 0; v < vocab; v++) total += exp((double)scores[(size_t)row * vocab + v]);
        for (int32_t v = 0; v < vocab; v++) {
            const double score = (double)scores[(size_t)row * vocab + v], expected = score - log(total), found = (double)out[(size_t)row * vocab + v];
            expect(found == expected || fabs(found - expected) < 1e-5 * (1 + fabs(expected)), "a log-probability", set);
        }
    }
}

#endif
