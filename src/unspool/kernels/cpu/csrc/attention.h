/* Attention of a few queries over a few keys that lie in memory as floats, and how what was read is put together. */
#ifndef UNSPOOL_ATTENTION_H
#define UNSPOOL_ATTENTION_H

#include "tiles.h"

#define MOST_GROUP 8 /* query heads of one key head that are read together */

/* What a group of queries has read: the largest score, the sum of weights, and the weighted values. */
typedef struct {
    float most[MOST_GROUP], total[MOST_GROUP];
    float read[MOST_GROUP * US_WIDEST_HEAD]; /* (group, width) */
} reading;

/* Keys that a part covers and that lie one after the other, and where what is read next lies, alike; or NULL. */
typedef struct {
    const float *keys, *ahead;
    int64_t stride;
    int32_t count, values; /* a key's values are so many floats behind it */
    int32_t is_near;       /* read just before: it lies in the nearest cache */
} segment;

#define AT_ONCE 4 /* keys that are scored together, and query heads */

/* Scores of a few keys for up to AT_ONCE queries. Missing keys are read as the last one, so that all take one way. */
INLINE void score_few(const float *q, const int32_t G, const int32_t D, segment s, int32_t j, float (*scores)[US_PART]) {
    const int32_t last = s.count - 1;
    const float *keys[AT_ONCE];
    vec total[AT_ONCE][AT_ONCE]; /* (query, key) */
    UNROLLED for (int k = 0; k < AT_ONCE; k++) keys[k] = s.keys + (j + k < last ? j + k : last) * s.stride;
    UNROLLED for (int g = 0; g < G; g++)
        UNROLLED for (int k = 0; k < AT_ONCE; k++) total[g][k] = fill(0);
    int32_t i = 0;
    for (; i + LANES <= D; i += LANES)
        UNROLLED for (int k = 0; k < AT_ONCE; k++) {
            const vec key = load(keys[k] + i);
            UNROLLED for (int g = 0; g < G; g++) total[g][k] += key * load(q + g * D + i);
        }
    UNROLLED for (int g = 0; g < G; g++) {
        quad made = sums(total[g]);
        for (int32_t rest = i; rest < D; rest++)
            for (int k = 0; k < AT_ONCE; k++) made[k] += q[g * D + rest] * keys[k][rest];
        if (j + AT_ONCE <= s.count) memcpy(&scores[g][j], &made, sizeof made);
        else
            for (int32_t k = 0; k < s.count - j; k++) scores[g][j + k] = made[k];
    }
}

/* Scores of a segment's keys. What is read next is asked for meanwhile, key by key and value by value. */
INLINE void score(const float *q, const int32_t G, const int32_t D, segment s, float (*scores)[US_PART]) {
    for (int32_t j = 0; j < s.count; j += AT_ONCE) {
        int32_t g = 0;
        for (int32_t k = j; k < j + AT_ONCE && !s.is_near; k++)
            for (int32_t i = 0; i < D; i += 16) {
                if (s.ahead) {
                    __builtin_prefetch(s.ahead + k * s.stride + i, 0, 2);
                    __builtin_prefetch(s.ahead + k * s.stride + s.values + i, 0, 2);
                }
                __builtin_prefetch(s.keys + (k + 2 * AT_ONCE) * s.stride + i);
                __builtin_prefetch(s.keys + k * s.stride + s.values + i);
            }
        for (; g + AT_ONCE <= G; g += AT_ONCE) score_few(q + g * D, AT_ONCE, D, s, j, scores + g);
        if (G - g == 3) score_few(q + g * D, 3, D, s, j, scores + g);
        if (G - g == 2) score_few(q + g * D, 2, D, s, j, scores + g);
        if (G - g == 1) score_few(q + g * D, 1, D, s, j, scores + g);
    }
}

/* Weighted values of up to AT_ONCE queries, W vectors of their columns at a time. */
INLINE void weigh_few(float *read, const int32_t G, const int32_t D, const int W, segment s, int32_t column,
                      float (*scores)[US_PART]) {
    vec total[AT_ONCE][4];
    UNROLLED for (int g = 0; g < G; g++)
        UNROLLED for (int i = 0; i < W; i++) total[g][i] = load(read + g * D + i * LANES);
    const float *value = s.keys + column;
    for (int32_t j = 0; j < s.count; j++, value += s.stride)
        UNROLLED for (int i = 0; i < W; i++) {
            const vec v = load(value + i * LANES);
            UNROLLED for (int g = 0; g < G; g++) total[g][i] += v * scores[g][j];
        }
    UNROLLED for (int g = 0; g < G; g++)
        UNROLLED for (int i = 0; i < W; i++) store(read + g * D + i * LANES, total[g][i]);
}

#define WIDE (LANES == 8 ? 2 : 4) /* vectors whose sums fit the registers */

INLINE void weigh_columns(float *read, const int32_t G, const int32_t D, segment s, float (*scores)[US_PART]) {
    int32_t i = 0;
    for (; i + WIDE * LANES <= D; i += WIDE * LANES) weigh_few(read + i, G, D, WIDE, s, s.values + i, scores);
    for (; i + LANES <= D; i += LANES) weigh_few(read + i, G, D, 1, s, s.values + i, scores);
    for (; i < D; i++)
        for (int g = 0; g < G; g++)
            for (int32_t j = 0; j < s.count; j++) read[g * D + i] += s.keys[s.values + j * s.stride + i] * scores[g][j];
}

INLINE void weigh(float *read, const int32_t G, const int32_t D, segment s, float (*scores)[US_PART]) {
    int32_t g = 0;
    if (!s.count) return;
    for (; g + AT_ONCE <= G; g += AT_ONCE) weigh_columns(read + g * D, AT_ONCE, D, s, scores + g);
    if (G - g == 3) weigh_columns(read + g * D, 3, D, s, scores + g);
    if (G - g == 2) weigh_columns(read + g * D, 2, D, s, scores + g);
    if (G - g == 1) weigh_columns(read + g * D, 1, D, s, scores + g);
}

/* Loops unrolled for common shapes: query heads to a key head, and their width. */
#define FOR_SHAPE(CALL)                    \
    switch (G * 1000 + D) {                \
    case 1064: CALL(1, 64); break;         \
    case 2064: CALL(2, 64); break;         \
    case 3064: CALL(3, 64); break;         \
    case 4064: CALL(4, 64); break;         \
    case 8064: CALL(8, 64); break;         \
    case 1128: CALL(1, 128); break;        \
    case 4128: CALL(4, 128); break;        \
    case 8128: CALL(8, 128); break;        \
    case 1256: CALL(1, 256); break;        \
    case 2256: CALL(2, 256); break;        \
    case 4256: CALL(4, 256); break;        \
    default: CALL(G, D);                   \
    }

/* What scores have added to them: by a key's position, and by how far it lies behind the query. */
typedef struct {
    const float *slopes; /* one to a query head; or NULL */
    const float *biases; /* of a part's first key; those of later keys lie before it, those of other heads further on; or NULL */
    int32_t num_distances;
} score_terms;

/* Turn the scores of a part, the first of whose keys has position `position`, into weights; note their largest and sum. */
static void weight_scores(const us_model *model, const score_terms *terms, int32_t G, int32_t n, int32_t position,
                          float (*scores)[US_PART], reading *r) {
    const float cap = model->attention_cap;
    for (int g = 0; g < G; g++) {
        if (cap > 0) /* what lies behind the last one is written below */
            for (int32_t j = 0; j < n; j += LANES) store(&scores[g][j], cap * tangent(load(&scores[g][j]) / cap));
        if (terms->slopes)
            for (int32_t j = 0; j < n; j++) scores[g][j] += terms->slopes[g] * (float)(position + j);
        if (terms->biases)
            for (int32_t j = 0; j < n; j++) scores[g][j] += terms->biases[(int64_t)g * terms->num_distances - j];
        for (int32_t j = n; j % (4 * LANES) && j < US_PART; j++) scores[g][j] = -INFINITY; /* whole vectors, four at once */
        vec highest = load(scores[g]), total = fill(0);
        for (int32_t j = LANES; j < n; j += LANES) highest = larger(highest, load(&scores[g][j]));
        const float most = largest(highest);
        for (int32_t j = 0; j < n; j += 4 * LANES) {
            vec s[4], e[4];
            UNROLLED for (int i = 0; i < 4; i++) {
                s[i] = load(&scores[g][j + i * LANES]);
                e[i] = s[i] - most;
            }
            exponentials(e, 4);
            UNROLLED for (int i = 0; i < 4; i++) {
                e[i] = choose(s[i] > fill(-INFINITY), e[i], fill(0));
                store(&scores[g][j + i * LANES], e[i]);
                total += e[i];
            }
        }
        r->total[g] = sum(total);
        r->most[g] = most;
    }
}

/* Let one head's reading take in another part's. */
static void merge(float *most, float *total, float *read, float other_most, float other_total, const float *other, int32_t D) {
    const float top = *most > other_most ? *most : other_most;
    const float mine = *most == -INFINITY ? 0 : expf(*most - top), theirs = expf(other_most - top);
    *most = top;
    *total = *total * mine + other_total * theirs;
    for (int32_t i = 0; i < D; i++) read[i] = read[i] * mine + other[i] * theirs;
}

#endif
