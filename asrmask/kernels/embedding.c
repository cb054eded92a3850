/* The input of the encoder: two convolutions, and the rotation of the channels, in 16-bit integers.

   A convolution is a product for each of its three taps. Rows, which are frames, have a scale each,
   so that a position's result depends on the frames that it reads alone. */

#include "layers.h"

#define MAX_FRAME 4095.0f /* times the largest weight and the channels of a row, it fits 32 bits */

typedef struct {
    const int16_t *weight; /* (n_taps, n / 64, k / 2, 64, 2) */
    const float *scale, *bias; /* (n) */
    int n, k, n_taps, stride;
} Convolution;

/* Rows as 16-bit integers. Behind the first and the last one there is a row of zeros. */
typedef struct {
    int16_t *integers; /* (n_rows + 2, k) */
    float *scale;      /* (n_rows + 2) */
} Rows;

typedef struct {
    const Convolution *by;
    Rows from, to;    /* to.integers: NULL for the last stage */
    const float *add; /* (n_rows, n), for the last stage: added to `out` */
    float *out;
    int64_t n_rows; /* of the result */
    int is_rotation, size;
} Stage;

static void quantize_frame(const float *x, int k, Rows rows, int64_t row) {
    __m512 largest = _mm512_setzero_ps();
    for (int i = 0; i < k; i += LANES)
        largest = _mm512_max_ps(largest, absolute(_mm512_loadu_ps(x + i)));
    float scale = scale_of(largest, MAX_FRAME);
    __m512 factor = _mm512_set1_ps(1.0f / scale);
    for (int i = 0; i < k; i += LANES) {
        __m512i n = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + i), factor));
        _mm256_storeu_si256((__m256i *)(rows.integers + row * k + i), _mm512_cvtsepi32_epi16(n));
    }
    rows.scale[row] = scale;
}

/* Columns first … first + 63 of some rows, the sum over taps, to out (rows, n). */
INLINE void convolve_tile(int n_rows, const Stage *job, int64_t row, int first, float *out) {
    const Convolution *by = job->by;
    __m512 totals[TILE_ROWS][4];
#pragma GCC unroll 6
    for (int r = 0; r < n_rows; r++)
        for (int c = 0; c < 4; c++) totals[r][c] = _mm512_setzero_ps();
    for (int tap = 0; tap < by->n_taps; tap++) {
        /* the row before the first one is number 0 */
        int64_t start = row * by->stride + tap + (by->n_taps == 1);
        const int16_t *weight =
            by->weight + ((size_t)tap * by->n + first) * (size_t)by->k;
        __m512i sums[TILE_ROWS][4];
#pragma GCC unroll 6
        for (int r = 0; r < n_rows; r++)
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++) sums[r][c] = _mm512_setzero_si512();
        for (int i = 0; i < by->k / 2; i++) {
            __m512i w[4];
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++) w[c] = _mm512_loadu_si512(weight + i * 128 + 32 * c);
#pragma GCC unroll 6
            for (int r = 0; r < n_rows; r++) {
                const int16_t *x = job->from.integers + (start + r * by->stride) * by->k;
                __m512i pair = _mm512_set1_epi32(((const int32_t *)x)[i]);
#pragma GCC unroll 4
                for (int c = 0; c < 4; c++) sums[r][c] = _mm512_dpwssd_epi32(sums[r][c], w[c], pair);
            }
        }
#pragma GCC unroll 6
        for (int r = 0; r < n_rows; r++) {
            __m512 scale = _mm512_set1_ps(job->from.scale[start + r * by->stride]);
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++)
                totals[r][c] =
                    _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[r][c]), scale, totals[r][c]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < n_rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) {
            int at = first + c * LANES;
            __m512 x = _mm512_fmadd_ps(totals[r][c], _mm512_loadu_ps(by->scale + at),
                                       _mm512_loadu_ps(by->bias + at));
            if (!job->is_rotation) x = gelu(x);
            if (job->add) {
                const float *add = job->add + (row + r) * by->n + at;
                x = _mm512_add_ps(x, _mm512_loadu_ps(add));
            }
            _mm512_storeu_ps(out + (size_t)r * by->n + at, x);
        }
}

static void convolve_rows(const void *context, int64_t item) {
    const Stage *job = context;
    int n = job->by->n;
    int64_t first = item * job->size;
    int n_rows = (int)(job->n_rows - first < job->size ? job->n_rows - first : job->size);
    float *out = job->out ? job->out + first * n : scratch(sizeof(float) * n_rows * n);
    for (int column = 0; column < n; column += COLUMNS)
        for (int row = 0; row < n_rows; row += TILE_ROWS)
            WITH_CONSTANT_ROWS(n_rows - row, convolve_tile, job, first + row, column,
                               out + (size_t)row * n)
    if (!job->out)
        for (int row = 0; row < n_rows; row++)
            quantize_frame(out + (size_t)row * n, n, job->to, first + row + 1);
}

static void convolve(Stage *job, int n_threads) {
    job->size = 4 * TILE_ROWS;
    run(n_threads, (job->n_rows + job->size - 1) / job->size, convolve_rows, job);
}

static Rows lay_out(char **memory, int64_t n_rows, int k) {
    Rows rows = {(int16_t *)*memory, NULL};
    *memory += round_up((size_t)(n_rows + 2) * k * sizeof(int16_t));
    rows.scale = (float *)*memory;
    *memory += round_up((size_t)(n_rows + 2) * sizeof(float));
    for (int edge = 0; edge < 2; edge++) {
        int64_t row = edge ? n_rows + 1 : 0;
        for (int i = 0; i < k; i++) rows.integers[row * k + i] = 0;
        rows.scale[row] = 0.0f;
    }
    return rows;
}

/* frames (n_frames, n_mels) to out ((n_frames + 1) / 2, n): gelu of two convolutions, the second of
   stride 2, times the rotation (n, n), plus `add`, the position codes.
   memory: of asrmask_embedding_memory(n_frames, n_mels, n) bytes */
void asrmask_embed(const int16_t *weight1, const float *scale1, const float *bias1,
                   const int16_t *weight2, const float *scale2, const float *bias2,
                   const int16_t *rotation, const float *rotation_scale, const float *no_bias,
                   const float *frames, int64_t n_frames, int n_mels, int n, const float *add,
                   float *out, char *memory, int n_threads) {
    int64_t n_rows = (n_frames + 1) / 2;
    Rows mel = lay_out(&memory, n_frames, n_mels), first = lay_out(&memory, n_frames, n);
    Rows second = lay_out(&memory, n_rows, n);
    for (int64_t i = 0; i < n_frames; i++) quantize_frame(frames + i * n_mels, n_mels, mel, i + 1);
    Convolution one = {weight1, scale1, bias1, n, n_mels, 3, 1};
    Stage stage = {&one, mel, first, NULL, NULL, n_frames, 0, 0};
    convolve(&stage, n_threads);
    Convolution two = {weight2, scale2, bias2, n, n, 3, 2};
    stage = (Stage){&two, first, second, NULL, NULL, n_rows, 0, 0};
    convolve(&stage, n_threads);
    Convolution turn = {rotation, rotation_scale, no_bias, n, n, 1, 1};
    stage = (Stage){&turn, second, {NULL, NULL}, add, out, n_rows, 1, 0};
    convolve(&stage, n_threads);
}

int64_t asrmask_embedding_memory(int64_t n_frames, int n_mels, int n) {
    int64_t n_rows = (n_frames + 1) / 2;
    return (int64_t)(round_up((n_frames + 2) * n_mels * 2) + round_up((n_frames + 2) * n * 2) +
                     round_up((n_rows + 2) * n * 2) + 2 * round_up((n_frames + 2) * 4) +
                     round_up((n_rows + 2) * 4));
}
