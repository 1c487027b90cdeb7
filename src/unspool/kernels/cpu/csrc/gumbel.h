/* Watermarks: Gumbel's draw, keyed by a context. */
#ifndef UNSPOOL_GUMBEL_H
#define UNSPOOL_GUMBEL_H

#include "marks.h" /* find_highest, words */

#define KEY_BLOCKS 256 /* of tokens whose keys have one bound */

INLINE vecu hash_words(vecu word) { /* MurmurHash3's finaliser */
    word = (word ^ (word >> 16)) * 0x85ebca6bu;
    word = (word ^ (word >> 13)) * 0xc2b2ae35u;
    return word ^ (word >> 16);
}

static inline uint32_t hash_word(uint32_t word) {
    word = (word ^ (word >> 16)) * 0x85ebca6bu;
    word = (word ^ (word >> 13)) * 0xc2b2ae35u;
    return word ^ (word >> 16);
}

static double find_key(uint32_t word, float score) {
    return log(-log1p(-((double)word + 0.5) * 0x1p-32)) - (double)score;
}

/* Words of the noise and bounds from below of the keys, for LANES tokens from `token` on: a logarithm is no less than the
 * exponent and the mantissa less one, as a float's bits have them side by side. */
INLINE vec bound_keys(vec scores, vecu tokens, uint32_t low, uint32_t high, vecu *words) {
    *words = hash_words(hash_words(tokens * 0x9e3779b1u + low) ^ high);
    const vec noise = __builtin_convertvector((veci)(*words >> 8), vec) * 0x1p-24f;
    return __builtin_convertvector(as_bits(noise), vec) * (0x1p-23f * 0.693147f) - 127.0f * 0.693147f - scores;
}

/* The token with the least key, the first of equals; -1 where no score is finite, or one is NaN or infinite. Bounds of all
 * keys are computed, and keys alone where a block of tokens has a bound below the least key that is known. */
static int32_t draw_keyed(const float *scores, int32_t vocab, uint64_t state) {
    const uint32_t low = (uint32_t)state, high = (uint32_t)(state >> 32);
    const int32_t whole = vocab / LANES, block = (whole + KEY_BLOCKS - 1) / KEY_BLOCKS > 0 ? (whole + KEY_BLOCKS - 1) / KEY_BLOCKS : 1;
    float lows[KEY_BLOCKS];
    vecu words, tokens;
    vec least;
    veci is_sound = (veci){0} - 1;
    int32_t count = 0, sound = -1, drawn = -1, best_block = 0;
    double best = INFINITY;
    for (uint32_t i = 0; i < LANES; i++) tokens[i] = i;
    for (int32_t first = 0; first < whole; first += block, count++) {
        const int32_t end = whole - first < block ? whole : first + block;
        least = fill(INFINITY);
        for (int32_t i = first; i < end; i++, tokens += LANES) {
            const vec given = load(scores + (size_t)i * LANES), keys = bound_keys(given, tokens, low, high, &words);
            is_sound &= given < fill(INFINITY);
            least = choose(keys < least, keys, least);
        }
        lows[count] = -largest(-least);
        best_block = lows[count] < lows[best_block] ? count : best_block;
    }
    for (int32_t i = 0; i < LANES; i++) sound &= is_sound[i];
    for (int32_t v = whole * LANES; v < vocab; v++) { /* what is left at the end */
        const uint32_t word = hash_word(hash_word((uint32_t)v * 0x9e3779b1u + low) ^ high);
        const double key = find_key(word, scores[v]);
        sound &= -(scores[v] < INFINITY);
        if (key < best) best = key, drawn = v;
    }
    for (int32_t turn = -1; turn < count; turn++) { /* the block with the lowest bound first: few others are left then */
        const int32_t k = turn < 0 ? best_block : turn, first = k * block;
        if (turn == best_block || !count || lows[k] > best + 1e-3 + 1e-5 * fabs(best)) continue; /* a float's rounding */
        const int32_t end = whole - first < block ? whole : first + block;
        for (uint32_t i = 0; i < LANES; i++) tokens[i] = (uint32_t)first * LANES + i;
        for (int32_t i = first; i < end; i++, tokens += LANES) {
            const vec keys = bound_keys(load(scores + (size_t)i * LANES), tokens, low, high, &words);
            for (int32_t lane = 0; lane < LANES; lane++) {
                if (!(keys[lane] <= best + 1e-3 + 1e-5 * fabs(best))) continue;
                const double key = find_key(words[lane], scores[i * LANES + lane]);
                const int32_t token = i * LANES + lane;
                if (key < best || (key == best && token < drawn)) best = key, drawn = token;
            }
        }
    }
    return sound ? drawn : -1;
}

static void run_draws(const void *argument, int32_t thread, us_team *team) {
    const us_draw_task *task = argument;
    int64_t first, last;
    split(task->rows, thread, team->size, &first, &last);
    for (int64_t row = first; row < last; row++)
        task->tokens[row] = task->repeated[row] ? -1 : draw_keyed(task->scores + row * task->vocab, task->vocab, (uint64_t)task->states[row]);
}

#endif
