/* Watermarks: which tokens a seed's permutation puts first, and contexts. */
#ifndef UNSPOOL_MARKS_H
#define UNSPOOL_MARKS_H

#include <stdlib.h>
#include <string.h>

#include "internal.h"

#define TWISTER 624 /* words of MT19937 */
#define TURN 397
#define MOST_FOLLOWED 64 /* tokens of one seed */
#define LEAST_DIVISOR 2048 /* from which a quotient of floats is right but for one */

typedef uint32_t vecu __attribute__((vector_size(LANES * 4)));

INLINE vecu load_words(const uint32_t *p) {
    vecu words;
    memcpy(&words, p, sizeof words);
    return words;
}

typedef struct {
    uint32_t state[TWISTER + LANES];
    int32_t swaps[TWISTER]; /* where the shuffle's next places are swapped with */
} us_shuffle;

INLINE uint32_t seed_next(uint32_t before, uint32_t place) { return 1812433253u * (before ^ (before >> 30)) + place; }

static void seed_state(uint32_t *state, uint32_t seed) {
    state[0] = seed;
    for (uint32_t i = 1; i < TWISTER; i++) state[i] = seed_next(state[i - 1], i);
}

#if defined(US_AVX512)
INLINE vecu twist(vecu high, vecu low, vecu other) {
    const __m512i both = _mm512_ternarylogic_epi32(_mm512_set1_epi32((int32_t)0x80000000), (__m512i)high, (__m512i)low, 0xca);
    const __m512i word = _mm512_xor_si512((__m512i)other, _mm512_srli_epi32(both, 1));
    const __mmask16 is_odd = _mm512_test_epi32_mask((__m512i)low, _mm512_set1_epi32(1));
    return (vecu)_mm512_mask_xor_epi32(word, is_odd, word, _mm512_set1_epi32((int32_t)0x9908b0df));
}
#else
INLINE vecu twist(vecu high, vecu low, vecu other) {
    const vecu y = (high & 0x80000000u) | (low & 0x7fffffffu);
    return other ^ (y >> 1) ^ (-(y & 1u) & 0x9908b0dfu);
}
#endif

/* LANES of the next TWISTER words, from place `i` on, before they are tempered; those before them have been made. There is room
 * for a vector more: the new ones go on where the old ones end, for whoever reads across that. */
INLINE vecu twist_next(uint32_t *m, int32_t i) {
    const vecu made = twist(load_words(m + i), load_words(m + i + 1), load_words(m + i + (i < TWISTER - TURN ? TURN : TURN - TWISTER)));
    memcpy(m + i, &made, sizeof made);
    if (!i) memcpy(m + TWISTER, &made, sizeof made);
    return made;
}

static void twist_state(uint32_t *m) {
    for (int32_t i = 0; i < TWISTER; i += LANES) twist_next(m, i);
}

INLINE uint32_t temper(uint32_t y) {
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    return y ^ (y >> 18);
}

INLINE vecu temper_words(vecu y) {
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    return y ^ (y >> 18);
}

/* The remainders of words, by quotients that are off by one at most: their error is below 2^-21 of them. */
INLINE vecu find_rests(vecu words, vecu divisors) {
    const vec given = __builtin_convertvector(words, vec), by = __builtin_convertvector(divisors, vec);
#if defined(US_AVX512)
    const vec near = (vec)_mm512_rcp14_ps((__m512)by), quotients = given * (near * (2.0f - near * by)); /* a division takes thrice as long */
#else
    const vec quotients = given / by;
#endif
    vecu rests = words - (vecu)__builtin_convertvector(quotients, veci) * divisors;
    rests += (vecu)((veci)rests < 0) & divisors;
    return rests - ((vecu)(rests >= divisors) & divisors);
}

/* What the next TWISTER places, from `first` on, of a shuffle of n are swapped with; past its end, anything. */
static void turn_shuffle(uint32_t *state, int32_t first, int32_t n, int32_t *swaps) {
    twist_state(state);
    if (n - first - TWISTER >= LEAST_DIVISOR) {
        vecu places;
        for (uint32_t i = 0; i < LANES; i++) places[i] = (uint32_t)first + i;
        for (int32_t i = 0; i < TWISTER; i += LANES, places += LANES) {
            const vecu found = places + find_rests(temper_words(load_words(state + i)), (uint32_t)n - places);
            memcpy(swaps + i, &found, sizeof found);
        }
    } else
        for (int32_t i = 0; i < TWISTER && first + i < n; i++)
            swaps[i] = first + i + (int32_t)(temper(state[i]) % (uint32_t)(n - first - i));
}

/* Bytes, 0 or 1, as bits of words. */
static void pack_bytes(const uint8_t *bytes, int32_t count, uint32_t *words) {
    int32_t i = 0;
#if defined(US_AVX512)
    for (; i + 64 <= count; i += 64) {
        const __m512i found = _mm512_loadu_si512(bytes + i);
        const uint64_t bits = _mm512_test_epi8_mask(found, found);
        memcpy(words + i / 32, &bits, sizeof bits);
    }
#endif
    memset(words + i / 32, 0, sizeof *words * (size_t)((count + 31) / 32 - i / 32));
    for (; i + 8 <= count; i += 8) { /* a product brings the eight bytes of a number side by side */
        uint64_t eight; /* the first byte is the lowest, on all processors that the library is built for */
        memcpy(&eight, bytes + i, sizeof eight);
        words[i / 32] |= (uint32_t)(eight * 0x0102040810204080u >> 56) << i % 32;
    }
    for (; i < count; i++) words[i / 32] |= (uint32_t)bytes[i] << i % 32;
}

/* Swaps whose `to` is below a bound, or those whose is not, with numbers of theirs, one after the other: how many they are.
 * There is room for LANES more. */
static int32_t part_swaps(const int32_t *to, const int32_t *numbers, int32_t count, int32_t bound, int32_t is_below, int32_t *kept_to,
                          int32_t *kept) {
    int32_t found = 0, i = 0;
#if defined(US_AVX512)
    for (; i + 16 <= count; i += 16) {
        const __m512i places = _mm512_loadu_si512(to + i);
        const __mmask16 below = _mm512_cmplt_epi32_mask(places, _mm512_set1_epi32(bound)), is_kept = is_below ? below : (__mmask16)~below;
        _mm512_storeu_si512(kept_to + found, _mm512_maskz_compress_epi32(is_kept, places));
        _mm512_storeu_si512(kept + found, _mm512_maskz_compress_epi32(is_kept, _mm512_loadu_si512(numbers + i)));
        found += __builtin_popcount(is_kept);
    }
#endif
    for (; i < count; i++) {
        kept_to[found] = to[i], kept[found] = numbers[i];
        found += (to[i] < bound) == is_below;
    }
    return found;
}

/* The tokens that a shuffle brings to its first places, as bits. A token past the first places comes there if a swap goes to
 * its place. Each of the first tokens goes along the first places, from swap to swap, and stays there unless it comes to lie
 * past them and no later swap fetches it back: only the last swap that goes to a place leaves something there. */
static void list_first(int32_t n, int32_t end, uint32_t seed, us_list_room room, uint32_t *bits) {
    uint32_t state[TWISTER + LANES];
    int32_t swaps[TWISTER], inner[TWISTER + LANES], turns[TWISTER + LANES], places[TWISTER], num_out = 0;
    seed_state(state, seed);
    for (int32_t place = 0; place < end; place++) room.held[place] = place;
    for (int32_t first = 0; first < end; first += TWISTER) {
        const int32_t count = end - first < TWISTER ? end - first : TWISTER;
        turn_shuffle(state, first, n, swaps);
        for (int32_t i = 0; i < TWISTER; i++) places[i] = first + i;
        const int32_t num_inner = part_swaps(swaps, places, count, end, 1, inner, turns);
        for (int32_t i = 0; i < num_inner; i++) room.held[inner[i]] = room.held[turns[i]];
        num_out += part_swaps(swaps, room.held + first, count, end, 0, room.out + num_out, room.sent + num_out);
    }
    memset(room.is_first, 1, (size_t)end);
    memset(room.is_first + end, 0, (size_t)(n - end));
    for (int32_t i = num_out - 1; i >= 0; i--) {
        const uint8_t is_taken = room.is_first[room.out[i]];
        room.is_first[room.out[i]] = 1;
        room.is_first[room.sent[i]] = is_taken;
    }
    pack_bytes(room.is_first, n, bits);
}

static void run_lists(const void *argument, int32_t thread, us_team *team) {
    const us_list_task *task = argument;
    int64_t first, last;
    split(task->count, thread, team->size, &first, &last);
    const us_list_room room = us_lay_list(task->num_first, (char *)task->rooms + (size_t)thread * task->room_size);
    for (int64_t number = first; number < last; number++)
        list_first(task->vocab, task->num_first, task->seeds[number], room, task->bits + number * ((task->vocab + 31) / 32));
}

static int32_t has_swap(const us_shuffle *s, int32_t from, int32_t to, int32_t place) {
    int32_t found = 0;
    for (int32_t i = from; i < to; i++) found |= s->swaps[i] == place;
    return found;
}

/* Follow tokens[0..count) through the shuffle of one seed. */
static void follow_tokens(us_shuffle *s, uint32_t seed, const int32_t *tokens, int64_t count, int32_t n, int32_t num_first,
                          uint8_t *out) {
    int64_t num_open = count;
    int32_t at[MOST_FOLLOWED];
    seed_state(s->state, seed);
    for (int64_t k = 0; k < count; k++) at[k] = tokens[k], out[k] = 0;
    for (int32_t first = 0; first < num_first && num_open; first += TWISTER) {
        turn_shuffle(s->state, first, n, s->swaps);
        const int32_t end = num_first - first < TWISTER ? num_first - first : TWISTER;
        for (int64_t k = 0; k < count; k++) {
            int32_t from = 0;
            while (!out[k]) {
                const int32_t turn = at[k] - first; /* when the token's own place is swapped */
                const int32_t is_here = turn >= from && turn < end;
                if (has_swap(s, from, is_here ? turn : end, at[k])) out[k] = 1; /* taken to a place that is final */
                else if (!is_here) break;
                else if (s->swaps[turn] == at[k]) out[k] = 1;
                else at[k] = s->swaps[turn], from = turn + 1;
            }
            num_open -= out[k] && at[k] >= 0;
            if (out[k]) at[k] = -1;
        }
    }
}

static void run_first(const void *argument, int32_t thread, us_team *team) {
    const us_first_task *task = argument;
    int64_t first, last;
    split(task->count, thread, team->size, &first, &last);
    us_shuffle s;
    for (int64_t number = first, count; number < last; number += count) {
        count = 1;
        while (number + count < last && count < MOST_FOLLOWED && task->seeds[number + count] == task->seeds[number]) count++;
        follow_tokens(&s, task->seeds[number], task->tokens + number, count, task->vocab, task->num_first, task->out + number);
    }
}

/* A vector of scores, more by `bias` where a bit is set, from the lowest one on. */
INLINE vec raise_bits(vec scores, uint32_t bits, float bias) {
#if defined(US_AVX512)
    return (vec)_mm512_mask_add_ps((__m512)scores, (__mmask16)bits, (__m512)scores, _mm512_set1_ps(bias));
#else
    veci bit;
    for (int32_t i = 0; i < LANES; i++) bit[i] = 1 << i;
    return choose(((veci){0} + (int32_t)bits & bit) != 0, scores + bias, scores);
#endif
}

static void raise_row(const float *scores, int32_t vocab, const uint32_t *bits, float bias, float *out) {
    const int32_t whole = vocab / 32;
    for (int32_t w = 0; w < whole; w++)
        UNROLLED for (int32_t i = 0; i < 32; i += LANES) store(out + 32 * w + i, raise_bits(load(scores + 32 * w + i), bits[w] >> i, bias));
    for (int32_t v = 32 * whole; v < vocab; v++) out[v] = bits[whole] >> (v % 32) & 1u ? scores[v] + bias : scores[v];
}

static void run_listed(const void *argument, int32_t thread, us_team *team) {
    const us_listed_task *task = argument;
    int64_t first, last;
    split(task->rows, thread, team->size, &first, &last);
    for (int64_t row = first; row < last; row++)
        raise_row(task->scores + row * task->vocab, task->vocab, task->bits + row * task->words, task->bias, task->out + row * task->vocab);
}

/* The seed of the list after a token: their product modulo 2^64 - 1, its low bits. */
static uint32_t seed_after(int64_t key, int64_t token) {
    const __int128 most = UINT64_MAX, rest = (__int128)key * token % most;
    return (uint32_t)(rest < 0 ? rest + most : rest);
}

static inline uint32_t place_seed(const us_marked_task *task, uint32_t seed) {
    const uint32_t mixed = seed * 0x9e3779b1u;
    return (mixed ^ mixed >> 15) & (task->num_kept - 1);
}

/* Raises rows by the lists after their last tokens. Lists that are not kept are made beside, and kept when all have been read:
 * a place is one thread's. */
static void run_marked(const void *argument, int32_t thread, us_team *team) {
    const us_marked_task *task = argument;
    const int32_t words = (task->vocab + 31) / 32;
    const us_list_room room = us_lay_list(task->num_first, (char *)task->rooms + (size_t)thread * task->room_size);
    int64_t first, last;
    split(task->rows, thread, team->size, &first, &last);
    for (int64_t row = first; row < last; row++) {
        const uint32_t seed = seed_after(task->key, task->ids[row * task->stride]), place = place_seed(task, seed);
        const uint32_t *bits = task->bits + (size_t)place * words;
        task->is_made[row] = task->kept[place] != (uint64_t)seed + 1;
        if (task->is_made[row]) {
            list_first(task->vocab, task->num_first, seed, room, task->made + row * words);
            bits = task->made + row * words;
        }
        raise_row(task->scores + row * task->vocab, task->vocab, bits, task->bias, task->out + row * task->vocab);
    }
    us_meet(team);
    for (int64_t row = 0; row < task->rows; row++) {
        const uint32_t seed = seed_after(task->key, task->ids[row * task->stride]), place = place_seed(task, seed);
        if (!task->is_made[row] || place % (uint32_t)team->size != (uint32_t)thread || task->kept[place] == (uint64_t)seed + 1) continue;
        memcpy(task->bits + (size_t)place * words, task->made + row * words, sizeof(uint32_t) * (size_t)words);
        task->kept[place] = (uint64_t)seed + 1;
    }
}

/* --- contexts ----------------------------------------------------------------------------------------------- */

static inline uint64_t mix(uint64_t x) { /* SplitMix64's finaliser */
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static void run_contexts(const void *argument, int32_t thread, us_team *team) {
    const us_context_task *task = argument;
    const int32_t width = task->width, end = task->num_tokens;
    int64_t first, last;
    split(task->rows, thread, team->size, &first, &last);
    for (int64_t row = first; row < last; row++) {
        const int64_t *ids = task->ids + row * task->stride + task->start;
        const int64_t pad = task->pads ? task->pads[row] - task->start : 0, begin = pad > 0 ? pad : 0;
#define TOKEN(at) ((at) < begin ? 0 : ids[at])
        uint64_t state = task->seed;
        for (int32_t i = end - width; i < end; i++)
            state = task->mixes ? mix(state + ((uint64_t)TOKEN(i) + 1) * 0x9e3779b97f4a7c15u)
                                : (state + (uint64_t)TOKEN(i)) * 6364136223846793005u + 1;
        task->states[row] = (int64_t)state;
        task->repeated[row] = 0;
        const int64_t earliest = task->firsts ? task->firsts[row] : task->first;
        for (int64_t window = earliest; window < end && !task->repeated[row]; window++) {
            int32_t i = 1;
            while (i <= width && TOKEN(window - i) == TOKEN(end - i)) i++;
            task->repeated[row] = i > width;
        }
#undef TOKEN
    }
}

/* The highest of a row's scores; NaN if one of them is, or is infinite. */
static float find_highest(const float *scores, int32_t count) {
    vec most = fill(-INFINITY);
    veci is_sound = as_bits(most) | -1;
    int32_t v = 0;
    for (; v + LANES <= count; v += LANES) {
        const vec x = load(scores + v);
        is_sound &= x < fill(INFINITY);
        most = larger(x, most);
    }
    float highest = largest(most);
    int32_t sound = -1;
    for (int32_t i = 0; i < LANES; i++) sound &= is_sound[i];
    for (; v < count; v++) {
        sound &= -(scores[v] < INFINITY);
        highest = scores[v] > highest ? scores[v] : highest;
    }
    return sound ? highest : NAN;
}

#endif
