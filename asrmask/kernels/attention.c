/* softmax(q k^T / 8 + bias) v for heads of 64 channels, in 16-bit integers.

   Queries and keys have 13 bits, values 12, softmax weights 14. Scores are computed for a few
   queries and all keys, then their softmax, then the sums of values. A query's result depends on
   no other query. */

#include "layers.h"

#define BLOCK 64   /* keys that share a scale */
#define PAIRS 32   /* of channels, or of keys of a block */
#define MAX_KEY 4095.0f    /* 64 products of two such numbers fit 32 bits */
#define MAX_VALUE 2047.0f  /* and 64 of this and MAX_WEIGHT */
#define MAX_WEIGHT 16383.0f
#define LOG2_E 1.44269504f /* scores are logarithms to base 2 */

typedef struct {
    int64_t batch, head, row; /* in floats */
} Strides;

typedef struct {
    const float *q, *k, *v;
    Strides q_strides, k_strides;
    const float *bias; /* (batch, n_keys), or NULL */
    int64_t bias_stride;
    float *out; /* (batch, n_queries, n_heads, 64) */
    int n_heads, n_queries, n_keys;
    int size; /* queries that one item is, a multiple of TILE_ROWS */
} Attention;

/* Keys and values of a head, by blocks of 64 keys, and its bias. */
typedef struct {
    int n_blocks;
    int16_t *keys;   /* (n_blocks, 32 pairs of channels, 64 keys, 2) */
    int16_t *values; /* (n_blocks, 32 pairs of keys, 64 channels, 2) */
    float *key_scale, *value_scale; /* (n_blocks) */
    float *bias; /* (64 n_blocks), -infinity behind the last key */
} PackedHead;

INLINE __m256i as_int16(const float *x, __m512 factor) {
    return _mm512_cvtsepi32_epi16(
        _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x), factor)));
}

INLINE float block_scale(const float *x, int64_t stride, int n_rows, float most) {
    __m512 largest = _mm512_setzero_ps();
    for (int i = 0; i < n_rows; i++)
        for (int c = 0; c < WIDTH; c += LANES)
            largest = _mm512_max_ps(largest, absolute(_mm512_loadu_ps(x + i * stride + c)));
    return scale_of(largest, most);
}

static void pack_keys(const float *k, int64_t stride, int n_rows, int16_t *out, float *scale) {
    int32_t row[PAIRS], *pairs = (int32_t *)out;
    *scale = block_scale(k, stride, n_rows, MAX_KEY);
    __m512 factor = _mm512_set1_ps(1.0f / *scale);
    for (int i = 0; i < BLOCK; i++) {
        for (int c = 0; c < WIDTH; c += LANES)
            _mm256_storeu_si256((__m256i *)((int16_t *)row + c),
                                i < n_rows ? as_int16(k + i * stride + c, factor)
                                           : _mm256_setzero_si256());
        for (int p = 0; p < PAIRS; p++) pairs[p * BLOCK + i] = row[p];
    }
}

static void pack_values(const float *v, int64_t stride, int n_rows, int16_t *out, float *scale) {
    *scale = block_scale(v, stride, n_rows, MAX_VALUE);
    __m512 factor = _mm512_set1_ps(1.0f / *scale);
    for (int i = 0; i < BLOCK; i += 2)
        for (int c = 0; c < WIDTH; c += LANES) {
            __m512 zero = _mm512_setzero_ps();
            __m512 a = i < n_rows ? _mm512_loadu_ps(v + i * stride + c) : zero;
            __m512 b = i + 1 < n_rows ? _mm512_loadu_ps(v + (i + 1) * stride + c) : zero;
            __m512i first = _mm512_cvtps_epi32(_mm512_mul_ps(a, factor));
            __m512i second = _mm512_cvtps_epi32(_mm512_mul_ps(b, factor));
            __m512i pair = _mm512_mask_blend_epi16(0xAAAAAAAA, first,
                                                   _mm512_slli_epi32(second, 16));
            _mm512_storeu_si512(out + (i / 2) * 2 * WIDTH + 2 * c, pair);
        }
}

static void pack_head(const Attention *job, int64_t clip, int head, PackedHead *packed) {
    const float *k = job->k + clip * job->k_strides.batch + head * job->k_strides.head;
    const float *v = job->v + clip * job->k_strides.batch + head * job->k_strides.head;
    int64_t stride = job->k_strides.row;
    for (int b = 0; b < packed->n_blocks; b++) {
        int first = b * BLOCK, n_rows = job->n_keys - first < BLOCK ? job->n_keys - first : BLOCK;
        size_t at = (size_t)first * WIDTH;
        pack_keys(k + first * stride, stride, n_rows, packed->keys + at, packed->key_scale + b);
        pack_values(v + first * stride, stride, n_rows, packed->values + at,
                    packed->value_scale + b);
    }
    for (int i = 0; i < packed->n_blocks * BLOCK; i++)
        packed->bias[i] = i >= job->n_keys ? -__builtin_inff()
                          : job->bias      ? LOG2_E * job->bias[clip * job->bias_stride + i]
                                           : 0.0f;
}

/* Memory for a few queries: numbers, scores, weights and sums of one tile. */
typedef struct {
    int16_t queries[TILE_ROWS][WIDTH];
    float scale[TILE_ROWS];
    __m512 out[TILE_ROWS][4];
    float *scores;    /* (TILE_ROWS, 64 n_blocks) */
    int16_t *weights; /* the same */
} Tile;

INLINE void score_tile(int n_rows, const PackedHead *head, Tile *tile, __m512 largest[TILE_ROWS]) {
    int n_keys = head->n_blocks * BLOCK;
    for (int b = 0; b < head->n_blocks; b++) {
        const int16_t *keys = head->keys + (size_t)b * BLOCK * WIDTH;
        __m512i sums[TILE_ROWS][4];
#pragma GCC unroll 6
        for (int r = 0; r < n_rows; r++)
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++) sums[r][c] = _mm512_setzero_si512();
        for (int p = 0; p < PAIRS; p++) {
            __m512i k[4];
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++) k[c] = _mm512_loadu_si512(keys + p * 2 * BLOCK + 32 * c);
#pragma GCC unroll 6
            for (int r = 0; r < n_rows; r++) {
                __m512i q = _mm512_set1_epi32(((const int32_t *)tile->queries[r])[p]);
#pragma GCC unroll 4
                for (int c = 0; c < 4; c++) sums[r][c] = _mm512_dpwssd_epi32(sums[r][c], k[c], q);
            }
        }
#pragma GCC unroll 6
        for (int r = 0; r < n_rows; r++) {
            __m512 scale = _mm512_set1_ps(tile->scale[r] * head->key_scale[b]);
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++) {
                int at = b * BLOCK + c * LANES;
                __m512 x = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[r][c]), scale,
                                           _mm512_loadu_ps(head->bias + at));
                largest[r] = _mm512_max_ps(largest[r], x);
                _mm512_storeu_ps(tile->scores + (size_t)r * n_keys + at, x);
            }
        }
    }
}

INLINE void value_tile(int n_rows, const PackedHead *head, Tile *tile) {
    int n_keys = head->n_blocks * BLOCK;
    for (int r = 0; r < n_rows; r++)
        for (int c = 0; c < 4; c++) tile->out[r][c] = _mm512_setzero_ps();
    for (int b = 0; b < head->n_blocks; b++) {
        const int16_t *values = head->values + (size_t)b * BLOCK * WIDTH;
        __m512i sums[TILE_ROWS][4];
#pragma GCC unroll 6
        for (int r = 0; r < n_rows; r++)
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++) sums[r][c] = _mm512_setzero_si512();
        for (int p = 0; p < PAIRS; p++) {
            __m512i v[4];
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++) v[c] = _mm512_loadu_si512(values + p * 2 * WIDTH + 32 * c);
#pragma GCC unroll 6
            for (int r = 0; r < n_rows; r++) {
                const int16_t *weights = tile->weights + (size_t)r * n_keys + b * BLOCK;
                __m512i w = _mm512_set1_epi32(((const int32_t *)weights)[p]);
#pragma GCC unroll 4
                for (int c = 0; c < 4; c++) sums[r][c] = _mm512_dpwssd_epi32(sums[r][c], v[c], w);
            }
        }
        __m512 scale = _mm512_set1_ps(head->value_scale[b]);
#pragma GCC unroll 6
        for (int r = 0; r < n_rows; r++)
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++)
                tile->out[r][c] =
                    _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[r][c]), scale, tile->out[r][c]);
    }
}

/* MAX_WEIGHT times 2 to the x, for x <= 0: off by 6e-6 of itself, a tenth of a unit. */
INLINE __m512 weight_of(__m512 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-126.0f));
    __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_sub_ps(x, n);
    __m512 p = _mm512_set1_ps(MAX_WEIGHT * 0.00959024f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(MAX_WEIGHT * 0.05587031f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(MAX_WEIGHT * 0.24023678f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(MAX_WEIGHT * 0.69312804f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(MAX_WEIGHT));
    return _mm512_scalef_ps(p, n);
}

/* 2 to the power of scores, as integers up to MAX_WEIGHT; returns their sum. */
INLINE float soften(const float *scores, int n_keys, float largest, int16_t *weights) {
    __m512 most = _mm512_set1_ps(largest);
    __m512i sum = _mm512_setzero_si512();
    for (int i = 0; i < n_keys; i += LANES) {
        __m512 x = weight_of(_mm512_sub_ps(_mm512_loadu_ps(scores + i), most));
        __m512i n = _mm512_cvtps_epi32(x);
        sum = _mm512_add_epi32(sum, n);
        _mm256_storeu_si256((__m256i *)(weights + i), _mm512_cvtepi32_epi16(n));
    }
    return (float)_mm512_reduce_add_epi32(sum);
}

INLINE void attend_tile(int n_rows, const Attention *job, const PackedHead *head, Tile *tile,
                        const float *q, float *out) {
    __m512 largest[TILE_ROWS];
    int n_keys = head->n_blocks * BLOCK;
    for (int r = 0; r < n_rows; r++) {
        const float *row = q + r * job->q_strides.row;
        float scale = block_scale(row, 0, 1, MAX_KEY);
        for (int c = 0; c < WIDTH; c += LANES)
            _mm256_storeu_si256((__m256i *)(tile->queries[r] + c),
                                as_int16(row + c, _mm512_set1_ps(1.0f / scale)));
        tile->scale[r] = scale * 0.125f * LOG2_E; /* 0.125 is 1 / sqrt(64) */
        largest[r] = _mm512_set1_ps(-__builtin_inff());
    }
    score_tile(n_rows, head, tile, largest);
    float sums[TILE_ROWS];
    for (int r = 0; r < n_rows; r++)
        sums[r] = soften(tile->scores + (size_t)r * n_keys, n_keys,
                         _mm512_reduce_max_ps(largest[r]), tile->weights + (size_t)r * n_keys);
    value_tile(n_rows, head, tile);
    for (int r = 0; r < n_rows; r++)
        for (int c = 0; c < 4; c++)
            _mm512_storeu_ps(out + (int64_t)r * job->n_heads * WIDTH + c * LANES,
                             _mm512_mul_ps(tile->out[r][c], _mm512_set1_ps(1.0f / sums[r])));
}

static void attend_queries(const void *context, int64_t item) {
    const Attention *job = context;
    int n_parts = (job->n_queries + job->size - 1) / job->size;
    int part = (int)(item % n_parts), head = (int)(item / n_parts % job->n_heads);
    int64_t clip = item / n_parts / job->n_heads;
    PackedHead packed = {.n_blocks = (job->n_keys + BLOCK - 1) / BLOCK};
    size_t n_keys = (size_t)packed.n_blocks * BLOCK, n_scales = round_up(4 * packed.n_blocks);
    char *memory = scratch(n_keys * WIDTH * 4 + 2 * n_scales + n_keys * (4 + 6 * TILE_ROWS));
    packed.keys = (int16_t *)memory, memory += n_keys * WIDTH * 2;
    packed.values = (int16_t *)memory, memory += n_keys * WIDTH * 2;
    packed.key_scale = (float *)memory, memory += n_scales;
    packed.value_scale = (float *)memory, memory += n_scales;
    packed.bias = (float *)memory, memory += n_keys * 4;
    Tile tile;
    tile.scores = (float *)memory, memory += n_keys * 4 * TILE_ROWS;
    tile.weights = (int16_t *)memory;
    pack_head(job, clip, head, &packed);
    int first = part * job->size, end = first + job->size;
    if (end > job->n_queries) end = job->n_queries;
    const float *q = job->q + clip * job->q_strides.batch + head * job->q_strides.head;
    float *out = job->out + (clip * job->n_queries * job->n_heads + head) * WIDTH;
    for (int row = first; row < end; row += TILE_ROWS)
        WITH_CONSTANT_ROWS(end - row, attend_tile, job, &packed, &tile,
                           q + row * job->q_strides.row,
                           out + (int64_t)row * job->n_heads * WIDTH)
}

/* q: (n_clips, n_heads, n_queries, 64); k, v: (n_clips, n_heads, n_keys, 64), strided alike;
   strides: of clips, heads and rows, of q and then of k; bias: (1 or n_clips, n_keys), or NULL;
   out: (n_clips, n_queries, n_heads, 64) */
void asrmask_attention(const float *q, const float *k, const float *v, const int64_t *strides,
                       const float *bias, int64_t bias_stride, float *out, int n_clips,
                       int n_heads, int n_queries, int n_keys, int n_threads) {
    Attention job = {q, k, v, {strides[0], strides[1], strides[2]},
                     {strides[3], strides[4], strides[5]}, bias, bias_stride, out,
                     n_heads, n_queries, n_keys, 0};
    /* keys are packed again for each item: as few as keep the threads busy alike */
    int n_parts = n_clips * n_heads >= 3 * n_threads ? 1 : 3 * n_threads / (n_clips * n_heads) + 1;
    job.size = (n_queries + n_parts - 1) / n_parts;
    job.size = (job.size + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
    n_parts = (n_queries + job.size - 1) / job.size;
    run(n_threads, (int64_t)n_clips * n_heads * n_parts, attend_queries, &job);
}
