/* The layers that a decoder step is made of. */
#pragma once

#include "int8.h"

#define WIDTH 64    /* channels of a head */
#define FEW_ROWS 64 /* up to here each thread takes some of the outputs, beyond some of the rows */

enum { NORMALIZE = 1, GELU = 2, ROTATE = 4, TWO_DIGITS = 8 }; /* as in __init__.py */

typedef struct {
    const uint8_t *weight; /* (n / 64, k / 4, 64, 4), unsigned: OFFSET more; n padded with zeros */
    const float *scale, *bias; /* (n), padded likewise */
    int n, k;
    int flags;
} Matrix;

#pragma GCC visibility push(hidden)

/* x (n_rows, k) to out (n_rows, n); residual: (n_rows, n), added, or NULL. It may be `out`. */
void linear(const Matrix *m, const float *x, int64_t n_rows, float *out, const float *residual,
            int n_threads);

/* out = x + down(gelu(up(normalize(x)))), all (n_rows, k). It may be `x`.
   wide: (n_rows, n) where rows are few */
void feed_forward(const Matrix *up, const Matrix *down, const float *x, int64_t n_rows, float *out,
                  float *wide, int n_threads);

/* x: n_rows (up to TILE_ROWS) of k numbers; weights: (k, n), float16; out: n_rows of n numbers */
void project(const float *const *x, int n_rows, const uint16_t *weights, int k, int n,
             float *const *out);

/* The layer norm of a row, without weight and bias. */
void normalize(const float *x, int k, float *out);

/* The features of a clip, and which of them are hidden. */
typedef struct {
    const uint8_t *keys;   /* (n_keys / 64, n_state / 4, 64, 4), unsigned: OFFSET more */
    const uint8_t *values; /* (n_state / 64, n_keys / 4, 64, 4), likewise */
    const float *bias;     /* (n_keys), -infinity for those behind the last */
    int64_t n_keys;        /* a multiple of 64 */
} Clip;

typedef struct {
    const uint16_t *inward;    /* (n_heads, 64, n_state), float16 */
    const uint16_t *outward;   /* (n_heads, n_state, 64), float16 */
    const float *outward_bias; /* (n_heads, 64) */
    int n_heads, n_state;
    float step; /* of the features */
} CrossWeights;

/* q: (n_clips, n_heads, n_queries, 64), with strides of clips, heads and queries;
   out: (n_clips, n_queries, n_heads, 64) */
void cross_attention(const CrossWeights *weights, const Clip *clips, int n_clips, int n_queries,
                     const float *q, const int64_t *strides, float *out, int n_threads);

#pragma GCC visibility pop
