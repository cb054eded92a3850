/* Rows as int8, and the tile that all int8 products are made of. */
#pragma once

#include "threads.h"
#include "vector.h"

#define COLUMNS 64  /* outputs that a tile computes: four vectors */
#define TILE_ROWS 6 /* with four vectors each, and the weights, they fill the registers */
#define OFFSET 128  /* weights are stored as unsigned bytes, this much larger */
#define MAX_INT8 127.0f
#define MIN_SCALE 1e-30f /* of a row of zeros */

INLINE size_t round_up(size_t n_bytes) { return (n_bytes + 63) / 64 * 64; }

INLINE float scale_of(__m512 largest, float most) {
    float scale = _mm512_reduce_max_ps(largest) * (1.0f / most);
    return scale > MIN_SCALE ? scale : MIN_SCALE;
}

INLINE float row_scale(const float *x, int k) {
    __m512 largest = _mm512_setzero_ps();
    for (int i = 0; i < k; i += LANES)
        largest = _mm512_max_ps(largest, absolute(_mm512_loadu_ps(x + i)));
    return scale_of(largest, MAX_INT8);
}

/* Rows as int8: their scales, and what the offset of the weights adds to each of their products. */
typedef struct {
    int8_t *integers;
    float *scale;
    int32_t *excess;
} Int8Rows;

INLINE void quantize_row(const float *x, int k, Int8Rows rows, int row) {
    float scale = row_scale(x, k);
    __m512 inverse = _mm512_set1_ps(1.0f / scale);
    __m512i sum = _mm512_setzero_si512();
    int8_t *out = rows.integers + (size_t)row * k;
    for (int i = 0; i < k; i += LANES) {
        __m512i n = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + i), inverse));
        sum = _mm512_add_epi32(sum, n);
        _mm_storeu_si128((__m128i *)(out + i), _mm512_cvtsepi32_epi8(n));
    }
    rows.scale[row] = scale;
    rows.excess[row] = OFFSET * _mm512_reduce_add_epi32(sum);
}

/* A row as two int8 digits, in rows 2 row and 2 row + 1: the second counts 1 / 254 of the first. */
INLINE void quantize_row_twice(const float *x, int k, Int8Rows rows, int row) {
    float scale = row_scale(x, k);
    __m512 inverse = _mm512_set1_ps(1.0f / scale);
    __m512i sums[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    int8_t *out = rows.integers + 2 * (size_t)row * k;
    for (int i = 0; i < k; i += LANES) {
        __m512 y = _mm512_mul_ps(_mm512_loadu_ps(x + i), inverse);
        __m512i first = _mm512_cvtps_epi32(y);
        __m512 rest = _mm512_sub_ps(y, _mm512_cvtepi32_ps(first));
        __m512i second = _mm512_cvtps_epi32(_mm512_mul_ps(rest, _mm512_set1_ps(2 * MAX_INT8)));
        sums[0] = _mm512_add_epi32(sums[0], first);
        sums[1] = _mm512_add_epi32(sums[1], second);
        _mm_storeu_si128((__m128i *)(out + i), _mm512_cvtsepi32_epi8(first));
        _mm_storeu_si128((__m128i *)(out + k + i), _mm512_cvtsepi32_epi8(second));
    }
    for (int digit = 0; digit < 2; digit++) {
        rows.scale[2 * row + digit] = digit ? scale / (2 * MAX_INT8) : scale;
        rows.excess[2 * row + digit] = OFFSET * _mm512_reduce_add_epi32(sums[digit]);
    }
}

/* The sums of a tile: `n_rows` (a constant) rows of int8 times 64 columns of packed weights.
   rows: (n_rows, 4 n_quads); packed: (n_quads, 64, 4), unsigned */
INLINE void multiply_tile(int n_rows, const int8_t *rows, size_t stride, const uint8_t *packed,
                          int n_quads, __m512i sums[TILE_ROWS][4]) {
#pragma GCC unroll 6
    for (int r = 0; r < n_rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) sums[r][c] = _mm512_setzero_si512();
    for (int i = 0; i < n_quads; i++) {
        __m512i weights[4];
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++)
            weights[c] = _mm512_loadu_si512(packed + (size_t)i * 4 * COLUMNS + 64 * c);
#pragma GCC unroll 6
        for (int r = 0; r < n_rows; r++) {
            __m512i x = _mm512_set1_epi32(*(const int32_t *)(rows + r * stride + 4 * i));
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++)
                sums[r][c] = _mm512_dpbusd_epi32(sums[r][c], weights[c], x);
        }
    }
}

/* Calls `f(n, …)` with n, which is 1 to 6, as a constant, so that loops over rows are unrolled. */
#define WITH_CONSTANT_ROWS(n, f, ...)                                                              \
    switch (n) {                                                                                   \
    case 1: f(1, __VA_ARGS__); break;                                                              \
    case 2: f(2, __VA_ARGS__); break;                                                              \
    case 3: f(3, __VA_ARGS__); break;                                                              \
    case 4: f(4, __VA_ARGS__); break;                                                              \
    case 5: f(5, __VA_ARGS__); break;                                                              \
    default: f(6, __VA_ARGS__);                                                                    \
    }
