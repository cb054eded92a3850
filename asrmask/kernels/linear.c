/* Linear layers with int8 weights and activations, and what stands beside them in a transformer:
   the layer norm before, GELU, and the residual stream that the result is added to.

   Activations are quantized row by row. Integer sums are exact, and all other arithmetic is done
   number by number, so that a row's result depends on no other row and on no number of threads. */

#include "layers.h"

/* A product of a row and 16 columns, from its integer sums. */
INLINE __m512 product(__m512i sums, Int8Rows rows, int row) {
    __m512i excess = _mm512_set1_epi32(rows.excess[row]);
    return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(sums, excess)),
                         _mm512_set1_ps(rows.scale[row]));
}

/* One tile: rows of integers (n_rows, k) times columns first … first + 63. Each n_digits rows of
   integers are one of out (…, n). */
INLINE void finish_tile(int n_rows, int n_digits, const Matrix *m, Int8Rows rows, int row,
                        int first, float *out, const float *residual) {
    __m512i sums[TILE_ROWS][4];
    multiply_tile(n_rows, rows.integers + (size_t)row * m->k, m->k,
                  m->weight + (size_t)first * m->k, m->k / 4, sums);
#pragma GCC unroll 6
    for (int r = 0; r < n_rows; r += n_digits) {
        size_t start = (size_t)(row + r) / n_digits * m->n + first;
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) {
            int left = m->n - first - c * LANES;
            if (left <= 0) break;
            __mmask16 mask = first_lanes(left);
            size_t at = start + c * LANES;
            __m512 x = product(sums[r][c], rows, row + r);
            if (n_digits == 2) x = _mm512_add_ps(x, product(sums[r + 1][c], rows, row + r + 1));
            x = _mm512_fmadd_ps(x, _mm512_loadu_ps(m->scale + first + c * LANES),
                                _mm512_loadu_ps(m->bias + first + c * LANES));
            if (m->flags & GELU) x = gelu(x);
            if (residual) x = _mm512_add_ps(x, _mm512_maskz_loadu_ps(mask, residual + at));
            _mm512_mask_storeu_ps(out + at, mask, x);
        }
    }
}

INLINE int digits_of(const Matrix *m) { return m->flags & TWO_DIGITS ? 2 : 1; }

static void multiply(const Matrix *m, Int8Rows rows, int n_rows, int first, float *out,
                     const float *residual) {
    if (digits_of(m) == 2) {
        for (int row = 0; row < 2 * n_rows; row += TILE_ROWS) switch (2 * n_rows - row) {
            case 2: finish_tile(2, 2, m, rows, row, first, out, residual); break;
            case 4: finish_tile(4, 2, m, rows, row, first, out, residual); break;
            default: finish_tile(6, 2, m, rows, row, first, out, residual);
            }
        return;
    }
    for (int row = 0; row < n_rows; row += TILE_ROWS)
        WITH_CONSTANT_ROWS(n_rows - row, finish_tile, 1, m, rows, row, first, out, residual)
}

void normalize(const float *x, int k, float *out) {
    __m512 sum = _mm512_setzero_ps();
    for (int i = 0; i < k; i += LANES) sum = _mm512_add_ps(sum, _mm512_loadu_ps(x + i));
    __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(sum) / k);
    sum = _mm512_setzero_ps();
    for (int i = 0; i < k; i += LANES) {
        __m512 y = _mm512_sub_ps(_mm512_loadu_ps(x + i), mean);
        sum = _mm512_fmadd_ps(y, y, sum);
    }
    __m512 variance = _mm512_set1_ps(_mm512_reduce_add_ps(sum) / k + 1e-5f);
    __m512 factor = _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_sqrt_ps(variance));
    for (int i = 0; i < k; i += LANES) {
        __m512 y = _mm512_sub_ps(_mm512_loadu_ps(x + i), mean);
        _mm512_storeu_ps(out + i, _mm512_mul_ps(y, factor));
    }
}

/* Quantize rows (n_rows, k), after a layer norm or a rotation of every 16 channels. */
static void quantize(const float *x, int n_rows, int k, int flags, float *changed, Int8Rows rows) {
    for (int row = 0; row < n_rows; row++, x += k) {
        const float *from = x;
        if (flags & NORMALIZE) normalize(x, k, changed), from = changed;
        if (flags & ROTATE) {
            for (int i = 0; i < k; i += LANES)
                _mm512_storeu_ps(changed + i, rotate_block(_mm512_loadu_ps(from + i)));
            from = changed;
        }
        if (flags & TWO_DIGITS)
            quantize_row_twice(from, k, rows, row);
        else
            quantize_row(from, k, rows, row);
    }
}

/* Of rows of integers. */
static size_t size_of_rows(int n_rows, int k) {
    return round_up((size_t)n_rows * k) + 2 * round_up(sizeof(float) * n_rows) +
           round_up(sizeof(float) * k);
}

/* Lay quantized rows and a row of floats out in memory. */
static Int8Rows place_rows(char *memory, int n_rows, int k, float **row) {
    Int8Rows rows = {(int8_t *)memory, NULL, NULL};
    memory += round_up((size_t)n_rows * k);
    rows.scale = (float *)memory;
    memory += round_up(sizeof(float) * n_rows);
    rows.excess = (int32_t *)memory;
    memory += round_up(sizeof(float) * n_rows);
    *row = (float *)memory;
    return rows;
}

typedef struct {
    const Matrix *m;
    const float *x, *residual;
    float *out;
    int64_t n_rows;
    int size; /* rows or blocks of columns that one item is */
} Linear;

static void linear_rows(const Linear *job, const Matrix *m, int64_t first, int n_rows, int begin,
                        int end) {
    float *changed;
    int n_integers = digits_of(m) * n_rows;
    Int8Rows rows = place_rows(scratch(size_of_rows(n_integers, m->k)), n_integers, m->k, &changed);
    quantize(job->x + first * m->k, n_rows, m->k, m->flags, changed, rows);
    const float *residual = job->residual ? job->residual + first * m->n : NULL;
    for (int column = begin; column < end; column += COLUMNS)
        multiply(m, rows, n_rows, column, job->out + first * m->n, residual);
}

static void some_rows(const void *context, int64_t item) {
    const Linear *job = context;
    int64_t first = item * job->size;
    int n_rows = (int)(job->n_rows - first < job->size ? job->n_rows - first : job->size);
    linear_rows(job, job->m, first, n_rows, 0, job->m->n);
}

static void some_columns(const void *context, int64_t item) {
    const Linear *job = context;
    int begin = (int)item * job->size * COLUMNS, end = begin + job->size * COLUMNS;
    linear_rows(job, job->m, 0, (int)job->n_rows, begin, end < job->m->n ? end : job->m->n);
}

static void linear_job(Linear *job, int n_threads) {
    if (job->n_rows <= FEW_ROWS) {
        int n_blocks = (job->m->n + COLUMNS - 1) / COLUMNS;
        job->size = (n_blocks + n_threads - 1) / n_threads;
        if (job->size > 64) job->size = 64; /* a vocabulary: take turns */
        run(n_threads, (n_blocks + job->size - 1) / job->size, some_columns, job);
    } else {
        job->size = 8 * TILE_ROWS;
        run(n_threads, (job->n_rows + job->size - 1) / job->size, some_rows, job);
    }
}

void linear(const Matrix *m, const float *x, int64_t n_rows, float *out, const float *residual,
            int n_threads) {
    Linear job = {m, x, residual, out, n_rows, 0};
    linear_job(&job, n_threads);
}

/* x (n_rows, k) to out (n_rows, n); residual: (n_rows, n), added, or NULL */
void asrmask_linear(const uint8_t *weight, const float *scale, const float *bias, int n, int k,
                    int flags, const float *x, int64_t n_rows, float *out, const float *residual,
                    int n_threads) {
    Matrix m = {weight, scale, bias, n, k, flags};
    linear(&m, x, n_rows, out, residual, n_threads);
}

typedef struct {
    Matrix up, down;
    const float *x;
    float *out;
    int64_t n_rows;
    int size;
} FeedForward;

static void feed_forward_rows(const void *context, int64_t item) {
    const FeedForward *job = context;
    const Matrix *up = &job->up, *down = &job->down;
    int64_t first = item * job->size;
    int n_rows = (int)(job->n_rows - first < job->size ? job->n_rows - first : job->size);
    size_t n_wide = round_up(sizeof(float) * n_rows * up->n);
    int n_integers = digits_of(up) * n_rows;
    char *memory = scratch(n_wide + size_of_rows(n_integers, down->k));
    float *wide = (float *)memory, *changed;
    Int8Rows rows = place_rows(memory + n_wide, n_integers, up->k, &changed);
    quantize(job->x + first * up->k, n_rows, up->k, up->flags, changed, rows);
    for (int column = 0; column < up->n; column += COLUMNS)
        multiply(up, rows, n_rows, column, wide, NULL);
    rows = place_rows(memory + n_wide, n_integers, down->k, &changed);
    quantize(wide, n_rows, down->k, down->flags, changed, rows);
    for (int column = 0; column < down->n; column += COLUMNS)
        multiply(down, rows, n_rows, column, job->out + first * down->n, job->x + first * up->k);
}

void feed_forward(const Matrix *up, const Matrix *down, const float *x, int64_t n_rows, float *out,
                  float *wide, int n_threads) {
    if (n_rows <= FEW_ROWS) {
        linear(up, x, n_rows, wide, NULL, n_threads);
        linear(down, wide, n_rows, out, x, n_threads);
    } else {
        FeedForward job = {*up, *down, x, out, n_rows, 4 * TILE_ROWS};
        run(n_threads, (n_rows + job.size - 1) / job.size, feed_forward_rows, &job);
    }
}

/* x (n_rows, k) to out, the same; up: (n, k), down: (k, n); flags: TWO_DIGITS or none;
   wide: (n_rows, n) if rows are few */
void asrmask_feed_forward(const uint8_t *up_weight, const float *up_scale, const float *up_bias,
                          const uint8_t *down_weight, const float *down_scale,
                          const float *down_bias, int n, int k, int flags, const float *x,
                          int64_t n_rows, float *out, float *wide, int n_threads) {
    Matrix up = {up_weight, up_scale, up_bias, n, k, NORMALIZE | GELU | flags};
    Matrix down = {down_weight, down_scale, down_bias, k, n, ROTATE | flags};
    feed_forward(&up, &down, x, n_rows, out, wide, n_threads);
}
