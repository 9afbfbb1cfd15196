/* Tessera: exact attention by tiles. The C interface.
 *
 * Conventions
 *  1. A Problem holds shapes, strides, dtypes and options, never a pointer. A Plan is made from it by pure host work.
 *     Pointers enter only in `tessera_bindings`, at `tessera_run`.
 *  2. Every struct begins with `size`: set it to sizeof, or with the struct's `tessera_*_init`, which also sets every
 *     default. A caller built against an older header passes a smaller size; what it does not know keeps its default.
 *  3. Zero means "absent" only where zero is not a legal value. Scale, window and prefix carry a `has_` flag.
 *  4. Every call that can fail returns a `tessera_code` and, if `error` is not NULL, writes what went wrong: the
 *     argument, its value, the rule and the way out. On failure outputs that are handles are set to NULL.
 *  5. Strides count elements, lengths count rows (tokens), workspace counts bytes, lse is the natural logarithm.
 *  6. Everything may be called from many threads at once; a Plan is immutable and may be run by many threads with
 *     different workspaces.
 *  7. Outputs have their own memory: nothing that is read may overlap what is written. (One address for both is
 *     refused; interleaved views of one buffer are fine.) k and v are read and written where new tokens are appended.
 *
 * The meaning of every option is in docs/contract.md; formulas below use its names.
 */
#ifndef TESSERA_H
#define TESSERA_H

#include <stddef.h>
#include <stdint.h>

#define TESSERA_VERSION_MAJOR 0
#define TESSERA_VERSION_MINOR 1
#define TESSERA_VERSION_PATCH 0

#if defined(_WIN32)
#define TESSERA_API
#else
#define TESSERA_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---------------------------------------------------------------------------------------------- codes and errors */

typedef enum tessera_code {
  TESSERA_OK = 0,
  TESSERA_WRONG = 1,       /* a result was judged and found wrong (tessera_verify) */
  TESSERA_INVALID = 2,     /* not a question at all: the message names the argument, its value, the rule, the way out */
  TESSERA_UNSUPPORTED = 3, /* a fair question that no kernel answers: the message lists every kernel's reason */
  TESSERA_FAILED = 4       /* the machine said no: out of memory, a device error */
} tessera_code;

typedef struct tessera_error {
  size_t size;        /* sizeof(tessera_error) */
  int32_t code;       /* a tessera_code */
  char message[2044]; /* UTF-8, zero-terminated, cut if longer */
} tessera_error;

/* --------------------------------------------------------------------------------------------------- operands */

typedef enum tessera_dtype {
  TESSERA_ABSENT = 0, /* the operand is not part of the problem */
  TESSERA_F64 = 1,
  TESSERA_F32 = 2,
  TESSERA_BF16 = 3,
  TESSERA_F16 = 4,
  TESSERA_I32 = 5,
  TESSERA_BOOL = 6, /* one byte, 0 or 1 */
  TESSERA_E4M3 = 7  /* float8: 4 bits of exponent, 3 of fraction, no infinity, largest 448; only k and v of a forward */
} tessera_dtype;

/* Extents and strides are always in the order (batch, sequence, head, dim); for `bias` and `keep` in the order
 * (batch, head, query, key). BSHD, BHSD, packed QKV, expanded heads and slices are all just strides.
 * The stride of a dimension of extent 1 is ignored. */
typedef struct tessera_operand {
  int32_t dtype; /* a tessera_dtype; TESSERA_ABSENT = 0 */
  int32_t reserved;
  int64_t extent[4];
  int64_t stride[4]; /* elements */
} tessera_operand;

/* Shapes: B batch, Hq/Hkv query and KV heads, Sq/Sk/Sn sequence lengths (queries, keys, new tokens), D and Dv head
 * dims. A packed (varlen) operand has extents (1, rows, H, D). [1|B] may be 1, which broadcasts. "acc" is float64 for
 * float64 inputs, else float32. Where k and v are a cache (tessera_cache) they have extents (cache rows, slots, H, D),
 * or if paged (pages, page size, H, D), any strides. */
typedef enum tessera_name {
  /* inputs */
  TESSERA_Q = 0,          /* (B, Sq, Hq, D)              f64 f32 bf16 f16 */
  TESSERA_K,              /* (B, Sk, Hkv, D)             as q, or e4m3 (forward) */
  TESSERA_V,              /* (B, Sk, Hkv, Dv)            as q, or e4m3 (forward) */
  TESSERA_BIAS,           /* (1|B, 1|Hq, 1|Sq, 1|Sk)     any float; added to the scores; -inf excludes */
  TESSERA_KEEP,           /* (1|B, 1|Hq, 1|Sq, 1|Sk)     bool; true keeps */
  TESSERA_EXCLUDE_KEYS,   /* (B, Sk, 1, 1)               bool; true excludes (key padding); (B, max Sk) if packed too */
  TESSERA_DOCUMENTS_Q,    /* (B, Sq, 1, 1)               i32; ids equal and >= 0 are kept; (1, rows) if packed */
  TESSERA_DOCUMENTS_K,    /* (B, Sk, 1, 1)               i32 */
  TESSERA_SLOPES,         /* (1|B, 1, Hq, 1)             acc; ALiBi: score -= slope |p_i - j| */
  TESSERA_SINKS,          /* (1, 1, Hq, 1)               acc; lse gains exp(sink) */
  TESSERA_CU_SEQLENS_Q,   /* (B + 1, 1, 1, 1)            i32, dense; makes q packed */
  TESSERA_CU_SEQLENS_K,   /* (B + 1, 1, 1, 1)            i32, dense; makes k and v packed */
  TESSERA_SEQUSED_Q,      /* (B, 1, 1, 1)                i32, dense; used rows of each sequence */
  TESSERA_SEQUSED_K,      /* (B, 1, 1, 1)                i32, dense; used keys of each sequence */
  TESSERA_CORNER_OFFSETS, /* (B, 1, 1, 1)                i32, dense; with corner `at`: p_i = i + offset[b] */
  /* inputs of a cache; forward and append only */
  TESSERA_K_NEW,          /* (B, Sn, Hkv, D)            as q; rotated if rotary is on, then written to k; k is in/out */
  TESSERA_V_NEW,          /* (B, Sn, Hkv, Dv)           as q; absent if v lies in k */
  TESSERA_CU_SEQLENS_NEW, /* (B + 1, 1, 1, 1)           i32, dense; makes k_new and v_new packed */
  TESSERA_SEQUSED_NEW,    /* (B, 1, 1, 1)               i32, dense; new tokens of each sequence */
  TESSERA_CACHE_LENS,     /* (1|B, 1, 1, 1)             i32, dense; slots in use before the append, padding included */
  TESSERA_CACHE_BATCH_IDX, /* (B, 1, 1, 1)               i32, dense; the cache row (row of page_table) of a sequence */
  TESSERA_LEFT_PAD,        /* (B, 1, 1, 1)               i32, dense; slots before a sequence's first key */
  TESSERA_PAGE_TABLE,      /* (cache rows, columns, 1, 1) i32; page ids; slot t lies on page table[t / page size] */
  TESSERA_COS,             /* (1, positions, 1, rotary/2) q's dtype or f32 */
  TESSERA_SIN,             /* (1, positions, 1, rotary/2) as cos */
  TESSERA_K_SCALE,         /* (1|as k, 1|as k, 1|Hkv, 1) acc; k = k_scale * e4m3 number: per tensor, head or token */
  TESSERA_V_SCALE,         /* (1|as v, 1|as v, 1|Hkv, 1) acc */
  /* in/out */
  TESSERA_STATUS, /* (1, 1, 1, 1)                i32; a run adds (ors) tessera_status bits; clear it yourself */
  /* results of forward, inputs of backward */
  TESSERA_OUT, /* (B, Sq, Hq, Dv)             q's dtype, or acc */
  TESSERA_LSE, /* (B, Sq, Hq, 1)              acc; natural log */
  /* results of forward only */
  TESSERA_MAX_SCORE, /* (B, Sq, Hq, 1)              acc; largest kept score of the row; -inf if none */
  /* inputs of backward */
  TESSERA_DOUT, /* (B, Sq, Hq, Dv)             out's dtype */
  TESSERA_DLSE, /* (B, Sq, Hq, 1)              acc; absent = 0 */
  /* results of backward; each is computed only if present */
  TESSERA_DQ,                /* as q */
  TESSERA_DK,                /* as k */
  TESSERA_DV,                /* as v */
  TESSERA_DBIAS,             /* extents and dtype of bias */
  TESSERA_DSLOPES,           /* extents and dtype of slopes */
  TESSERA_DSINKS,            /* extents and dtype of sinks */
  TESSERA_NAMES,             /* how many there are */
  TESSERA_NAME_CAPACITY = 48 /* room for names to come without a change of layout */
} tessera_name;

/* "q", "k", ...: the tensor's name in files and messages. NULL if `name` is not one. */
TESSERA_API const char* tessera_name_text(int32_t name);
/* Bytes of one element; 0 for TESSERA_ABSENT or an unknown value. */
TESSERA_API size_t tessera_dtype_bytes(int32_t dtype);
/* "f32", "bf16", ... ; "absent" for TESSERA_ABSENT, NULL if unknown. */
TESSERA_API const char* tessera_dtype_text(int32_t dtype);

/* ----------------------------------------------------------------------------------------------------- problem */

typedef enum tessera_pass {
  TESSERA_FORWARD = 0,
  TESSERA_BACKWARD = 1,
  TESSERA_APPEND = 2 /* k_new and v_new go into the cache and nothing is attended; has no q, heads_q equals heads_kv */
} tessera_pass;

/* Where query row i sits on the key axis: p_i = i + offset. */
typedef enum tessera_corner {
  TESSERA_CORNER_UNSET = 0, /* legal only where nothing depends on it */
  TESSERA_BOTTOM_RIGHT = 1, /* offset = Lk - Lq: the last query sees as far as the last key */
  TESSERA_TOP_LEFT = 2,     /* offset = 0 */
  TESSERA_CORNER_AT = 3     /* offset = corner_at, or per sequence from TESSERA_CORNER_OFFSETS if present */
} tessera_corner;

/* A key is kept if all parts that are given agree. Windows are inclusive and signed: p_i - left <= j <= p_i + right. */
typedef struct tessera_mask {
  int32_t corner; /* a tessera_corner */
  int32_t causal; /* 1: j <= p_i */
  int64_t corner_at;
  int32_t has_window;
  int32_t window_left_unbounded;
  int32_t window_right_unbounded;
  int32_t has_prefix;  /* replaces causal: j < prefix or j <= p_i */
  int64_t window_left; /* left + right < 0 keeps nothing */
  int64_t window_right;
  int64_t prefix; /* >= 0 */
  int64_t chunk;  /* floor(j / chunk) == floor(p_i / chunk); 0 = absent */
  int64_t first;  /* beside a window: also keeps j < first; 0 = absent */
} tessera_mask;

/* How k and v keep a sequence's keys where they are a cache, and how positions are rotated. All zero: plain tensors.
 * Key j of sequence b lies in slot left_pad[b] + j, of cache row cache_batch_idx[b] (default b); if paged in slot
 * t % page_size of page page_table[row][t / page_size]. Before the append a sequence has cache_lens[b] (or
 * seqused_k[b], or len_k) - left_pad[b] keys, after it as many more as it has new tokens; new token n stands at
 * position (keys before) + n. */
typedef struct tessera_cache {
  int64_t page_size; /* slots of a page; 0: not paged */
  int64_t pages;     /* pages in k and in v */
  int64_t rows;      /* rows of k and v, or of page_table; 0 = batch */
  int64_t slots;     /* slots of one sequence; 0 = len_k. page_table has ceil(slots / page_size) columns */
  int32_t ring;   /* 1: slot t lies in slot t % slots; old keys are overwritten; needs a window that never sees them */
  int32_t v_in_k; /* 1: v is the first Dv numbers of k's rows (bind both to one address); append writes k alone */
  int32_t rotary_interleaved; /* 1: numbers 2n and 2n + 1 are rotated together; 0: n and n + rotary_dim / 2 */
  int32_t reserved;
  int64_t rotary_dim;       /* even; that many numbers of q and k_new are rotated at their positions; 0: none */
  int64_t rotary_positions; /* rows of cos and sin; 0 = the larger of len_q and len_k */
} tessera_cache;

typedef struct tessera_problem {
  size_t size;
  int32_t pass;            /* a tessera_pass */
  int32_t deterministic;   /* backward bitwise repeatable (forward always is) */
  int32_t batch_invariant; /* a row's bits depend on nothing else in the batch, nor on how its queries were chunked */
  int32_t allow_tf32;      /* float32 products may round their inputs to TF32 */
  int32_t has_scale;       /* 0: scale is 1/sqrt(dim) */
  int32_t reserved;
  double scale;
  double softcap; /* 0 = absent, else > 0: t = softcap tanh(z / softcap) */
  double dropout; /* probability in [0, 1); the mask is Philox4x32-10 of (seed, offset, b, h, i, j) */
  int64_t batch;
  int64_t heads_q;
  int64_t heads_kv;  /* divides heads_q; query head h reads KV head h / (heads_q / heads_kv) */
  int64_t len_q;     /* Sq; for a packed q the host's upper bound of any sequence's length */
  int64_t len_k;     /* Sk, new tokens included; an upper bound likewise for a packed k and for a cache */
  int64_t rows_q;    /* rows of a packed q in all; 0 if not packed */
  int64_t rows_k;    /* rows of packed k, v in all; 0 if not packed */
  int64_t len_new;   /* Sn, new tokens of a sequence; an upper bound likewise */
  int64_t rows_new;  /* rows of packed k_new, v_new in all; 0 if not packed */
  int64_t dim;       /* D of q and k */
  int64_t dim_v;     /* Dv of v and out */
  int64_t alignment; /* bytes to which every pointer but int32 and bool lists is promised to be aligned; 0 means 16 */
  tessera_mask mask;
  tessera_cache cache;
  tessera_operand operand[TESSERA_NAME_CAPACITY]; /* by tessera_name */
} tessera_problem;

typedef enum tessera_layout {
  TESSERA_BSHD = 0, /* rows of all heads of a token together */
  TESSERA_BHSD = 1, /* rows of all tokens of a head together */
  TESSERA_QKV = 2,  /* BSHD, with q, k and v side by side in one buffer of (Hq + Hkv) D + Hkv Dv elements a token */
  TESSERA_KV = 3    /* BSHD, with k and v side by side in one buffer */
} tessera_layout;

/* Sets size and defaults: forward, no option, everything else 0 or absent. */
TESSERA_API void tessera_problem_init(tessera_problem* problem);
/* Declares one operand at its full extents, dense in `layout` (bias, keep and per-sequence values: dense in their own
 * order). Needs batch, heads, lens, rows and dims set; declare CU_SEQLENS_* before q, k, v. */
TESSERA_API int32_t tessera_declare(tessera_problem* problem, int32_t name, int32_t dtype, int32_t layout,
                                    tessera_error* error);
/* Declares what the pass needs: q k v out lse, and for backward dout dq dk dv besides. */
TESSERA_API int32_t tessera_declare_all(tessera_problem* problem, int32_t dtype, int32_t layout, tessera_error* error);
/* TESSERA_OK, or TESSERA_INVALID with the reason. tessera_plan_make checks too. */
TESSERA_API int32_t tessera_check(const tessera_problem* problem, tessera_error* error);

/* -------------------------------------------------------------------------------------- a problem as one line */

/* A problem as text, with the values that lines may carry (ragged lengths, the dropout seed). Grammar: ADDING.md. */
typedef struct tessera_line tessera_line;
TESSERA_API int32_t tessera_line_parse(const char* text, tessera_line** line, tessera_error* error);
TESSERA_API void tessera_line_free(tessera_line* line);
TESSERA_API const tessera_problem* tessera_line_problem(const tessera_line* line);
/* Values that the line gives to an int32 operand (cu_seqlens_q, seqused_k, ...); NULL and *count = 0 if none. */
TESSERA_API const int32_t* tessera_line_values(const tessera_line* line, int32_t name, int64_t* count);
TESSERA_API uint64_t tessera_line_seed(const tessera_line* line); /* of dropout */
TESSERA_API uint64_t tessera_line_offset(const tessera_line* line);
/* The text form: parse and print are inverse. Writes at most `capacity` bytes with the final zero, returns the bytes
 * needed with the final zero. `buffer` may be NULL if capacity is 0. */
TESSERA_API size_t tessera_line_print(const tessera_line* line, char* buffer, size_t capacity);
/* The same of a problem alone; an empty text if it is not one. */
TESSERA_API size_t tessera_problem_print(const tessera_problem* problem, char* buffer, size_t capacity);

/* ------------------------------------------------------------------------------------------------------ device */

typedef enum tessera_device_kind { TESSERA_CPU = 0, TESSERA_GPU = 1 } tessera_device_kind;

typedef enum tessera_isa {
  TESSERA_ISA_BASELINE = 0, /* what the compiler's default target has */
  TESSERA_ISA_AVX2 = 1,     /* with FMA and F16C */
  TESSERA_ISA_AVX512 = 2,   /* F, BW, DQ, VL */
  TESSERA_ISA_AVX512BF16 = 3
} tessera_isa;

typedef struct tessera_device {
  size_t size;
  int32_t kind;    /* a tessera_device_kind */
  int32_t isa;     /* CPU: a tessera_isa, the best it has (each includes those below) */
  int32_t threads; /* CPU: logical processors that may be used */
  int32_t sm_arch; /* GPU: 75, 80, 86, 89, 90, 100, 103, 120, 121 */
  int32_t sms;     /* GPU: multiprocessors */
  int32_t reserved;
  int64_t shared_per_block; /* GPU: opt-in shared memory of a block, bytes */
  int64_t memory;           /* bytes */
  double flops_16;          /* bf16/f16 FLOP/s at the rated clock; 0 = unknown */
  double flops_32;          /* float32 FLOP/s; 0 = unknown */
  double bytes_per_second;  /* memory bandwidth; 0 = unknown */
  char name[64];
} tessera_device;

/* "host" (this machine's CPU), "cuda" or "cuda:N" (this machine's GPU N; TESSERA_FAILED with the reason if there is
 * none), or the name of a device whose facts are known ("h200", "avx2", ...): plans can be made for it anywhere. */
TESSERA_API int32_t tessera_device_find(const char* name, tessera_device* device, tessera_error* error);
/* The name of known device `index`, NULL past the end. */
TESSERA_API const char* tessera_device_known(int32_t index);

/* -------------------------------------------------------------------------------------------------------- plan */

/* Hints change speed only; results under any hints satisfy the contract. */
typedef struct tessera_hints {
  size_t size;
  const char* kernels; /* NULL: all; else names or prefixes that may be chosen, separated by commas: "cpu",
                          "cpu.avx2", "reference.oracle" (which is never chosen unless named) */
  int32_t threads;     /* 0: as many of the device's as the work is worth; at most 1024 */
  int32_t has_workspace_limit;
  int64_t workspace_limit; /* bytes */
  int32_t tile_rows;       /* 0: the kernel's own choice; at most 1024 */
  int32_t tile_keys;       /* 0: the kernel's own choice; at most 1024 */
  int64_t sample_pairs; /* reference kernels only (others refuse it): compute this many (batch, KV head) pairs, evenly
                           spread, and leave the rest of the outputs untouched; 0: all */
} tessera_hints;
TESSERA_API void tessera_hints_init(tessera_hints* hints);

typedef struct tessera_plan tessera_plan;
TESSERA_API int32_t tessera_plan_make(const tessera_problem* problem, const tessera_device* device,
                                      const tessera_hints* hints, tessera_plan** plan, tessera_error* error);
TESSERA_API void tessera_plan_free(tessera_plan* plan);

typedef struct tessera_plan_facts {
  size_t size;
  const char* engine; /* strings live as long as the plan */
  const char* kernel;
  const char* device;
  int32_t threads;
  int32_t tile_rows;
  int32_t tile_keys;
  int32_t steps;
  int32_t reasons; /* kernels not chosen */
  int32_t reserved;
  int64_t workspace_bytes;
  int64_t bytes_read; /* each operand once */
  int64_t bytes_written;
  int64_t score_bytes_avoided; /* what a materialised score matrix in the accumulation type would take */
  double flops;                /* multiply and add count as two; upper bounds of lengths; the mask's band taken off */
  double roofline_seconds;     /* the larger of flops / peak and bytes / bandwidth; 0 if the device's are unknown */
} tessera_plan_facts;
TESSERA_API int32_t tessera_plan_get(const tessera_plan* plan, tessera_plan_facts* facts, tessera_error* error);
/* Step `index` in words, NULL past the end. */
TESSERA_API const char* tessera_plan_step(const tessera_plan* plan, int32_t index);
/* Kernel not chosen `index`: its name, and in *reason why, in words. NULL past the end. */
TESSERA_API const char* tessera_plan_reason(const tessera_plan* plan, int32_t index, const char** reason);
/* The whole plan for a person. Sizes as in tessera_line_print. */
TESSERA_API size_t tessera_plan_print(const tessera_plan* plan, char* buffer, size_t capacity);

/* --------------------------------------------------------------------------------------------------------- run */

typedef struct tessera_bindings {
  size_t size;
  void* data[TESSERA_NAME_CAPACITY]; /* by tessera_name; first element of each present operand; inputs are only read */
  void* workspace;                   /* at least the plan's workspace_bytes, aligned to 64; contents do not matter */
  int64_t workspace_bytes;
  uint64_t seed; /* dropout */
  uint64_t offset;
} tessera_bindings;

/* What was wrong with metadata that a run met, as bits of TESSERA_STATUS. On a CPU such a run is TESSERA_INVALID, with
 * the message, and writes nothing but these bits; on a device it goes on and leaves out what is unsound. */
typedef enum tessera_status {
  TESSERA_STATUS_SOUND = 0,
  TESSERA_STATUS_LENGTH = 1,   /* a length or an offset out of its range */
  TESSERA_STATUS_CAPACITY = 2, /* more slots than the cache has */
  TESSERA_STATUS_PAGE = 4,     /* a page id or a cache row that does not exist */
  TESSERA_STATUS_POSITION = 8, /* a position that cos and sin do not have */
  TESSERA_STATUS_TARGET = 16   /* two new tokens for one slot */
} tessera_status;
TESSERA_API void tessera_bindings_init(tessera_bindings* bindings);
/* Reads and writes only what is bound, and allocates nothing (reference kernels aside; a GPU's first run loads code).
 * On a CPU `stream` is NULL, and malformed metadata (cu_seqlens that start above 0 or decrease, a length over its
 * bound, a page id that does not exist ...) is TESSERA_INVALID: nothing but TESSERA_STATUS is written. On a GPU
 * `stream` is the CUstream or cudaStream_t (NULL: the default one); the run is queued there, never waits, and may be
 * captured in a graph; what is malformed is noted in TESSERA_STATUS and left out. It uses the GPU that holds q: this
 * thread's current context if it is of that GPU, else its primary context. */
TESSERA_API int32_t tessera_run(const tessera_plan* plan, const tessera_bindings* bindings, void* stream,
                                tessera_error* error);

/* ----------------------------------------------------------------------------------------------------- cascade */

/* Shared prefixes: `count` (1 to 16) forward problems over the same query rows, each with keys of its own. Level n's
 * sequences are the groups that share its keys: for a prefix of all requests, one sequence (cu_seqlens_q = 0, rows);
 * the last level's are the requests. A row's result is that of all its levels' keys together, merged exactly in the
 * order of levels. All levels agree in q's rows, dtype, heads, dims, scale and softcap; levels before the last whose
 * sequences hold several requests take no mask that depends on positions; no dropout, max_score or rotary; sinks in one
 * level; only the last may append. tessera_plan_free frees it. */
TESSERA_API int32_t tessera_cascade_make(const tessera_problem* const* levels, int32_t count,
                                         const tessera_device* device, const tessera_hints* hints, tessera_plan** plan,
                                         tessera_error* error);
/* `levels` points to as many bindings: each level's inputs (q in all), and in the last also out, lse and workspace. */
TESSERA_API int32_t tessera_cascade_run(const tessera_plan* plan, const tessera_bindings* const* levels, void* stream,
                                        tessera_error* error);

/* ------------------------------------------------------------------------------------------------------- tools */

/* The mask of one (batch, head): Sq x Sk bytes (len_q x len_k of the problem), 1 = kept; rows and keys that the
 * sequence does not use are 0. Needs only the mask's operands and lengths bound. */
TESSERA_API int32_t tessera_mask_grid(const tessera_problem* problem, const tessera_bindings* bindings, int64_t batch,
                                      int64_t head, uint8_t* grid, tessera_error* error);
/* The dropout mask of one (batch, head): rows x keys bytes, 1 = kept. Independent of every other option. */
TESSERA_API int32_t tessera_dropout_mask(double dropout, uint64_t seed, uint64_t offset, int64_t batch, int64_t head,
                                         int64_t heads_q, int64_t rows, int64_t keys, uint8_t* grid,
                                         tessera_error* error);

/* How one output compares with the oracle; contract section 9. */
typedef struct tessera_verdict {
  size_t size;
  int32_t name; /* a tessera_name */
  int32_t ok;
  int32_t nonfinite_equal; /* inf and nan at the oracle's places */
  int32_t reserved;
  int64_t elements; /* judged */
  double max;       /* largest |got - oracle| */
  double rms;
  double naive_max; /* the same of the materialised computation with float32 accumulation */
  double naive_rms;
  double bound;     /* what max may be; for lse the bound of the element that comes closest to its own */
  double bound_rms; /* 0: not applied */
} tessera_verdict;
/* Judges the outputs in `got` (results of `problem` on the inputs in the same bindings) against the float64 oracle.
 * Writes at most `capacity` verdicts, *count of them. TESSERA_OK, or TESSERA_WRONG if one fails. `sample_pairs` as in
 * tessera_hints; gradients that sum over all pairs (dbias, dslopes, dsinks) need 0. Allocates. */
TESSERA_API int32_t tessera_verify(const tessera_problem* problem, const tessera_bindings* got, int64_t sample_pairs,
                                   tessera_verdict* verdicts, int32_t capacity, int32_t* count, tessera_error* error);

/* Merging partial states over disjoint key sets (allocates one row a thread): lse = log sum_n exp(lse_n), out = sum_n
 * exp(lse_n - lse) out_n. A part (out 0, lse -inf) is the identity. Backward: dout_n = w_n dout, dlse_n = w_n (dlse +
 * dout . (out_n - out)). All parts share one layout; dtypes: part_out and out any float, lse the accumulation type (f64
 * for f64, else f32). */
typedef struct tessera_merge {
  size_t size;
  int32_t pass; /* TESSERA_FORWARD or TESSERA_BACKWARD */
  int32_t threads;
  int64_t parts;
  int64_t batch;
  int64_t len;
  int64_t heads;
  int64_t dim;
  tessera_operand part_out;         /* (B, S, H, D) */
  tessera_operand part_lse;         /* (B, S, H, 1) */
  tessera_operand out;              /* (B, S, H, D) */
  tessera_operand lse;              /* (B, S, H, 1); forward: may be absent */
  tessera_operand dout;             /* backward: (B, S, H, D) */
  tessera_operand dlse;             /* backward: (B, S, H, 1); may be absent */
  const void* const* part_out_data; /* `parts` pointers */
  const void* const* part_lse_data;
  void* out_data; /* forward: written; backward: not read, recomputed from the parts */
  void* lse_data;
  const void* dout_data;
  const void* dlse_data;
  void* const* dpart_out_data; /* backward: laid out as part_out and part_lse */
  void* const* dpart_lse_data;
} tessera_merge;
TESSERA_API void tessera_merge_init(tessera_merge* merge);
TESSERA_API int32_t tessera_merge_run(const tessera_merge* merge, tessera_error* error);

/* ------------------------------------------------------------------------------------------------ GPU kernels */

/* A kernel that this build ships, for one target: in the kernel pack, the file tessera.pack beside the library. */
typedef struct tessera_kernel_facts {
  size_t size;
  const char* spec;   /* "forward dtype=bf16 dim=128 ..."; strings live as long as the process */
  const char* target; /* "sm_90": machine code for that chip and later ones of its major version; "compute_80": PTX for
                         every later chip, which the driver compiles; "any": the pack lacks it */
  const char* origin; /* "pack", or "compiled at first use" by NVRTC, the CUDA toolkit's run-time compiler */
  int32_t registers;  /* of a thread; 0 of PTX */
  int32_t spill_bytes;
  int32_t threads;
  int32_t reserved;
  int64_t shared_bytes; /* of a block; 0: none, or as much as its plan says */
  int64_t code_bytes;
} tessera_kernel_facts;
/* Writes at most `capacity` of them; *count is how many there are. */
TESSERA_API int32_t tessera_kernels_list(tessera_kernel_facts* kernels, int32_t capacity, int32_t* count,
                                         tessera_error* error);
/* Compiles every shipped kernel with NVRTC into a pack at `path`; needs no GPU. `targets` as "sm_80,sm_90,compute_80",
 * NULL for all; `nvrtc` is the compiler's library, NULL for the one that is found. Fails if a kernel spills. */
TESSERA_API int32_t tessera_kernels_build(const char* path, const char* targets, const char* nvrtc,
                                          tessera_error* error);
/* Writes the pack's images as files into a folder, for profilers and disassemblers. */
TESSERA_API int32_t tessera_kernels_dump(const char* folder, tessera_error* error);

/* What this build is: "0.1.0". */
TESSERA_API const char* tessera_version(void);
/* One line a fact (key, tab, value): compiler, build, OpenMP, instruction sets built in, GPU engine or why not. */
TESSERA_API const char* tessera_build_info(void);

#ifdef __cplusplus
}
#endif
#endif
