/* Attention of a few queries over keys and values of bfloat16 or float16, read where they lie. Included by kernels.c.
 *
 * All is float32 until the output is rounded.
 */
#ifndef UNSPOOL_HALF_ATTENTION_H
#define UNSPOOL_HALF_ATTENTION_H

/* The scores of A queries (A, width) with all keys, to rows of `pitch`. */
INLINE void score_keys(const us_attend_task *task, const uint16_t *keys, const float *queries, const int A, const int kind, size_t pitch,
                       float *scores) {
    const int32_t width = task->a.width;
    for (int32_t j = 0; j < task->a.num_keys; j++, keys += task->a.key_place) {
        vec total[US_ASKED];
        UNROLLED for (int a = 0; a < US_ASKED; a++) total[a] = fill(0);
        for (int32_t k = 0; k < width; k += 2 * LANES) {
            vec low, high;
            load_weights(keys + k, kind, &low, &high);
            UNROLLED for (int a = 0; a < A; a++) {
                total[a] += low * load(queries + a * width + k);
                total[a] += high * load(queries + a * width + k + LANES);
            }
        }
        const quad results = sums(total);
        UNROLLED for (int a = 0; a < A; a++) scores[(size_t)a * pitch + (size_t)j] = task->a.scale * results[a];
    }
}

/* Turn scores into weights that sum up to one; keys that are not seen get none. */
static void weigh_keys(const uint8_t *mask, int32_t count, float *scores) {
    float most = -INFINITY, total = 0;
    int32_t j = 0;
    for (j = 0; j < count; j++)
        if (!mask || mask[j]) most = scores[j] > most ? scores[j] : most;
    for (j = 0; j < count; j += LANES) {
        const int some = count - j < LANES ? count - j : LANES;
        store_some(scores + j, exponential(load_some(scores + j, some) - most), some);
    }
    for (j = 0; j < count; j++) {
        scores[j] = !mask || mask[j] ? scores[j] : 0;
        total += scores[j];
    }
    for (j = 0; j < count && total > 0; j++) scores[j] /= total;
}

/* Sums of values by the weights of A queries: out (A, width). */
INLINE void sum_values(const us_attend_task *task, const uint16_t *values, const uint8_t *mask, const float *weights, const int A,
                       const int kind, size_t pitch, uint16_t *out) {
    for (int32_t k = 0; k < task->a.width; k += 2 * LANES) {
        vec total[US_ASKED][2];
        UNROLLED for (int a = 0; a < A; a++) total[a][0] = total[a][1] = fill(0);
        for (int32_t j = 0; j < task->a.num_keys; j++) {
            vec low, high;
            if (mask && !mask[j]) continue; /* what lies there may be no number */
            load_weights(values + j * task->a.value_place + k, kind, &low, &high);
            UNROLLED for (int a = 0; a < A; a++) {
                const float weight = weights[(size_t)a * pitch + (size_t)j];
                total[a][0] += low * weight;
                total[a][1] += high * weight;
            }
        }
        UNROLLED for (int a = 0; a < A; a++) {
            round_some(total[a][0], kind, out + a * task->a.width + k);
            round_some(total[a][1], kind, out + a * task->a.width + k + LANES);
        }
    }
}

INLINE void attend_some(const us_attend_task *task, const uint16_t *keys, const uint16_t *values, const uint8_t *mask, const uint16_t *given,
                        const int A, const int kind, float *room, uint16_t *out) {
    const size_t pitch = (size_t)task->a.num_keys;
    float *scores = room + US_ASKED * task->a.width;
    widen_as(given, (int64_t)A * task->a.width, kind, room);
    score_keys(task, keys, room, A, kind, pitch, scores);
    for (int a = 0; a < A; a++) weigh_keys(mask, task->a.num_keys, scores + (size_t)a * pitch);
    sum_values(task, values, mask, scores, A, kind, pitch, out);
}

static void run_attend(const void *argument, int32_t thread, us_team *team) {
    const us_attend_task *task = argument;
    const int32_t width = task->a.width;
    float *room = task->rooms + (size_t)thread * task->room_size;
    int64_t first, last;
    split((int64_t)task->a.rows * task->a.heads, thread, team->size, &first, &last);
    for (int64_t unit = first; unit < last; unit++) {
        const int64_t row = unit / task->a.heads, head = unit % task->a.heads;
        const uint16_t *keys = task->a.keys + row * task->a.key_row + head * task->a.key_head;
        const uint16_t *values = task->a.values + row * task->a.value_row + head * task->a.value_head;
        const uint8_t *mask = task->a.mask ? task->a.mask + row * task->a.mask_row : NULL;
#define ATTEND(A)                                                                                             \
    case A:                                                                                                   \
        if (task->a.kind == US_F16) attend_some(task, keys, values, mask, queries, A, US_F16, room, out);        \
        else attend_some(task, keys, values, mask, queries, A, US_BF16, room, out);                            \
        break
        for (int32_t begin = 0, A; begin < task->a.asked; begin += A) {
            const size_t at = ((size_t)unit * (size_t)task->a.asked + (size_t)begin) * (size_t)width;
            const uint16_t *queries = task->a.queries + at;
            uint16_t *out = task->out + at;
            A = task->a.asked - begin < US_ASKED ? task->a.asked - begin : US_ASKED;
            switch (A) {
                ATTEND(1);
                ATTEND(2);
                ATTEND(3);
                ATTEND(4);
            }
        }
#undef ATTEND
    }
}

#endif
