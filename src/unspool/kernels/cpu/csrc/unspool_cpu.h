/* The decode step of a decoder, alone or beside an encoder, on a CPU, in one call. C11, no dependencies.
 *
 * Python checks every size and offset before it calls (kernels/cpu/library.py and structures.py); here memory is trusted.
 * All strides are counted in floats. Matrices are (rows, columns): an output row each.
 */
#ifndef UNSPOOL_CPU_H
#define UNSPOOL_CPU_H

#include <stdint.h>

#define US_ABI 27
#define US_TILE 8      /* output rows of a quantised tile */
#define US_BLOCK 32    /* columns that share a scale */
#define US_PANEL 16    /* output rows of a tile of numbers of 16 bits */
#define US_SUPER 256   /* columns of a super-block: blocks whose scales share a float16 */
#define US_PART 64     /* keys that attention reads at once: with their values they stay in the first-level cache */
#define US_WIDEST_HEAD 256
#define US_CHUNK 64    /* most tokens of one call: their activations stay in the second-level cache */

enum us_kind {
    US_F32 = 0, /* plain rows of floats */
    US_Q8 = 1,  /* tiles of blocks: 8 float16 scales, then 8 groups of 4 columns of 8 rows, int8 */
    US_Q4 = 2,  /* tiles of blocks: 8 float16 scales, 8 float16 minimums, then 4 groups as above, two to a byte */
    US_K4 = 3,  /* tiles of super-blocks, as csrc/supers.h describes them: GGUF's Q4_K, */
    US_K5 = 4,  /* Q5_K */
    US_K6 = 5,  /* and Q6_K; */
    US_Q5 = 6,  /* tiles of blocks of 5 bits, described there too */
    US_BF16 = 7, /* tiles of bfloat16, as csrc/narrow.h describes them, */
    US_F16 = 8,  /* and of float16 */
    US_NF4 = 9,  /* tiles of blocks whose codes stand for the numbers of a table, as csrc/tables.h describes them */
    US_FP4 = 10,
};
enum us_activation { US_SILU = 0, US_GELU_TANH = 1, US_GELU = 2, US_RELU = 3, US_RELU2 = 4 /* squared */, US_CLAMPED = 5 /* gpt-oss's */ };
enum us_norm_kind { US_RMS = 0, US_LAYER = 1, US_COPY = 2 /* no norm */ };
/* Norms of queries and keys: none, one for all heads, weights for each, or one over all heads of a token. */
enum us_head_norm { US_BARE = 0, US_SHARED = 1, US_EACH = 2, US_WHOLE = 3 };

/* The 16 numbers that the codes of US_NF4 or US_FP4 stand for. */
const float *us_find_table(int32_t kind);

typedef struct us_matrix {
    int32_t kind, rows, columns;
    int32_t own; /* rows that `data` has, whole tiles; those after them are `rest`'s. Not read without a rest */
    const void *data;
    const float *bias;            /* of all rows; or NULL */
    const struct us_matrix *rest; /* of another quantised kind, and without a bias; or NULL */
} us_matrix;

typedef struct {
    int32_t kind;
    float eps;
    const float *weight; /* or NULL */
    const float *bias;   /* or NULL */
} us_norm;

typedef struct {
    us_norm attn_norm, ffn_norm, post_attn_norm, post_ffn_norm, q_norm, k_norm;
    int32_t has_ffn_norm, has_post_norms, head_norm, window; /* window 0: none */
    us_matrix qkv, out, up, down;
    const float *rope; /* (positions, pairs, 2): cosine and sine; or NULL */
    float scale;
    int32_t is_halved; /* the product leaves rotary pairs of queries and keys as the two halves of a head */
    us_norm cross_norm;
    us_matrix cross_q, cross_out; /* of models with an encoder */
    const float *biases; /* (heads, num_distances): of a key's score, by how far it lies behind; or NULL */
    const float *sinks;  /* a score for each head that takes a share of attention and has no value; or NULL */
    int32_t is_mixed, unused2; /* up and down are those of all experts, one below the other */
    us_matrix router, shared_up, shared_down; /* of plain floats; of an expert that every token runs through */
    const float *shared_gate; /* (hidden); or NULL */
    const float *choice_bias; /* (experts): added to scores to choose by; or NULL */
} us_layer;

/* A head as int8, by which most tokens are ruled out (csrc/sketch.h). Its columns are those of the head, each divided by a power
 * of two, by which activations are multiplied. */
typedef struct {
    us_matrix matrix;     /* US_Q8, with the head's bias; without data: there is none */
    const float *powers;  /* (columns): the powers of two */
    const float *reaches; /* (2, rows): how far a logit may be off, for each unit of the activations' norm, */
                          /* and of the norm of what rounding takes from them */
    float margin;         /* and beside that: what rounding a sum with a bias takes */
    int32_t unused;
} us_sketch;

typedef struct {
    int32_t num_layers, hidden, num_heads, num_kv_heads, head_dim, ffn, vocab, rope_width;
    int32_t is_parallel, is_gated, activation, has_embedding_norm;
    float embedding_scale, attention_cap, logit_cap, head_scale; /* caps 0: none; head_scale: of what the head reads */
    int32_t is_post, has_cross; /* norms follow the residual sums; layers read a source after the text */
    int32_t num_distances;
    int32_t num_experts, num_chosen, expert_ffn, shared_ffn; /* of mixed layers: experts, those of a token, their widths */
    int32_t is_sigmoid, is_normalised; /* scores are of one expert alone; weights of the chosen add up to weight_scale */
    float weight_scale, gate_gain, gate_limit; /* the last two are of US_CLAMPED */
    us_matrix embedding, head;
    us_sketch sketch; /* of a head of floats */
    us_norm embedding_norm, final_norm;
    const float *positions; /* learned, already moved by their offset; or NULL */
    const float *slopes;    /* of ALiBi, a head each; or NULL */
    const us_layer *layers;
} us_model;

/* Keys and values of one kind of store: a base address a layer, (rows, positions, 2, kv heads, width) from there.
 * Place j of a row lies at place j, or, in a ring, at place j % room. With a table the store is (blocks, positions of a
 * block, 2, kv heads, width), and place j of row r lies at place j % block of block tables[layer][r * width + j / block]. */
typedef struct {
    float *const *layers;
    int64_t row_stride, position_stride; /* row_stride is not read of rings: their rows lie side by side */
    const int32_t *rooms; /* of rings, one per layer; or NULL */
    const int32_t *const *tables; /* one per layer; or NULL */
    int32_t width, block; /* of the tables: blocks of a row, and positions of a block (a power of two, 16 at least) */
    int32_t is_half, unused; /* the numbers are float16: of sources alone */
} us_store;

enum us_scale_dtype { US_HALF = 0, US_BFLOAT = 1, US_FLOAT = 2 };

/* How numbers are packed in few bits (kernels/packing.py). Byte b of a place holds channels b, b + bytes, b + 2 bytes …
 * Scales and zero points, one to a group: down the places of a block, (heads, places / block, width), or along the channels
 * of a place, (heads, places, width / group). */
typedef struct {
    int32_t bits, bytes, by_channel, block, group, dtype;
} us_scheme;

typedef struct {
    us_scheme keys, values;
} us_packing;

typedef struct {
    const uint8_t *codes; /* (rows, heads, places, bytes) */
    const void *scales, *zeros;
} us_packed;

/* One layer's packed keys and values. */
typedef struct {
    us_packed keys, values;
    int64_t places; /* that a head has room for; with a table, those of a block: a multiple of 64 */
    int32_t slides; /* whether place 0 is the position that the job's bases say */
    int32_t width;  /* of the table */
    const int32_t *table; /* place j of row r lies at place j % places of block table[r * width + j / places]; or NULL */
} us_packed_layer;

typedef struct {
    int32_t num_tokens, num_wanted, most_keys, num_early; /* most_keys: that any token reads, its own included */
    const int32_t *tokens;
    const int32_t *positions;     /* of each token in its sequence */
    const int32_t *own_rows;      /* where its keys are kept */
    const int32_t *own_places;    /* and at which place: the tokens of one row stand in order */
    const int32_t *shared_rows;   /* whose keys come before its own */
    const int32_t *shared_counts; /* and how many of them; 0: none */
    const int32_t *wanted;        /* tokens whose logits are wanted */
    const int32_t *bases;         /* of packed layers that slide */
    const int32_t *firsts;        /* the first token of this call that belongs to the same row */
    const int32_t *early;         /* layers, rising, before which the wanted tokens' states are read too */
    us_store own, shared; /* what is shared is no ring */
    us_packing packing;
    const us_packed_layer *packed; /* a layer each: shared keys are packed; or NULL */
    float *logits;       /* ((1 + num_early) * num_wanted, vocab): final ones, then those of each early layer */
    int64_t *likeliest;  /* num_wanted: the first token of the highest final logit, -1 where there is none; or NULL */
    float *early_states; /* (num_early * num_wanted, hidden) to work in; or NULL */
    float *states; /* (num_tokens, hidden) after the last norm; or NULL */
    us_store cross; /* keys and values of the sources, rows that lie whole */
    const int32_t *sources;        /* a token's row of them, */
    const int32_t *source_lengths; /* and how many positions that has */
    int32_t most_source;           /* the most of those; 0 without an encoder */
    int32_t num_forbidden;
    const int32_t *forbidden; /* tokens that are never the likeliest */
    int64_t *num_close;       /* out: how many tokens the sketch left, added up. Logits are not to be read. Or NULL: they are */
    void *scratch; /* us_scratch_bytes of it, aligned to 64 */
} us_job;

/* Several steps of one token a row: the likeliest token of a step is what the next one reads. */
typedef struct {
    int32_t num_steps, num_ends;
    const int32_t *ends; /* tokens after which no step follows, whichever row gets one */
    int32_t *tokens, *positions, *own_places; /* the job's own: they move on with every step */
    int32_t *chosen;  /* (num_steps, num_tokens): what every step found likeliest; -1 where there is nothing: the last */
    int32_t num_done; /* out: steps that were taken */
    int32_t unused;
} us_steps;

int32_t us_abi(void);
const char *us_instructions(void);           /* the set in use */
int32_t us_use_instructions(const char *set); /* choose one by name; 0 if this machine has it */
const char *us_available(void);              /* all that this machine can run, best first, with commas */

/* num_read: rows that the head reads, (1 + num_early) * num_wanted. most_keys: of a text or of a source. */
int64_t us_scratch_bytes(const us_model *model, int32_t num_tokens, int32_t num_read, int32_t threads, int32_t most_keys);
void us_run(const us_model *model, const us_job *job, int32_t threads);
/* `job` is the first step's: a token a row, all of them wanted, likeliest ones too; most_keys is the last step's. */
void us_run_steps(const us_model *model, const us_job *job, us_steps *steps, int32_t threads);

/* An encoder's layers over sources of so many tokens each (num_sources) that lie one behind the other: `states` (num_tokens,
   hidden) are embeddings, and then what the last norm makes of the last states. Layers' biases are (heads, 2 * num_distances - 1):
   by how far a key lies behind a token, from the farthest ahead on. */
int64_t us_encoder_bytes(const us_model *model, int32_t num_tokens, int32_t threads, int32_t longest);
void us_encode(const us_model *model, int32_t num_sources, const int32_t *lengths, float *states, void *scratch, int32_t threads);

/* y (num_rows, matrix rows) = x (num_rows, columns) times the matrix, and its bias. */
int64_t us_product_bytes(const us_matrix *matrix, int32_t num_rows);
void us_product(const us_matrix *matrix, const float *x, int32_t num_rows, float *y, void *scratch, int32_t threads);
/* y (num_rows, rows) = x (num_rows, columns) times weights (rows, columns), plus a bias if there is one, all of them plain
   rows of US_BF16 or of US_F16: sums are float32, and rounded once. Returns 0, or -1 where there is no memory. */
int32_t us_multiply_halves(const uint16_t *weights, const uint16_t *bias, int32_t kind, int32_t rows, int32_t columns,
                           const uint16_t *x, int32_t num_rows, uint16_t *y, int32_t threads);
/* Keys and values of US_BF16 or US_F16, (rows, heads, num_keys, width) with these strides, and queries (rows, heads, asked,
   width) that see all of them, or those that a row's mask has. Widths are whole tiles (US_BLOCK). */
typedef struct {
    const uint16_t *queries, *keys, *values;
    const uint8_t *mask; /* (rows, num_keys), `mask_row` apart; or NULL */
    int64_t key_row, key_head, key_place, value_row, value_head, value_place, mask_row;
    int32_t kind, rows, heads, asked, num_keys, width;
    float scale;
    int32_t unused;
} us_attention;
/* out (rows, heads, asked, width): what the queries read, computed in float32. Returns 0, or -1 where there is no memory. */
int32_t us_attend_halves(const us_attention *attention, uint16_t *out, int32_t threads);
/* to (count) = numbers of US_BF16 or US_F16 as floats. */
void us_widen(const uint16_t *from, int64_t count, int32_t kind, float *to, int32_t threads);
/* sums (num_tensors), zeros at first: of the bits of each row of numbers of `size` bytes (1, 2 or 4), mixed with their places. */
void us_sum_bits(const void *const *at, const int64_t *counts, int32_t num_tensors, int32_t size, uint64_t *sums, int32_t threads);
/* Lay the rows of a matrix of floats out as US_BF16 or US_F16: whether all of its numbers are finite and of that kind. */
int32_t us_narrow_rows(const float *rows, int32_t count, int32_t columns, int32_t kind, uint16_t *out);
/* The sketch of rows of a head, `count` of them, whose columns are multiplied by the powers' inverses: tiles of US_Q8, and both
   reaches, `apart` from each other. Whether all numbers are finite and none is too large. */
int32_t us_sketch_rows(const float *rows, int32_t count, int32_t columns, const float *inverses, uint8_t *tiles, float *reaches,
                       int64_t apart);
/* Rows that become a quantised matrix: codes of one byte with the float16 beside them, or what a GGUF file has. */
enum us_form {
    US_CODES = 0, /* scales and minimums of blocks, each float16; of super-blocks and of US_Q5 the headers, as `scales` */
    US_STORED_Q8_0 = 1,
    US_STORED_Q4_0 = 2,
    US_STORED_Q4_1 = 3,
    US_STORED_Q5_0 = 4,
    US_STORED_Q5_1 = 5,
    US_STORED_Q4_K = 6,
    US_STORED_Q5_K = 7,
    US_STORED_Q6_K = 8
};
typedef struct {
    int32_t form, rows;
    const void *data;
    const uint8_t *scales, *minimums;
} us_rows;
/* Lay parts that stand one below the other out as tiles of a quantised kind; row i of the matrix is theirs at order[i], if there
   is an order. */
void us_lay_out_rows(const us_rows *parts, const int64_t *order, int32_t rows, int32_t columns, int32_t kind, uint8_t *tiles,
                     int32_t threads);
/* The nearest blocks of US_Q8 or US_Q4 to a matrix of floats: codes (rows, columns), scales and with US_Q4 minimums (rows,
   blocks), float16. */
void us_quantise_rows(const float *numbers, int32_t rows, int32_t columns, int32_t kind, uint8_t *codes, uint16_t *scales,
                      uint16_t *minimums, int32_t threads);
/* What the float16 of `count` stored blocks are, as bits: one is NaN; a minimum that is made of a scale overflows. */
enum us_scan { US_HAS_NAN = 1, US_OVERFLOWS = 2 };
int32_t us_scan_rows(const uint8_t *data, int32_t form, int64_t count);
/* Rows of a matrix as numbers: (count, columns). */
void us_read_rows(const us_matrix *matrix, const int32_t *rows, int32_t count, float *out);

/* Watermarks; 0, or -1 where there is no memory. Permutations are those of torch.randperm on a CPU.
   us_list_first: for each seed, which of `vocab` tokens are among the first `num_first`: bits (count, words of 32).
   us_mark_listed: scores (rows, vocab), more by `bias` for tokens on the list of the row's last token: ids, `stride` apart. A
   list's seed is the token times the key, modulo 2^64 - 1, its low 32 bits. `bits` (num_kept, words of 32) keep lists, and
   `kept` says of which seeds (num_kept, a power of two; zeros at first); for calls with the same vocab and num_first.
   us_are_first: whether each token is, by its own seed: out (count).
   Equal seeds side by side are computed once.
   us_raise_own: `bias` more for each of a row's `num_candidates` highest scores whose token is among the first `num_first`
   of the permutation that it seeds with the `width` tokens before it and the key, by a table of numbers. `divisors` are
   (3, num_first) numbers of vocab - i: the inverse of its odd part modulo 2^32, its powers of two, (2^32 - 1) over it.
   `known`, num_known numbers (a power of two, or none), zeros at first, remembers what was found out about seeds and tokens,
   for later calls with the same vocab and num_first. `out` may be `scores`.
   us_play_tournament: SynthID-Text's, from scores to log-probabilities (rows, vocab). Token v of a row has its bits at
   states[row] + shift + v, modulo size (a power of two), in `words` (one word of 30 rounds, size numbers, each).
   us_draw_winners: the token of each row that a number in [0, 1) draws from the same; from the scores alone if the row is
   repeated; -1 where no score is finite, or one is NaN or infinite. -2 is returned for a size below the vocabulary.
   us_read_contexts: the hash of each row's last `width` tokens, mixed as Gumbel's or as SynthID-Text's, and whether one of
   the windows from `first` on (`firsts[row]`, unless it is NULL) is the same.
   us_draw_keyed: the token that Gumbel's keyed noise draws, or -1. Rows that are repeated stay as they are in both. */
int32_t us_list_first(const uint32_t *seeds, int64_t count, int32_t vocab, int32_t num_first, uint32_t *bits, int32_t threads);
int32_t us_mark_listed(const float *scores, float *out, int64_t rows, int32_t vocab, int32_t num_first, const int64_t *ids,
                       int64_t stride, int64_t key, float bias, uint64_t *kept, uint32_t *bits, uint32_t num_kept, int32_t threads);
void us_are_first(const uint32_t *seeds, const int32_t *tokens, int64_t count, int32_t vocab, int32_t num_first, uint8_t *out,
                  int32_t threads);
int32_t us_raise_own(const float *scores, float *out, int64_t rows, int32_t vocab, int32_t num_first, int32_t num_candidates,
                     const int64_t *ids, int64_t stride, int32_t width, const int64_t *table, int64_t table_size, int64_t key,
                     const uint32_t *divisors, float bias, uint64_t *known, uint32_t num_known, int32_t threads);
int32_t us_play_tournament(const float *scores, float *out, int64_t rows, int32_t vocab, int32_t depth, const uint32_t *words,
                           uint32_t size, const int64_t *states, uint32_t shift, const uint8_t *repeated, int32_t threads);
int32_t us_draw_winners(const float *scores, int64_t rows, int32_t vocab, int32_t depth, const uint32_t *words, uint32_t size,
                        const int64_t *states, uint32_t shift, const uint8_t *repeated, const double *uniforms, int32_t *tokens,
                        int32_t threads);
void us_read_contexts(const int64_t *ids, const int64_t *pads, const int64_t *firsts, int64_t rows, int64_t stride,
                      int32_t start, int32_t num_tokens, int32_t width, int32_t first, uint64_t seed, int32_t mixes,
                      int64_t *states, uint8_t *repeated);
void us_draw_keyed(const float *scores, int64_t rows, int32_t vocab, const int64_t *states, const uint8_t *repeated,
                   int32_t *tokens, int32_t threads);

/* How a row is drawn from: its scores are divided by the temperature, then all but these are left out: the top_k highest
   (0: all) and what ties with the last; the fewest of them whose probability reaches top_p (1: all), at least `fewest`; those
   whose value is no lower than the highest and `below`. */
typedef struct {
    double temperature, top_p, below, uniform; /* a number in [0, 1) that decides */
    int32_t top_k, fewest;
} us_draw;
/* The token of each row at which its cumulated probability passes the uniform number; -1 where no score is finite, or one is
   NaN or infinite; -2 where rounding decides what top-p leaves. Returns 0, or -1 where there is no memory. */
int32_t us_draw_rows(const float *scores, int64_t rows, int32_t vocab, const us_draw *draws, int32_t *tokens, int32_t threads);
/* out (rows, vocab): the log-probabilities of scores. Returns 0, or -1 where a row has no finite score, or one that is NaN or
   infinite; then `out` is not all written. */
int32_t us_normalise_rows(const float *scores, int64_t rows, int32_t vocab, float *out, int32_t threads);

/* The `count` highest scores of each row, falling, of equals the earlier token first: values and tokens (rows, count). If it
   normalises, values are log-probabilities. A row's first token is -1 where fewer scores are finite, or one is NaN or
   infinite. Returns 0, or -1 where there is no memory. */
int32_t us_rank_rows(const float *scores, int64_t rows, int32_t vocab, int32_t count, int32_t normalises, float *values,
                     int32_t *tokens, int32_t threads);

/* out (rows, vocab) = scores, -inf where a token's bit is not set: token v of a row at bit v % 32 of word v / 32. */
void us_keep_allowed(const float *scores, int64_t rows, int32_t vocab, const uint32_t *bits, int64_t words, float *out);
/* The same words: scores, more by `bias` where a token's bit is set. `out` may be `scores`. */
void us_raise_listed(const float *scores, int64_t rows, int32_t vocab, const uint32_t *bits, int64_t words, float bias,
                     float *out, int32_t threads);

#endif
