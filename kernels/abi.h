/* What Rust hands to the kernels: files of `src/backend/cuda/` mirror every struct here, and both sides pin every
   offset. Device addresses are uint64_t, 0 where absent. */
#ifndef EAGLE_VERIFY_ABI_H
#define EAGLE_VERIFY_ABI_H

#include <stddef.h>
#include <stdint.h>

enum {
  EV_MAX_WORLD = 8,

  /* EvAllReduceNorm.flags */
  EV_NORM = 1,            /* add the residual and normalise; else the plain sum goes to `output` */
  EV_WEIGHT_PLUS_ONE = 2, /* scale by 1 + weight */
  EV_FP8_STATIC = 4,      /* `quantized` = output / static_scale */
  EV_FP8_PER_ROW = 8,     /* `quantized` = output / scales[row] */

  /* How partials travel */
  EV_ONE_SHOT = 0,
  EV_TWO_SHOT = 1,
  EV_HIERARCHICAL = 2,

  /* A tag: algorithm in bits 30-31, EV_NORM and EV_WEIGHT_PLUS_ONE in 28-29, a hash of epsilon in 20-27, blocks
     in 10-19, rows in 0-9. Never all ones, which is an empty place. */
  EV_TAG_BLOCKS_SHIFT = 10,

  /* The code of a fault record */
  EV_FAULT_TIMEOUT = 1,  /* a peer did not send in time */
  EV_FAULT_MISMATCH = 2, /* a peer made another call */
  EV_FAULT_ABORTED = 3,  /* a peer gave up; the record names the one it gave up on */

  /* What is waited for. Tags are waited for half of the limit, packs of phase p for (1 + p) / 8 of it from the
     tags on: so a rank that waits for the culprit itself gives up before those who wait for that rank's own
     packs, or for its tag in the next call, and its abort names the culprit to them. */
  EV_PHASE_PARTIALS = 0,
  EV_PHASE_ISLANDS = 1,
  EV_PHASE_RESULTS = 2,
  EV_PHASE_TAGS = 3,

  /* The byte offset of the tags in a slab. The abort word is at 0. */
  EV_TAGS_OFFSET = 256,

  /* EvLinear */
  EV_LINEAR_MAX_ROWS = 64,
  EV_LINEAR_CHUNK = 64 /* inputs that a block multiplies at a time */
};

/* One call of one rank: see comm/PROTOCOL.md. */
typedef struct EvAllReduceNorm {
  uint64_t slabs[EV_MAX_WORLD]; /* every rank's slab as mapped here */
  uint64_t partial;             /* [rows, hidden] */
  uint64_t residual;            /* [rows, hidden], updated */
  uint64_t weight;              /* [hidden] */
  uint64_t output;              /* [rows, hidden] */
  uint64_t quantized;           /* [rows, hidden] of E4M3 */
  uint64_t scales;              /* [rows] of float, written */
  uint64_t epochs;              /* uint32_t[max_blocks] in this rank's memory: each block's number of calls */
  uint64_t fault;               /* uint64_t[3] in host memory: what this rank saw itself, for a mismatch both
                                   tags, and what it heard */
  uint64_t packs_offset;        /* of uint4[2][max_blocks * block_packs] in a slab */
  uint64_t escapes_offset;      /* of uint32_t[2][max_blocks * block_packs] in a slab */
  uint64_t wait_limit_ns;
  uint32_t rank;
  uint32_t rows;
  uint32_t hidden;
  uint32_t warps_per_group;
  uint32_t max_blocks;
  uint32_t block_rows;  /* ceil(rows / blocks of this call) */
  uint32_t block_packs; /* places for packs that each block has in a slot */
  uint32_t flags;
  float epsilon;
  float static_scale;
  uint32_t tag; /* but for the number of blocks, which is added at EV_TAG_BLOCKS_SHIFT */
  uint32_t reserved;
} EvAllReduceNorm;

/* A row of one call to choose. Lists are of the words that follow the rows: at word `text` from the first row and
   so on. */
typedef struct EvChooseRow {
  uint64_t seed;
  uint32_t position;
  float temperature;
  float threshold; /* tokens with a smaller z are out */
  uint32_t top_k;  /* 0 for none; as `top_p` and `min_p` at temperature 0, or where a threshold is given */
  float top_p;     /* 1 for none */
  float min_p;     /* 0 for none */
  float repetition_penalty;
  float presence_penalty;
  float frequency_penalty;
  uint32_t text; /* of EvTokenCount: each token of prompt and output once */
  uint32_t num_text;
  uint32_t path; /* of EvTokenCount: each token of the path once, with its count in the output too */
  uint32_t num_path;
  uint32_t bias; /* of EvTokenBias: each token once */
  uint32_t num_biases;
  uint32_t mask;      /* of bits from token first_token / 32 * 32 on; 0 allows all */
  uint32_t workspace; /* which row of EvChoose.z it has, if it needs one */
  uint32_t reserved;
} EvChooseRow;

typedef struct EvTokenCount {
  uint32_t token;
  uint32_t count; /* in output and path */
} EvTokenCount;

typedef struct EvTokenBias {
  uint32_t token;
  float bias;
} EvTokenBias;

/* One call to choose, a row of blocks for each row. */
typedef struct EvChoose {
  uint64_t logits;     /* [rows, columns] */
  uint64_t rows;       /* EvChooseRow[rows], then their lists */
  uint64_t keys;       /* uint64_t[rows], 0 before: raised to the largest key, see ChoiceKey */
  uint64_t thresholds; /* float[rows], written: the least z that each row's filters keep */
  uint64_t z;          /* float[.., columns in units of eight], for rows with filters, penalties or bias */
  uint32_t first_token;
  uint32_t columns;
} EvChoose;

/* One call of a linear layer: partial sums of x W^T, a slice of the inputs each. The layer is their sum, in
   ascending order. Planes and weights are of one type; a row of x is its row of `high` plus its row of `low`. */
typedef struct EvLinear {
  uint64_t weights;   /* [outputs, inputs] */
  uint64_t high;      /* [.., inputs] */
  uint64_t low;       /* [.., inputs]; 0 for all zeros */
  uint64_t row_index; /* uint32_t[rows]: which row of the planes each is; 0 for the first `rows` */
  uint64_t partials;  /* float[slices][EV_LINEAR_MAX_ROWS][outputs], written for the first `rows` rows */
  uint32_t rows;      /* at most EV_LINEAR_MAX_ROWS */
  uint32_t inputs;    /* a multiple of 8 */
  uint32_t outputs;
  uint32_t slice_chunks; /* of EV_LINEAR_CHUNK inputs: the last slice may have fewer */
} EvLinear;

/* Floats to the two planes of EvLinear. */
typedef struct EvSplit {
  uint64_t values; /* float[8 * packs] */
  uint64_t high;
  uint64_t low;
  uint64_t packs;
} EvSplit;

/* The sum of the slices of EvLinear. */
typedef struct EvAddSlices {
  uint64_t partials; /* as EvLinear has written them */
  uint64_t sums;     /* float[rows, outputs], written */
  uint32_t outputs;
  uint32_t slices;
} EvAddSlices;

#ifdef __cplusplus
#define EV_OFFSET(field, offset) static_assert(offsetof(EvAllReduceNorm, field) == (offset), #field)
EV_OFFSET(slabs, 0);
EV_OFFSET(partial, 64);
EV_OFFSET(residual, 72);
EV_OFFSET(weight, 80);
EV_OFFSET(output, 88);
EV_OFFSET(quantized, 96);
EV_OFFSET(scales, 104);
EV_OFFSET(epochs, 112);
EV_OFFSET(fault, 120);
EV_OFFSET(packs_offset, 128);
EV_OFFSET(escapes_offset, 136);
EV_OFFSET(wait_limit_ns, 144);
EV_OFFSET(rank, 152);
EV_OFFSET(rows, 156);
EV_OFFSET(hidden, 160);
EV_OFFSET(warps_per_group, 164);
EV_OFFSET(max_blocks, 168);
EV_OFFSET(block_rows, 172);
EV_OFFSET(block_packs, 176);
EV_OFFSET(flags, 180);
EV_OFFSET(epsilon, 184);
EV_OFFSET(static_scale, 188);
EV_OFFSET(tag, 192);
static_assert(sizeof(EvAllReduceNorm) == 200, "size");
#undef EV_OFFSET
#define EV_OFFSET(field, offset) static_assert(offsetof(EvChooseRow, field) == (offset), #field)
EV_OFFSET(seed, 0);
EV_OFFSET(position, 8);
EV_OFFSET(temperature, 12);
EV_OFFSET(threshold, 16);
EV_OFFSET(top_k, 20);
EV_OFFSET(top_p, 24);
EV_OFFSET(min_p, 28);
EV_OFFSET(repetition_penalty, 32);
EV_OFFSET(presence_penalty, 36);
EV_OFFSET(frequency_penalty, 40);
EV_OFFSET(text, 44);
EV_OFFSET(num_text, 48);
EV_OFFSET(path, 52);
EV_OFFSET(num_path, 56);
EV_OFFSET(bias, 60);
EV_OFFSET(num_biases, 64);
EV_OFFSET(mask, 68);
EV_OFFSET(workspace, 72);
static_assert(sizeof(EvChooseRow) == 80, "size");
#undef EV_OFFSET
static_assert(sizeof(EvTokenCount) == 8 && sizeof(EvTokenBias) == 8, "size");
#define EV_OFFSET(field, offset) static_assert(offsetof(EvChoose, field) == (offset), #field)
EV_OFFSET(logits, 0);
EV_OFFSET(rows, 8);
EV_OFFSET(keys, 16);
EV_OFFSET(thresholds, 24);
EV_OFFSET(z, 32);
EV_OFFSET(first_token, 40);
EV_OFFSET(columns, 44);
static_assert(sizeof(EvChoose) == 48, "size");
#undef EV_OFFSET
#define EV_OFFSET(field, offset) static_assert(offsetof(EvLinear, field) == (offset), #field)
EV_OFFSET(weights, 0);
EV_OFFSET(high, 8);
EV_OFFSET(low, 16);
EV_OFFSET(row_index, 24);
EV_OFFSET(partials, 32);
EV_OFFSET(rows, 40);
EV_OFFSET(inputs, 44);
EV_OFFSET(outputs, 48);
EV_OFFSET(slice_chunks, 52);
static_assert(sizeof(EvLinear) == 56, "size");
#undef EV_OFFSET
#define EV_OFFSET(field, offset) static_assert(offsetof(EvSplit, field) == (offset), #field)
EV_OFFSET(values, 0);
EV_OFFSET(high, 8);
EV_OFFSET(low, 16);
EV_OFFSET(packs, 24);
static_assert(sizeof(EvSplit) == 32, "size");
#undef EV_OFFSET
#define EV_OFFSET(field, offset) static_assert(offsetof(EvAddSlices, field) == (offset), #field)
EV_OFFSET(partials, 0);
EV_OFFSET(sums, 8);
EV_OFFSET(outputs, 16);
EV_OFFSET(slices, 20);
static_assert(sizeof(EvAddSlices) == 24, "size");
#undef EV_OFFSET
#endif

#endif
