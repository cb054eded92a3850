/* Elementary functions of sixteen numbers at a time. */
#pragma once

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))
#define LANES 16   /* floats in a vector */

/* A mask of the first n of sixteen. */
INLINE __mmask16 first_lanes(int64_t n) {
    return n >= LANES ? 0xFFFF : (__mmask16)((1 << n) - 1);
}

INLINE __m512 absolute(__m512 x) { return _mm512_abs_ps(x); }

/* sixteen float16 numbers */
INLINE __m512 half(const uint16_t *x) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)x));
}

/* e to the x for x <= 88, off by at most 2 units in the last place; 0 below -87 */
INLINE __m512 exponential(__m512 x) {
    const __m512 least = _mm512_set1_ps(-87.3f);
    __mmask16 is_normal = _mm512_cmp_ps_mask(x, least, _CMP_GT_OQ);
    x = _mm512_max_ps(x, least);
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)),
                                    _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.0f / 720);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 120));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 24));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 6));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_maskz_scalef_ps(is_normal, p, n);
}

/* x / 2 (1 + erf(x / sqrt 2)), off by at most 3e-7 (Abramowitz and Stegun, 7.1.26) */
INLINE __m512 gelu(__m512 x) {
    __m512 z = _mm512_mul_ps(absolute(x), _mm512_set1_ps(0.70710678f));
    __m512 t = _mm512_div_ps(_mm512_set1_ps(1.0f),
                             _mm512_fmadd_ps(z, _mm512_set1_ps(0.3275911f), _mm512_set1_ps(1.0f)));
    __m512 p = _mm512_set1_ps(1.061405429f);
    p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(-1.453152027f));
    p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(1.421413741f));
    p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(-0.284496736f));
    p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(0.254829592f));
    __m512 minus_square = _mm512_sub_ps(_mm512_setzero_ps(), _mm512_mul_ps(z, z));
    __m512 tail = _mm512_mul_ps(_mm512_mul_ps(p, t), exponential(minus_square)); /* erfc(z) */
    __m512 small = _mm512_mul_ps(_mm512_mul_ps(x, _mm512_set1_ps(0.5f)), tail);
    __mmask16 is_negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
    return _mm512_mask_mov_ps(_mm512_sub_ps(x, small), is_negative, small);
}

/* Sixteen numbers times the normalised Hadamard matrix: sums and differences in four steps. */
INLINE __m512 rotate_block(__m512 x) {
    __m512 y = _mm512_permute_ps(x, 0xB1);
    x = _mm512_mask_sub_ps(_mm512_add_ps(x, y), 0xAAAA, y, x);
    y = _mm512_permute_ps(x, 0x4E);
    x = _mm512_mask_sub_ps(_mm512_add_ps(x, y), 0xCCCC, y, x);
    y = _mm512_shuffle_f32x4(x, x, 0xB1);
    x = _mm512_mask_sub_ps(_mm512_add_ps(x, y), 0xF0F0, y, x);
    y = _mm512_shuffle_f32x4(x, x, 0x4E);
    x = _mm512_mask_sub_ps(_mm512_add_ps(x, y), 0xFF00, y, x);
    return _mm512_mul_ps(x, _mm512_set1_ps(0.25f));
}
