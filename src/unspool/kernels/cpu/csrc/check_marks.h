/* Watermarks and masks with random shapes and values: every instruction set against a few plain lines here. Part of check.c. */
#ifndef UNSPOOL_CHECK_MARKS_H
#define UNSPOOL_CHECK_MARKS_H

static void expect(int is_right, const char *what, const char *set) {
    if (is_right) return;
    printf("%s with %s: other results than expected\n", what, set);
    num_wrong++;
}

/* Call `each` for every instruction set. */
static void with_each_set(void (*each)(const char *)) {
    char names[128];
    strcpy(names, us_available());
    const uint64_t begin = state;
    for (char *rest = names, *name; (name = strtok(rest, ",")); rest = NULL) {
        if (us_use_instructions(name)) abort();
        state = begin; /* the same shapes and values for all */
        each(name);
        let_go();
    }
}

/* --- green lists ------------------------------------------------------------------------------------------- */

/* Which tokens are among the first of torch.randperm(n) after a seed. */
static void shuffle_plainly(uint32_t seed, int32_t n, int32_t num_first, uint8_t *out) {
    uint32_t words[624];
    int32_t *held = get(sizeof(int32_t) * (size_t)n), at = 624;
    words[0] = seed;
    for (uint32_t i = 1; i < 624; i++) words[i] = 1812433253u * (words[i - 1] ^ (words[i - 1] >> 30)) + i;
    for (int32_t i = 0; i < n; i++) held[i] = i;
    memset(out, 0, (size_t)n);
    for (int32_t i = 0; i < num_first; i++, at++) {
        if (at == 624) {
            for (int32_t k = 0; k < 624; k++) {
                const uint32_t y = (words[k] & 0x80000000u) | (words[(k + 1) % 624] & 0x7fffffffu);
                words[k] = words[(k + 397) % 624] ^ (y >> 1) ^ (y & 1 ? 0x9908b0dfu : 0);
            }
            at = 0;
        }
        uint32_t y = words[at];
        y ^= y >> 11, y ^= (y << 7) & 0x9d2c5680u, y ^= (y << 15) & 0xefc60000u, y ^= y >> 18;
        const int32_t other = i + (int32_t)(y % (uint32_t)(n - i)), kept = held[i];
        held[i] = held[other], held[other] = kept;
        out[held[i]] = 1;
    }
    free(held);
}

static void check_lists(const char *set) {
    const int32_t count = 1 + below(5), vocab = 2 + below(below(8) ? 6000 : 70000), num_first = below(vocab), threads = 1 + below(3);
    uint32_t *seeds = keep(get(sizeof(uint32_t) * (size_t)count));
    int32_t *tokens = keep(get(sizeof(int32_t) * (size_t)count));
    uint8_t *expected = keep(get((size_t)count * vocab)), *are = keep(get((size_t)count));
    for (int32_t i = 0; i < count; i++) seeds[i] = i && below(2) ? seeds[i - 1] : next(), tokens[i] = below(vocab);
    for (int32_t i = 0; i < count; i++) shuffle_plainly(seeds[i], vocab, num_first, expected + (size_t)i * vocab);
    const int32_t words = (vocab + 31) / 32;
    uint32_t *bits = keep(get(sizeof(uint32_t) * (size_t)count * words));
    expect(!us_list_first(seeds, count, vocab, num_first, bits, threads), "listed bits' memory", set);
    for (int32_t i = 0; i < count * vocab; i++)
        expect((bits[i / vocab * words + i % vocab / 32] >> i % vocab % 32 & 1) == expected[i], "a listed bit", set);
    us_are_first(seeds, tokens, count, vocab, num_first, are, threads);
    for (int32_t i = 0; i < count; i++) expect(are[i] == expected[(size_t)i * vocab + tokens[i]], "a token's own list", set);
}

/* Rows marked call after call, with few places for lists. */
static void check_marked(const char *set) {
    const int32_t rows = 1 + below(5), vocab = 2 + below(3000), num_first = below(vocab), stride = 1 + below(3), words = (vocab + 31) / 32;
    const uint32_t num_places = 1u << below(4);
    const int64_t key = (int64_t)((uint64_t)next() << 32 | next()) / 2;
    uint64_t *owners = keep(get(sizeof(uint64_t) * num_places));
    uint32_t *bits = keep(get(sizeof(uint32_t) * num_places * (size_t)words));
    int64_t *ids = keep(get(sizeof(int64_t) * ((size_t)(rows - 1) * stride + 1)));
    uint8_t *expected = keep(get((size_t)vocab));
    float *scores = keep(floats((size_t)rows * vocab, 1.0f)), *out = keep(get(sizeof(float) * (size_t)rows * vocab));
    memset(owners, 0, sizeof(uint64_t) * num_places);
    for (int32_t call = 0; call < 3; call++) {
        for (int32_t i = 0; i <= (rows - 1) * stride; i++) ids[i] = below(6);
        expect(!us_mark_listed(scores, out, rows, vocab, num_first, ids, stride, key, 1.5f, owners, bits, num_places, 1 + below(3)), "a mark's memory", set);
        for (int32_t row = 0; row < rows; row++) {
            uint32_t seed = 0; /* the key so many times, each sum reduced */
            uint64_t sum = 0, size = key < 0 ? (uint64_t)-key : (uint64_t)key;
            for (int64_t i = 0; i < ids[row * stride]; i++) sum = sum >= UINT64_MAX - size ? sum - (UINT64_MAX - size) : sum + size;
            seed = (uint32_t)(key < 0 && sum ? UINT64_MAX - sum : sum);
            shuffle_plainly(seed, vocab, num_first, expected);
            for (int32_t v = 0; v < vocab; v++) {
                const float given = scores[(size_t)row * vocab + v];
                expect(out[(size_t)row * vocab + v] == (expected[v] ? given + 1.5f : given), "a marked score", set);
            }
        }
    }
}

/* --- contexts and draws ------------------------------------------------------------------------------------ */

static uint64_t mix_plainly(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static void check_contexts(const char *set) {
    const int32_t rows = 1 + below(4), columns = 1 + below(60), stride = columns + below(3), start = below(columns + 1);
    const int32_t width = 1 + below(5), first = below(4), num_tokens = columns - start, mixes = below(2), vocab = 1 + below(3);
    /* The last row ends with its last column. */
    int64_t *ids = keep(get(sizeof(int64_t) * ((size_t)(rows - 1) * stride + columns))), *states = keep(get(sizeof(int64_t) * (size_t)rows));
    int64_t *pads = below(2) ? keep(get(sizeof(int64_t) * (size_t)rows)) : NULL;
    uint8_t *repeated = keep(get((size_t)rows));
    const uint64_t seed = (uint64_t)next() << 32 | next();
    for (int32_t i = 0; i < (rows - 1) * stride + columns; i++) ids[i] = below(vocab);
    for (int32_t row = 0; pads && row < rows; row++) pads[row] = below(columns);
    int64_t *firsts = below(2) ? keep(get(sizeof(int64_t) * (size_t)rows)) : NULL;
    for (int32_t row = 0; firsts && row < rows; row++) firsts[row] = below(columns + 3);
    us_read_contexts(ids, pads, firsts, rows, stride, start, num_tokens, width, first, seed, mixes, states, repeated);
    for (int32_t row = 0; row < rows; row++) {
        int64_t text[80] = {0}; /* five zeros before it */
        for (int32_t i = 0; i < num_tokens; i++) text[5 + i] = pads && start + i < pads[row] ? 0 : ids[row * stride + start + i];
        uint64_t hash = seed;
        for (int32_t i = num_tokens - width; i < num_tokens; i++)
            hash = mixes ? mix_plainly(hash + ((uint64_t)text[5 + i] + 1) * 0x9e3779b97f4a7c15u)
                         : (hash + (uint64_t)text[5 + i]) * 6364136223846793005u + 1;
        int is_repeated = 0;
        for (int64_t w = firsts ? firsts[row] : first; w < num_tokens; w++)
            is_repeated |= !memcmp(text + 5 + w - width, text + 5 + num_tokens - width, sizeof(int64_t) * (size_t)width);
        expect(states[row] == (int64_t)hash && repeated[row] == is_repeated, "contexts", set);
    }
}

static uint32_t finish_plainly(uint32_t word) {
    word = (word ^ (word >> 16)) * 0x85ebca6bu;
    word = (word ^ (word >> 13)) * 0xc2b2ae35u;
    return word ^ (word >> 16);
}

static float *odd_scores(int32_t rows, int32_t vocab) {
    float *scores = keep(floats((size_t)rows * vocab, 8.0f));
    for (int32_t i = below(20); i > 0; i--) scores[below(rows * vocab)] = -INFINITY;
    if (!below(4)) scores[below(rows * vocab)] = below(2) ? NAN : INFINITY;
    if (!below(4))
        for (int32_t v = 0; v < vocab; v++) scores[v] = -INFINITY;
    return scores;
}

static void check_draws(const char *set) {
    const int32_t rows = 1 + below(4), vocab = 1 + below(below(2) ? 40 : 9000);
    const float *scores = odd_scores(rows, vocab);
    int64_t *states = keep(get(sizeof(int64_t) * (size_t)rows));
    uint8_t *repeated = keep(get((size_t)rows));
    int32_t *tokens = keep(get(sizeof(int32_t) * (size_t)rows));
    for (int32_t row = 0; row < rows; row++) states[row] = (int64_t)((uint64_t)next() << 32 | next()), repeated[row] = !below(4);
    us_draw_keyed(scores, rows, vocab, states, repeated, tokens, 1 + below(3));
    for (int32_t row = 0; row < rows; row++) {
        int32_t drawn = -1, is_sound = !repeated[row];
        double best = INFINITY;
        for (int32_t v = 0; v < vocab; v++) {
            const float score = scores[(size_t)row * vocab + v];
            const uint32_t low = (uint32_t)states[row], high = (uint32_t)((uint64_t)states[row] >> 32);
            const uint32_t word = finish_plainly(finish_plainly((uint32_t)v * 0x9e3779b1u + low) ^ high);
            const double key = log(-log1p(-((double)word + 0.5) * 0x1p-32)) - (double)score;
            is_sound &= score < INFINITY;
            if (key < best) best = key, drawn = v;
        }
        expect(tokens[row] == (is_sound ? drawn : -1), "a keyed draw", set);
    }
}

/* --- tournaments and masks --------------------------------------------------------------------------------- */

static void check_tournament(const char *set) {
    const int32_t rows = 1 + below(3), vocab = 1 + below(3000), depth = 1 + below(65), threads = 1 + below(3);
    const uint32_t size = 1u << below(12), shift = next();
    const size_t num_words = (size_t)(depth + 29) / 30;
    const float *scores = odd_scores(rows, vocab);
    float *out = keep(get(sizeof(float) * (size_t)rows * vocab));
    double *probs = keep(get(sizeof(double) * (size_t)vocab));
    uint32_t *words = keep(get(sizeof(uint32_t) * num_words * size));
    int64_t *states = keep(get(sizeof(int64_t) * (size_t)rows));
    uint8_t *repeated = keep(get((size_t)rows));
    for (size_t i = 0; i < num_words * size; i++) { /* rounds that there are not have no bits */
        const int32_t left = depth - 30 * (int32_t)(i / size);
        words[i] = next() & ((1u << (left < 30 ? left : 30)) - 1);
    }
    for (int32_t row = 0; row < rows; row++) states[row] = (int64_t)((uint64_t)next() << 32 | next()), repeated[row] = !below(4);
    expect(!us_play_tournament(scores, out, rows, vocab, depth, words, size, states, shift, repeated, threads), "a tournament's memory", set);
    double *uniforms = keep(get(sizeof(double) * (size_t)rows));
    int32_t *drawn = keep(get(sizeof(int32_t) * (size_t)rows));
    for (int32_t row = 0; row < rows; row++) uniforms[row] = below(8) ? next() * 0x1p-32 : 0;
    const int32_t code = us_draw_winners(scores, rows, vocab, depth, words, size, states, shift, repeated, uniforms, drawn, threads);
    expect(code == (size < (uint32_t)vocab ? -2 : 0), "what a draw among winners returns", set);
    for (int32_t row = 0; row < rows; row++) {
        const float *given = scores + (size_t)row * vocab, *made = out + (size_t)row * vocab;
        const int32_t token = code ? -1 : drawn[row];
        float highest = -INFINITY;
        int32_t is_sound = 1;
        for (int32_t v = 0; v < vocab; v++) is_sound &= given[v] < INFINITY, highest = given[v] > highest ? given[v] : highest;
        is_sound &= highest > -INFINITY;
        if (!is_sound || repeated[row]) expect(!memcmp(made, given, sizeof(float) * (size_t)vocab), "a row without a tournament", set);
        if (!is_sound) expect(token == -1, "a draw from nothing", set);
        if (!is_sound) continue;
        double total = 0, worst = 0, passed = 0;
        for (int32_t v = 0; v < vocab; v++) total += probs[v] = exp((double)given[v] - highest);
        for (int32_t v = 0; v < vocab; v++) probs[v] /= total;
        for (int32_t round = 0; round < depth && !repeated[row]; round++) {
            double mass = 0;
#define BIT(v) (words[(size_t)(round / 30) * size + (((uint32_t)states[row] + shift + (uint32_t)(v)) & (size - 1))] >> (round % 30) & 1u)
            for (int32_t v = 0; v < vocab; v++) mass += BIT(v) * probs[v];
            for (int32_t v = 0; v < vocab; v++) probs[v] *= 1 + BIT(v) - mass;
#undef BIT
        }
        for (int32_t v = 0; v < vocab && !repeated[row]; v++) {
            const double off = fabs(exp((double)made[v]) - probs[v]);
            worst = off > worst || off != off ? off : worst;
            expect((made[v] == -INFINITY) == (given[v] == -INFINITY), "what a tournament forbids", set);
        }
        expect(worst < 1e-4, "a tournament", set);
        if (code) continue;
        expect(token >= 0 && token < vocab && given[token] > -INFINITY, "a token that can win", set);
        for (int32_t v = 0; v < token; v++) passed += probs[v];
        expect(uniforms[row] > passed - 1e-4 && uniforms[row] < passed + probs[token] + 1e-4, "the winner that a number draws", set);
    }
}

/* --- own lists --------------------------------------------------------------------------------------------- */

static uint32_t seed_plainly(const int64_t *table, int32_t table_size, uint64_t key, const int64_t *before, int32_t width, int32_t token) {
    const uint64_t own = (uint64_t)table[token % table_size] + 1;
    int64_t least = (int64_t)(key * own * own);
    for (int32_t i = 0; i < width; i++) {
        const int64_t product = (int64_t)(key * own * ((uint64_t)table[before[i] % table_size] + 1));
        least = product < least ? product : least;
    }
    return (uint32_t)((uint64_t)least - (least < 0));
}

static void check_own_rows(const float *scores, const float *out, int32_t rows, int32_t vocab, int32_t num_first, int32_t most,
                           const int64_t *ids, int32_t stride, int32_t width, const int64_t *table, int32_t table_size, uint64_t key,
                           uint8_t *list, const char *set) {
    for (int32_t row = 0; row < rows; row++) {
        const float *given = scores + (size_t)row * vocab, *made = out + (size_t)row * vocab;
        int32_t is_sound = 1;
        for (int32_t v = 0; v < vocab; v++) is_sound &= given[v] < INFINITY;
        for (int32_t v = 0; v < vocab; v++) {
            int32_t before = 0;
            for (int32_t other = 0; other < vocab; other++) before += given[other] > given[v] || (given[other] == given[v] && other < v);
            float expected = given[v];
            if (is_sound && before < most && given[v] > -INFINITY) {
                shuffle_plainly(seed_plainly(table, table_size, key, ids + row * stride, width, v), vocab, num_first, list);
                if (list[v]) expected += 1.5f;
            }
            expect(made[v] == expected || (made[v] != made[v] && given[v] != given[v]), "a token on its own list", set);
        }
    }
}

static void check_own_lists(const char *set) {
    const int32_t rows = 1 + below(3), vocab = 2 + below(below(2) ? 40 : 2000), num_first = below(vocab), width = below(4);
    const int32_t most = 1 + below(vocab < 50 ? vocab : 50), table_size = 1 + below(90), stride = width + below(3);
    const uint64_t key = (uint64_t)next() << 8 | next();
    const float *scores = odd_scores(rows, vocab);
    float *out = keep(get(sizeof(float) * (size_t)rows * vocab));
    int64_t *table = keep(get(sizeof(int64_t) * (size_t)table_size)), *ids = keep(get(sizeof(int64_t) * ((size_t)(rows - 1) * stride + width + 1)));
    uint32_t *divisors = keep(get(sizeof(uint32_t) * (3 * (size_t)num_first + 1)));
    uint8_t *list = keep(get((size_t)vocab));
    for (int32_t i = 0; i < table_size; i++) table[i] = next();
    for (int32_t i = 0; i < (rows - 1) * stride + width; i++) ids[i] = below(vocab);
    for (int32_t i = 0; i < num_first; i++) {
        uint32_t odd = (uint32_t)(vocab - i), turns = 0, inverse;
        for (; !(odd & 1); odd >>= 1) turns++;
        inverse = odd;
        for (int32_t round = 0; round < 4; round++) inverse *= 2 - odd * inverse;
        divisors[i] = inverse, divisors[num_first + i] = turns, divisors[2 * num_first + i] = 0xffffffffu / (uint32_t)(vocab - i);
    }
    const uint32_t num_known = below(3) ? 1u << below(8) : 0;
    uint64_t *known = keep(get(sizeof(uint64_t) * (num_known + 1)));
    memset(known, 0, sizeof(uint64_t) * (num_known + 1));
    for (int32_t turn = 0; turn < 3; turn++) { /* what is remembered is the same, and the last is made where the scores lie */
        if (turn == 2) memcpy(out, scores, sizeof(float) * (size_t)rows * vocab);
        const int32_t failed = us_raise_own(turn == 2 ? out : scores, out, rows, vocab, num_first, most, ids, stride, width, table,
                                            table_size, (int64_t)key, divisors, 1.5f, known, num_known, 1 + below(3));
        expect(!failed, "own lists' memory", set);
        check_own_rows(scores, out, rows, vocab, num_first, most, ids, stride, width, table, table_size, key, list, set);
    }
}

static void check_masks(const char *set) {
    const int32_t rows = 1 + below(4), vocab = 1 + below(300), words = (vocab + 31) / 32 + below(2);
    /* The last row's words end with the last that has a token. */
    const size_t count = (size_t)(rows - 1) * words + (size_t)(vocab + 31) / 32;
    const float *scores = keep(floats((size_t)rows * vocab, 1.0f));
    float *out = keep(get(sizeof(float) * (size_t)rows * vocab));
    uint32_t *bits = keep(get(sizeof(uint32_t) * count));
    for (size_t i = 0; i < count; i++) bits[i] = below(3) ? next() : below(2) ? 0xffffffffu : 0;
    us_keep_allowed(scores, rows, vocab, bits, words, out);
    for (int32_t row = 0; row < rows; row++)
        for (int32_t v = 0; v < vocab; v++) {
            const int is_allowed = bits[(size_t)row * words + v / 32] >> (v % 32) & 1;
            const float found = out[(size_t)row * vocab + v];
            expect(is_allowed ? found == scores[(size_t)row * vocab + v] : found == -INFINITY, "a mask", set);
        }
    us_raise_listed(scores, rows, vocab, bits, words, 1.5f, out, 1 + below(3));
    for (int32_t row = 0; row < rows; row++)
        for (int32_t v = 0; v < vocab; v++) {
            const int is_listed = bits[(size_t)row * words + v / 32] >> (v % 32) & 1;
            const float given = scores[(size_t)row * vocab + v];
            expect(out[(size_t)row * vocab + v] == (is_listed ? given + 1.5f : given), "a raised score", set);
        }
}

#include "check_rows.h"

static void check_marks(void) {
    with_each_set(check_normalised);
    with_each_set(check_row_draws);
    with_each_set(check_ranks);
    with_each_set(check_lists);
    with_each_set(check_marked);
    with_each_set(check_contexts);
    with_each_set(check_draws);
    with_each_set(check_tournament);
    with_each_set(check_own_lists);
    with_each_set(check_masks);
}

#endif
