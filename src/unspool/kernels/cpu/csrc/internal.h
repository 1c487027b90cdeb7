/* What the files of the library share: the table of functions that each instruction set compiles, and the threads. */
#ifndef UNSPOOL_INTERNAL_H
#define UNSPOOL_INTERNAL_H

#include <stdatomic.h>
#include <stddef.h>

#include "unspool_cpu.h"

typedef struct us_team us_team;

/* A piece of work that every thread of a team takes part in. */
typedef void (*us_task)(const void *argument, int32_t thread, us_team *team);

typedef struct {
    const char *name;
    us_task run;     /* argument: us_run_task */
    us_task steps;   /* argument: us_steps_task */
    us_task product; /* argument: us_product_task */
    us_task first;      /* argument: us_first_task */
    us_task lists;      /* argument: us_list_task */
    us_task listed;     /* argument: us_listed_task */
    us_task marked;     /* argument: us_marked_task */
    us_task tournament; /* argument: us_tournament_task */
    us_task contexts;   /* argument: us_context_task */
    us_task draws;      /* argument: us_draw_task */
    us_task row_draws;  /* argument: us_row_draw_task */
    us_task own_lists;  /* argument: us_own_task */
    us_task ranks;      /* argument: us_rank_task */
    us_task normalise;  /* argument: us_normalise_task */
    us_task halves;     /* argument: us_halves_task */
    us_task widen;      /* argument: us_widen_task */
    us_task sums;       /* argument: us_sums_task */
    us_task attend;     /* argument: us_attend_task */
    us_task encoder;    /* argument: us_encoder_task */
} us_kernels;

/* Where a pass that several threads make goes on after one of them had no core: from a layer on, with fewer of them. */
typedef struct {
    int32_t first; /* the layer that this call begins with */
    int32_t next;  /* the layer that the next call begins with; WHOLE: no call follows */
} us_progress;
enum { WHOLE = -1 };

typedef struct {
    const us_model *model;
    const us_job *job;
    us_progress *progress;
} us_run_task;

/* Floats of a thread's working memory for one head of a source (source_attention.h). */
static inline size_t us_source_room(int32_t longest, int32_t width) {
    const size_t beside = 32, spare = 16, keys = 128; /* at most: queries of a block, what widths and counts are filled up with; and FEW_KEYS */
    const size_t count = (size_t)longest + spare, padded = (size_t)width + spare;
    return (2 * count * padded + beside * (2 * padded + keys) + 2 * count + beside + 15) & ~(size_t)15;
}

typedef struct {
    const us_model *model;
    const us_job *job; /* num_tokens, states and scratch */
    int32_t num_sources;
    const int32_t *lengths; /* num_sources */
    float *rooms;           /* for each thread, this far apart */
    size_t room_size;
    us_progress *progress;
} us_encoder_task;

typedef struct {
    const us_model *model;
    const us_job *job;
    us_steps *steps;
    us_progress *progress;
} us_steps_task;

typedef struct {
    const void *const *at; /* num_tensors rows of numbers */
    const int64_t *counts;
    int32_t num_tensors, size; /* bytes of a number: 1, 2 or 4 */
    uint64_t *sums;
} us_sums_task;

typedef struct {
    const us_matrix *matrix;
    const float *x;
    int32_t num_rows;
    float *y;
    void *scratch;
} us_product_task;

/* Floats from one widened row to the next: whole pairs of vectors of any instruction set, and a cache line, or rows of 1024 numbers
 * and more would have the same places in a cache. */
static inline size_t us_pad_halves(int32_t columns) { return (((size_t)columns + 31) & ~(size_t)31) + 16; }

typedef struct {
    const uint16_t *weights, *bias; /* (rows, columns) and rows, of US_BF16 or US_F16; or no bias */
    int32_t kind, rows, columns;
    const uint16_t *x; /* (num_rows, columns) */
    int32_t num_rows;
    uint16_t *y; /* (num_rows, rows) */
    float *wide; /* num_rows, us_pad_halves(columns) apart: x as floats */
} us_halves_task;

#define US_ASKED 4 /* queries that meet a key together */

typedef struct {
    us_attention a;
    uint16_t *out;
    float *rooms; /* for each thread, this far apart */
    size_t room_size;
} us_attend_task;

typedef struct {
    const uint16_t *from; /* count */
    int64_t count;
    int32_t kind;
    float *to; /* count */
} us_widen_task;

typedef struct {
    const uint32_t *seeds; /* count */
    const int32_t *tokens; /* count: one for each seed */
    int64_t count;
    int32_t vocab, num_first;
    uint8_t *out; /* count */
} us_first_task;

typedef struct {
    const uint32_t *seeds; /* count */
    int64_t count;
    int32_t vocab, num_first;
    uint32_t *bits; /* (count, vocab / 32, rounded up) */
    void *rooms;    /* us_lay_list's for each thread, this far apart (bytes) */
    size_t room_size;
} us_list_task;

#define US_MORE 16 /* numbers that may be written past an end */

/* Where a list is made. */
typedef struct {
    int32_t *held;       /* num_first: the token that a place has when it is swapped */
    int32_t *out, *sent; /* num_first and US_MORE: where swaps go that go past the first places, and the tokens that they send there */
    uint8_t *is_first;   /* vocab */
} us_list_room;

static inline size_t us_list_bytes(int32_t vocab, int32_t num_first) {
    return sizeof(int32_t) * (3 * (size_t)num_first + 2 * US_MORE) + (size_t)vocab;
}

static inline us_list_room us_lay_list(int32_t num_first, void *memory) {
    int32_t *held = memory, *out = held + num_first, *sent = out + num_first + US_MORE;
    return (us_list_room){held, out, sent, (uint8_t *)(sent + num_first + US_MORE)};
}

typedef struct {
    const float *scores; /* (rows, vocab) */
    float *out;          /* (rows, vocab); may be the scores themselves */
    int64_t rows;
    int32_t vocab;
    const uint32_t *bits; /* rows, `words` apart: token v has bit v % 32 of word v / 32 */
    int64_t words;
    float bias;
} us_listed_task;

typedef struct {
    const float *scores; /* (rows, vocab) */
    float *out;          /* (rows, vocab); may be the scores themselves */
    int64_t rows;
    int32_t vocab, num_first;
    const int64_t *ids; /* rows, `stride` apart: the last tokens */
    int64_t stride, key;
    float bias;
    uint64_t *kept;    /* num_kept: a seed and 1 */
    uint32_t *bits;    /* (num_kept, vocab / 32, rounded up): the lists of these seeds */
    uint32_t num_kept; /* a power of two */
    uint32_t *made;    /* (rows, vocab / 32, rounded up) */
    uint8_t *is_made;  /* rows */
    void *rooms;       /* us_lay_list's for each thread, this far apart (bytes) */
    size_t room_size;
} us_marked_task;

typedef struct {
    const float *scores; /* (rows, vocab) */
    float *out;          /* (rows, vocab) */
    int64_t rows;
    int32_t vocab, depth;
    const uint32_t *words; /* (depth / 30, size): bits of 30 rounds */
    uint32_t size;           /* a power of two */
    const int64_t *states;   /* rows: the hash of the tokens before */
    uint32_t shift;          /* token v has its bits at state + shift + v, modulo size */
    const uint8_t *repeated; /* rows: these stay as they are */
    const double *uniforms;  /* rows: numbers in [0, 1) that draw tokens, instead of `out`; then no table is smaller than the vocabulary */
    int32_t *tokens;         /* rows; or NULL */
    void *rooms;             /* a us_play_room for each thread, this far apart (bytes) */
    size_t room_size;
} us_tournament_task;

#define US_PATTERNS 1024 /* of ten rounds' bits */
#define US_PARTS 4       /* of a row's tokens */
#define US_LINE 64       /* bytes of a cache line */

/* What is found in a part of a row. Some of it lies twice: one is read while the next is made. */
typedef struct {
    float highest[2], masses[2][US_PATTERNS];
    double total;
} us_tally;

typedef struct {
    us_tally tallies[US_PARTS];
    float numbers[]; /* two for each class of tokens, and three cache lines */
} us_play_room;

typedef struct {
    const int64_t *ids;  /* rows of tokens, `stride` apart; the text is `num_tokens` from column `start` on */
    const int64_t *pads; /* rows: columns that are read as zeros; or NULL */
    const int64_t *firsts; /* rows: the first windows that count; or NULL: `first` for all */
    int64_t rows, stride;
    int32_t start, num_tokens, width, first;
    uint64_t seed;
    int32_t mixes;
    int64_t *states;   /* rows */
    uint8_t *repeated; /* rows */
} us_context_task;

typedef struct {
    const float *scores; /* (rows, vocab) */
    int64_t rows;
    int32_t vocab;
    const int64_t *states;   /* rows */
    const uint8_t *repeated; /* rows: nothing is drawn */
    int32_t *tokens;         /* rows; -1: none */
} us_draw_task;

typedef struct {
    const float *scores; /* (rows, vocab) */
    int64_t rows;
    int32_t vocab;
    const us_draw *draws; /* rows */
    int32_t *tokens;      /* rows; -1: none; -2: not sure */
    void *failed;         /* an atomic_int: no memory */
} us_row_draw_task;

typedef struct {
    const float *scores; /* (rows, vocab) */
    int64_t rows;
    int32_t vocab, count, normalises;
    float *values;   /* (rows, count) */
    int32_t *tokens; /* (rows, count); -1: a row has no such tokens */
    void *failed;    /* an atomic_int: no memory */
} us_rank_task;

typedef struct {
    const float *scores; /* (rows, vocab) */
    int64_t rows;
    int32_t vocab;
    float *out;   /* (rows, vocab) */
    void *failed; /* an atomic_int: a row has no finite score, or one that is NaN or infinite */
} us_normalise_task;

typedef struct {
    float value; /* a score, divided by the temperature */
    int32_t token;
} us_candidate;

typedef struct {
    const float *scores; /* (rows, vocab) */
    float *out;          /* (rows, vocab); may be the scores themselves */
    int64_t rows;
    int32_t vocab, num_first, num_candidates;
    const int64_t *ids; /* rows, `stride` apart, of the `width` tokens before */
    int64_t stride;
    int32_t width;
    const int64_t *table; /* table_size */
    int64_t table_size;
    uint64_t key;
    const uint32_t *divisors; /* (3, num_first): of vocab - i, the inverse, the powers of two, and (2^32 - 1) over it */
    float bias;
    int32_t *tokens;     /* (rows, num_candidates) */
    uint32_t *seeds;     /* likewise */
    int64_t *open;       /* of these, the ones to be followed */
    void *num_open;      /* an atomic_int */
    us_candidate *rooms; /* (threads, 2, vocab) */
    uint64_t *known;     /* num_known: a seed, a token, whether it is on the list */
    uint32_t num_known;  /* a power of two, or 0 */
} us_own_task;

/* The highest logit that a thread found, and its token; -1: none. */
typedef struct {
    float value;
    int32_t token;
} us_top;

/* The norm of what a head's sketch is multiplied by, and of what was taken from that when it became int8. */
typedef struct {
    float size, error;
} us_extent;

/* Where the numbers of one call lie in its scratch memory. */
typedef struct {
    float *x, *qkv, *read, *side, *fed;      /* a token each: state, q k v, attention's result, a second state, feed-forward */
    float *logits;                           /* (tokens, experts): scores of mixed layers */
    int32_t *picked;                         /* (tokens, chosen): a token's experts */
    float *choices;                          /* (tokens, chosen): what they were chosen by, then their weights */
    int32_t *pair_tokens, *group_firsts;     /* tokens expert by expert, and where each expert's begin */
    float *pair_shares;                      /* weights in the same order */
    float *parts;                            /* parts of attention that are joined later */
    float *tallies;                          /* (tokens, heads, 2): the largest score so far, and the sum of weights */
    float *tiles;                            /* (threads, 2, US_PART, width): packed keys and values as floats */
    us_top *tops;                            /* (threads, rows that the head reads) */
    us_top *nearest;                         /* likewise, by a sketch of the head */
    float *levelled;                         /* (threads, hidden): a row for the sketch */
    us_extent *extents;                      /* of rows that the head reads; one set for all, or one a thread */
    int8_t *quants;                          /* activations as int8, */
    float *normed, *scales, *sums;           /* as floats, their scales and scaled sums, */
    int32_t *offsets;                        /* and two numbers to a scale (tiles.h), */
    uint16_t *pieces;                        /* or as narrow.h lays them out: one set for all, */
    size_t quants_size, normed_size, scales_size, pieces_size; /* or one a thread, this far apart (elements) */
    size_t bytes;
} us_scratch;

us_scratch us_lay_out(const us_model *model, int32_t num_tokens, int32_t num_read, int32_t threads, int32_t most_keys,
                      void *memory);

/* With few rows every thread prepares the input of products for itself: that is cheaper than to wait for each other. */
static inline int32_t us_is_private(int32_t num_tokens) { return num_tokens <= 2; }

/* Parts of a token's keys that are shared out among threads; 0 where there are tokens and heads enough to share out. */
static inline int32_t us_count_parts(int32_t num_tokens, int32_t kv_heads, int32_t threads, int32_t most_keys) {
    return threads > 1 && (int64_t)num_tokens * kv_heads < 4 * (int64_t)threads ? (most_keys + US_PART - 1) / US_PART : 0;
}

/* Whether a matrix lies in tiles of numbers of 16 bits (narrow.h). */
static inline int us_is_narrow(int32_t kind) { return kind == US_BF16 || kind == US_F16; }

/* Whether codes stand for the numbers of a table (tables.h). */
static inline int us_has_table(int32_t kind) { return kind == US_NF4 || kind == US_FP4; }

/* Whether activations are multiplied as they are, and not as int8. */
static inline int us_is_float(int32_t kind) { return kind == US_F32 || us_is_narrow(kind) || us_has_table(kind); }

/* Output rows that lie side by side: threads share these out. */
static inline int32_t us_tile_rows(int32_t kind) { return us_is_narrow(kind) ? US_PANEL : US_TILE; }

/* Bytes of 8 rows of 32 columns: one block of a tile. A super-block of 8 blocks has eight times as many. */
static inline size_t us_block_bytes(int32_t kind) {
    static const size_t bytes[] = {4 * 256, 16 + 256, 32 + 128, 144, 176, 210, 32 + 32 + 128, 2 * 256, 2 * 256, 32 + 128, 32 + 128};
    return bytes[kind];
}

/* Blocks that have a header of scales in common, in the kinds of supers.h. */
static inline int32_t us_count_blocks(int32_t kind) { return kind == US_Q5 ? 1 : US_SUPER / US_BLOCK; }

/* Numbers of bfloat16 that `count` activations are split into for AMX; the last tile of a pass is read as if it were whole.
 * Elsewhere the room of two is one float. */
static inline size_t us_count_pieces(size_t count) { return 3 * count + US_PANEL * US_BLOCK; }

/* One row of a tile's super-block: codes, and what they are multiplied by. */
typedef struct {
    int8_t codes[US_SUPER];
    float scales[16];  /* of 8 blocks; with 6 bits of 16 halves of blocks */
    float minimums[8]; /* not with 6 bits */
} us_super_row;

void us_read_super(const uint8_t *tile, int32_t kind, int32_t row, us_super_row *out);

struct us_team {
    int32_t size;
    int64_t begun;                /* when the call did, in nanoseconds */
    _Alignas(64) atomic_llong worked; /* nanoseconds that its threads have had a core for since, as far as they have noted it */
    _Alignas(64) atomic_int arrived;
    _Alignas(64) atomic_int phase;
    int is_late; /* what us_meet_late last said */
};

int32_t us_gather(int32_t threads);                 /* take the team for one call; how many it really has */
void us_do(us_task task, const void *argument);      /* let all of them work, and give the team back */
void us_leave(void);                                 /* give it back without work */
void us_meet(us_team *team);                         /* wait for all threads of the team */
int us_meet_late(us_team *team);                     /* the same; whether they lack cores so much that fewer would do better (crowding.h) */

extern const us_kernels us_plain;
#if defined(__aarch64__)
extern const us_kernels us_neon_dot, us_neon_i8mm;
#elif defined(__x86_64__)
extern const us_kernels us_avx2, us_avx512;
#if !defined(US_NO_AMX)
extern const us_kernels us_amx;
#endif
#endif

#endif
