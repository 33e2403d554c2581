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

/* The draft head. Rows go through it in passes of EV_PASS_ROWS at most. */
enum {
  EV_PASS_ROWS = EV_LINEAR_MAX_ROWS,
  EV_MAX_DRAFT_WIDTH = 64,
  EV_MAX_DRAFT_DEPTH = 258,
  EV_NONE = 0xFFFFFFFF,

  /* Element types */
  EV_BF16 = 0,
  EV_F16 = 1,
  EV_F32 = 2,

  /* A row of attention sees its prefix in at most so many chunks, of at least so many keys. */
  EV_MAX_CHUNKS = 32,
  EV_MIN_CHUNK_KEYS = 256,

  /* Columns of draft logits that one warp looks through */
  EV_SEGMENT_COLUMNS = 1024
};

/* A row of the head: a feature and the token after it. */
typedef struct EvDraftRow {
  uint64_t nodes[4];  /* the draft rows of its request that it sees: its ancestors' and its own */
  uint32_t request;   /* EV_NONE: there is no row here */
  uint32_t token;     /* the target's */
  uint32_t position;
  uint32_t kv_slot;   /* where its key and value go, or EV_NONE */
  uint32_t source;    /* which row of `sources` its feature is */
  uint32_t keep;      /* a pair: where in `sources` its feature is kept, or EV_NONE */
  uint32_t candidate; /* a draft: which of its request's candidates it is */
  uint32_t reserved;
} EvDraftRow;

/* A request that drafts in this step. */
typedef struct EvDraftRequest {
  uint64_t seed;
  uint32_t slot;       /* its row of the page tables */
  uint32_t prefix_len; /* KV rows that all its rows see; its draft rows follow them */
  uint32_t width;
  uint32_t depth;      /* 0: there is no request here */
  uint32_t position;   /* of the root's children */
  uint32_t root;       /* the root's token */
  float temperature;
  float noise_scale;
  float confidence_temperature;
  uint32_t filter;     /* which of `filters` is its, or EV_NONE if it has no filters, penalties or bias */
} EvDraftRequest;

/* A candidate of a request's pool; candidate 0 is the root. */
typedef struct EvCandidate {
  uint32_t token;
  uint32_t parent;
  float score;
} EvCandidate;

/* A page that a request has got. */
typedef struct EvPageUpdate {
  uint32_t slot;
  uint32_t index;
  uint32_t page;
} EvPageUpdate;

/* One launch of a kernel of the head: what it does not use may be anything. A pool is two words, the numbers of
   its candidates and of its draft rows, then the candidates. Sums of linear layers come in slices of
   [EV_PASS_ROWS, outputs], which are added in order. */
typedef struct EvDraft {
  uint64_t embedding;    /* [vocab, hidden] of `embedding_format` */
  uint64_t draft_tokens; /* uint32_t[draft_vocab]: the target's token of each draft token */
  uint64_t rope;         /* float[positions, 2, head_dim / 2]: cosines, sines */
  uint64_t keys;         /* float[KV slots, kv_heads, head_dim] */
  uint64_t values;
  uint64_t page_tables;  /* uint32_t[slots, max_pages] */
  uint64_t requests;     /* EvDraftRequest[requests] */
  uint64_t pools;        /* uint32_t[requests, pool_words] */
  uint64_t rows;         /* EvDraftRow[..]: this pass starts at `first_row` */
  uint64_t next_rows;    /* EvDraftRow[requests, width] */
  uint64_t sources;      /* float[.., hidden]: features */
  uint64_t outputs;      /* float[.., hidden]: the layer's outputs */
  uint64_t partials;     /* float[slices, EV_PASS_ROWS, num_outputs] */
  uint64_t hidden_rows;  /* float[EV_PASS_ROWS, hidden] */
  uint64_t norm_weight;  /* float[hidden] */
  uint64_t token_norm_weight;
  uint64_t high;         /* what is written for the next linear layer: x = high + low */
  uint64_t low;
  uint64_t query;        /* float[EV_PASS_ROWS, heads, head_dim] */
  uint64_t attended;     /* float[1 + chunks, EV_PASS_ROWS, heads, head_dim], the draft rows' first */
  uint64_t attended_sums;/* float2[1 + chunks, EV_PASS_ROWS, heads]: largest score, sum of weights */
  uint64_t noise;        /* float[requests, draft_vocab] */
  uint64_t segment_sums; /* float2[rows, segments]: largest, sum */
  uint64_t segment_best; /* uint2[rows, segments, width]: bits of a value, column */
  uint64_t masks;        /* uint32_t[rows, vocab / 32, rounded up], or 0 */
  uint64_t updates;      /* EvPageUpdate[num_updates] */
  uint64_t filters;      /* EvChooseRow[..], then their lists of tokens of the target */
  uint64_t edited;       /* float[EV_PASS_ROWS, draft_vocab in units of eight]: rows after their filter's edits */
  uint64_t thresholds;   /* float[EV_PASS_ROWS]: the least of `edited` that the filters keep; NaN: none */
  uint64_t paths;        /* EvTokenCount[EV_PASS_ROWS, EV_MAX_DRAFT_DEPTH] */
  uint32_t hidden;
  uint32_t intermediate;
  uint32_t heads;
  uint32_t kv_heads;
  uint32_t head_dim;
  uint32_t vocab;
  uint32_t draft_vocab;
  uint32_t embedding_format;
  uint32_t page_size;
  uint32_t max_pages;
  uint32_t pool_words;
  uint32_t num_updates;
  uint32_t num_outputs; /* of the linear layer before */
  uint32_t num_slices;
  uint32_t first_row;
  uint32_t num_rows;    /* of this pass */
  uint32_t row_width;   /* rows of each request in `rows` */
  uint32_t width;       /* rows of each request in `next_rows` */
  uint32_t level;       /* of the children that are looked for: 1 for the root's */
  float epsilon;
  float scale;          /* of scores */
  uint32_t reserved;
} EvDraft;

/* One array of a paged KV cache. A row is of parts, a part is of units, which are 16, 4 or 1 bytes; units of a row are
   its columns, part by part. Strides are in bytes. */
typedef struct EvKvPlane {
  uint64_t address; /* a multiple of unit_bytes, as are the strides */
  uint64_t page_stride;
  uint64_t row_stride; /* from a row to the next in its page */
  uint64_t part_stride;
  uint32_t part_units;
  uint32_t columns;
  uint32_t unit_bytes;
  uint32_t reserved;
} EvKvPlane;

/* A warp's work: up to 32 columns of a plane. */
typedef struct EvKvChunk {
  uint32_t plane;
  uint32_t first_column;
} EvKvChunk;

/* A row to copy: both by page and row in the page. */
typedef struct EvKvMove {
  uint32_t from_page;
  uint32_t from_row;
  uint32_t to_page;
  uint32_t to_row;
} EvKvMove;

/* One call to move rows, a row of blocks for each request. No two requests share a row; no source is the destination
   of an earlier move, and no two moves have one destination. */
typedef struct EvKvCommit {
  uint64_t planes; /* EvKvPlane[] */
  uint64_t chunks; /* EvKvChunk[num_chunks] */
  uint64_t moves;  /* EvKvMove[], request by request, at a multiple of 16 */
  uint64_t starts; /* uint32_t[requests + 1]: each one's first move, and the end */
  uint32_t num_chunks;
  uint32_t reserved;
} EvKvCommit;

/* Rows of features to copy as sums of two planes, a row of blocks for each. */
typedef struct EvGatherFeatures {
  uint64_t features; /* [.., width] */
  uint64_t rows;     /* uint32_t[][2]: a row of the features, and the row of the planes that it goes to */
  uint64_t high;     /* [.., width], at a multiple of 4 */
  uint64_t low;      /* as high */
  uint32_t width;    /* a multiple of 2 */
  uint32_t reserved;
} EvGatherFeatures;

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
#define EV_OFFSET(field, offset) static_assert(offsetof(EvDraftRow, field) == (offset), #field)
EV_OFFSET(nodes, 0);
EV_OFFSET(request, 32);
EV_OFFSET(token, 36);
EV_OFFSET(position, 40);
EV_OFFSET(kv_slot, 44);
EV_OFFSET(source, 48);
EV_OFFSET(keep, 52);
EV_OFFSET(candidate, 56);
static_assert(sizeof(EvDraftRow) == 64, "size");
#undef EV_OFFSET
#define EV_OFFSET(field, offset) static_assert(offsetof(EvDraftRequest, field) == (offset), #field)
EV_OFFSET(seed, 0);
EV_OFFSET(slot, 8);
EV_OFFSET(prefix_len, 12);
EV_OFFSET(width, 16);
EV_OFFSET(depth, 20);
EV_OFFSET(position, 24);
EV_OFFSET(root, 28);
EV_OFFSET(temperature, 32);
EV_OFFSET(noise_scale, 36);
EV_OFFSET(confidence_temperature, 40);
EV_OFFSET(filter, 44);
static_assert(sizeof(EvDraftRequest) == 48, "size");
#undef EV_OFFSET
static_assert(sizeof(EvCandidate) == 12 && sizeof(EvPageUpdate) == 12, "size");
#define EV_OFFSET(field, offset) static_assert(offsetof(EvDraft, field) == (offset), #field)
EV_OFFSET(embedding, 0);
EV_OFFSET(draft_tokens, 8);
EV_OFFSET(rope, 16);
EV_OFFSET(keys, 24);
EV_OFFSET(values, 32);
EV_OFFSET(page_tables, 40);
EV_OFFSET(requests, 48);
EV_OFFSET(pools, 56);
EV_OFFSET(rows, 64);
EV_OFFSET(next_rows, 72);
EV_OFFSET(sources, 80);
EV_OFFSET(outputs, 88);
EV_OFFSET(partials, 96);
EV_OFFSET(hidden_rows, 104);
EV_OFFSET(norm_weight, 112);
EV_OFFSET(token_norm_weight, 120);
EV_OFFSET(high, 128);
EV_OFFSET(low, 136);
EV_OFFSET(query, 144);
EV_OFFSET(attended, 152);
EV_OFFSET(attended_sums, 160);
EV_OFFSET(noise, 168);
EV_OFFSET(segment_sums, 176);
EV_OFFSET(segment_best, 184);
EV_OFFSET(masks, 192);
EV_OFFSET(updates, 200);
EV_OFFSET(filters, 208);
EV_OFFSET(edited, 216);
EV_OFFSET(thresholds, 224);
EV_OFFSET(paths, 232);
EV_OFFSET(hidden, 240);
EV_OFFSET(intermediate, 244);
EV_OFFSET(heads, 248);
EV_OFFSET(kv_heads, 252);
EV_OFFSET(head_dim, 256);
EV_OFFSET(vocab, 260);
EV_OFFSET(draft_vocab, 264);
EV_OFFSET(embedding_format, 268);
EV_OFFSET(page_size, 272);
EV_OFFSET(max_pages, 276);
EV_OFFSET(pool_words, 280);
EV_OFFSET(num_updates, 284);
EV_OFFSET(num_outputs, 288);
EV_OFFSET(num_slices, 292);
EV_OFFSET(first_row, 296);
EV_OFFSET(num_rows, 300);
EV_OFFSET(row_width, 304);
EV_OFFSET(width, 308);
EV_OFFSET(level, 312);
EV_OFFSET(epsilon, 316);
EV_OFFSET(scale, 320);
static_assert(sizeof(EvDraft) == 328, "size");
#undef EV_OFFSET
#define EV_OFFSET(field, offset) static_assert(offsetof(EvKvPlane, field) == (offset), #field)
EV_OFFSET(address, 0);
EV_OFFSET(page_stride, 8);
EV_OFFSET(row_stride, 16);
EV_OFFSET(part_stride, 24);
EV_OFFSET(part_units, 32);
EV_OFFSET(columns, 36);
EV_OFFSET(unit_bytes, 40);
static_assert(sizeof(EvKvPlane) == 48, "size");
#undef EV_OFFSET
#define EV_OFFSET(type, field, offset) static_assert(offsetof(type, field) == (offset), #field)
EV_OFFSET(EvKvChunk, plane, 0);
EV_OFFSET(EvKvChunk, first_column, 4);
EV_OFFSET(EvKvMove, from_page, 0);
EV_OFFSET(EvKvMove, from_row, 4);
EV_OFFSET(EvKvMove, to_page, 8);
EV_OFFSET(EvKvMove, to_row, 12);
static_assert(sizeof(EvKvChunk) == 8 && sizeof(EvKvMove) == 16, "size");
#undef EV_OFFSET
#define EV_OFFSET(field, offset) static_assert(offsetof(EvKvCommit, field) == (offset), #field)
EV_OFFSET(planes, 0);
EV_OFFSET(chunks, 8);
EV_OFFSET(moves, 16);
EV_OFFSET(starts, 24);
EV_OFFSET(num_chunks, 32);
static_assert(sizeof(EvKvCommit) == 40, "size");
#undef EV_OFFSET
#define EV_OFFSET(field, offset) static_assert(offsetof(EvGatherFeatures, field) == (offset), #field)
EV_OFFSET(features, 0);
EV_OFFSET(rows, 8);
EV_OFFSET(high, 16);
EV_OFFSET(low, 24);
EV_OFFSET(width, 32);
static_assert(sizeof(EvGatherFeatures) == 40, "size");
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
