/* Products with float16 weights: small ones, whose errors would not cancel. */

#include "layers.h"

/* x (n_rows, k) times weights (k, n): columns first … first + 63 of out (n_rows, n) */
INLINE void project_tile(int n_rows, const float *const *x, const uint16_t *weights, int k, int n,
                         int first, float *const *out) {
    __m512 sums[TILE_ROWS][4];
#pragma GCC unroll 6
    for (int r = 0; r < n_rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) sums[r][c] = _mm512_setzero_ps();
    for (int i = 0; i < k; i++) {
        __m512 w[4];
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) w[c] = half(weights + (size_t)i * n + first + c * LANES);
#pragma GCC unroll 6
        for (int r = 0; r < n_rows; r++) {
            __m512 factor = _mm512_set1_ps(x[r][i]);
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++) sums[r][c] = _mm512_fmadd_ps(factor, w[c], sums[r][c]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < n_rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) _mm512_storeu_ps(out[r] + first + c * LANES, sums[r][c]);
}

void project(const float *const *x, int n_rows, const uint16_t *weights, int k, int n,
             float *const *out) {
    for (int first = 0; first < n; first += COLUMNS)
        WITH_CONSTANT_ROWS(n_rows, project_tile, x, weights, k, n, first, out)
}

typedef struct {
    const uint16_t *weights; /* (k, n) */
    const float *bias, *x;
    int n, k, n_rows;
    float *out;
} Projection;

static void project_columns(const void *context, int64_t item) {
    const Projection *job = context;
    int first = (int)item * COLUMNS;
    for (int row = 0; row < job->n_rows; row += TILE_ROWS) {
        int n_rows = job->n_rows - row < TILE_ROWS ? job->n_rows - row : TILE_ROWS;
        const float *from[TILE_ROWS];
        float *to[TILE_ROWS];
        for (int r = 0; r < n_rows; r++) {
            from[r] = job->x + (size_t)(row + r) * job->k;
            to[r] = job->out + (size_t)(row + r) * job->n;
        }
        WITH_CONSTANT_ROWS(n_rows, project_tile, from, job->weights, job->k, job->n, first, to)
        for (int r = 0; r < n_rows; r++)
            for (int c = first; c < first + COLUMNS; c += LANES)
                _mm512_storeu_ps(to[r] + c, _mm512_add_ps(_mm512_loadu_ps(to[r] + c),
                                                          _mm512_loadu_ps(job->bias + c)));
    }
}

/* x (n_rows, k) times weights (k, n), float16, plus bias: out (n_rows, n); n is a multiple of 64 */
void asrmask_project(const uint16_t *weights, const float *bias, int n, int k, const float *x,
                     int n_rows, float *out, int n_threads) {
    Projection job = {weights, bias, x, n, k, n_rows, out};
    run(n_threads, n / COLUMNS, project_columns, &job);
}
