/* Cross-attention to the encoder's features directly: no keys and values are computed.

   With a head's key and value projections K and V, a score is q . (K f) = (K^T q) . f, and the
   output is V (sum of w f). The features are int8, queries and softmax weights two int8 digits,
   the projections of heads 16-bit floats. A text's result depends on no other text. */

#include "layers.h"

#define SOME_HEADS 3 /* together: two digits of each fill a tile */
#define SOME_TEXTS TILE_ROWS /* at most, that read the projections of heads once */

typedef struct {
    const CrossWeights *weights;
    const Clip *clips;
    int n_queries; /* of each clip */
    int n_texts;   /* clips times queries */
    int size;      /* texts that one item is, up to SOME_TEXTS */
    const float *q;
    const int64_t *strides;
    float *out;
} CrossAttention;

/* Both digits' sums, put together: `n_digits` rows of int8 are half as many rows of out. */
INLINE void digits_tile(int n_digits, Int8Rows rows, int first_digit, int k, const uint8_t *packed,
                        float step, const float *bias, float *out, size_t stride) {
    __m512i sums[TILE_ROWS][4];
    multiply_tile(n_digits, rows.integers + (size_t)first_digit * k, k, packed, k / 4, sums);
#pragma GCC unroll 3
    for (int r = 0; r < n_digits / 2; r++)
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) {
            __m512 x = bias ? _mm512_loadu_ps(bias + c * LANES) : _mm512_setzero_ps();
#pragma GCC unroll 2
            for (int digit = 0; digit < 2; digit++) {
                int row = first_digit + 2 * r + digit;
                __m512i sum =
                    _mm512_sub_epi32(sums[2 * r + digit][c], _mm512_set1_epi32(rows.excess[row]));
                x = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum),
                                    _mm512_set1_ps(rows.scale[row] * step), x);
            }
            _mm512_storeu_ps(out + r * stride + c * LANES, x);
        }
}

/* Two-digit rows (2 n_rows, k) times packed numbers (n / 64, k / 4, 64, 4): out (n_rows, n) */
static void multiply_digits(Int8Rows rows, int n_rows, int k, const uint8_t *packed, int n,
                            float step, const float *bias, float *out, size_t stride) {
    for (int i = 0; i < n; i += COLUMNS, packed += (size_t)COLUMNS * k)
        for (int digit = 0; digit < 2 * n_rows; digit += TILE_ROWS) {
            float *to = out + (size_t)(digit / 2) * stride + i;
            const float *b = bias ? bias + i : NULL;
            switch (2 * n_rows - digit) {
            case 2: digits_tile(2, rows, digit, k, packed, step, b, to, stride); break;
            case 4: digits_tile(4, rows, digit, k, packed, step, b, to, stride); break;
            default: digits_tile(6, rows, digit, k, packed, step, b, to, stride);
            }
        }
}

static void softmax(float *x, int n) {
    __m512 largest = _mm512_set1_ps(-__builtin_inff()), sum = _mm512_setzero_ps();
    for (int i = 0; i < n; i += LANES) largest = _mm512_max_ps(largest, _mm512_loadu_ps(x + i));
    largest = _mm512_set1_ps(_mm512_reduce_max_ps(largest));
    for (int i = 0; i < n; i += LANES) {
        __m512 y = exponential(_mm512_sub_ps(_mm512_loadu_ps(x + i), largest));
        sum = _mm512_add_ps(sum, y);
        _mm512_storeu_ps(x + i, y);
    }
    __m512 factor = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(sum));
    for (int i = 0; i < n; i += LANES)
        _mm512_storeu_ps(x + i, _mm512_mul_ps(_mm512_loadu_ps(x + i), factor));
}

/* Some heads of some texts. A row is a head of a text; rows of a text stand together. */
static void attend_texts(const void *context, int64_t item) {
    const CrossAttention *job = context;
    const CrossWeights *weights = job->weights;
    int n_groups = (weights->n_heads + SOME_HEADS - 1) / SOME_HEADS, n_state = weights->n_state;
    int head = (int)(item % n_groups) * SOME_HEADS, text = (int)(item / n_groups) * job->size;
    int n_heads = weights->n_heads - head < SOME_HEADS ? weights->n_heads - head : SOME_HEADS;
    int n_texts = job->n_texts - text < job->size ? job->n_texts - text : job->size;
    int n_rows = n_heads * n_texts;
    int64_t n_keys = 0;
    for (int i = 0; i < n_texts; i++) {
        int64_t n = job->clips[(text + i) / job->n_queries].n_keys;
        n_keys = n > n_keys ? n : n_keys;
    }
    size_t longest = (size_t)(n_keys > n_state ? n_keys : n_state);
    size_t n_wide = sizeof(float) * n_rows * n_state, n_scores = sizeof(float) * n_rows * n_keys;
    size_t n_scales = round_up(sizeof(float) * 2 * n_rows);
    char *memory = scratch(n_wide + n_scores + 2 * n_rows * longest + 2 * n_scales);
    float *wide = (float *)memory, *scores = (float *)(memory += n_wide);
    Int8Rows rows = {(int8_t *)(memory += n_scores), NULL, NULL};
    rows.scale = (float *)(memory += 2 * n_rows * longest);
    rows.excess = (int32_t *)(memory + n_scales);

    const float *from[SOME_TEXTS];
    float *to[SOME_TEXTS];
    for (int h = 0; h < n_heads; h++) {
        for (int i = 0; i < n_texts; i++) {
            int clip = (text + i) / job->n_queries, query = (text + i) % job->n_queries;
            from[i] = job->q + clip * job->strides[0] + (head + h) * job->strides[1] +
                      query * job->strides[2];
            to[i] = wide + (size_t)(i * n_heads + h) * n_state;
        }
        const uint16_t *inward = weights->inward + (size_t)(head + h) * WIDTH * n_state;
        project(from, n_texts, inward, WIDTH, n_state, to);
    }
    for (int i = 0, n; i < n_texts; i += n) { /* texts of one clip at a time */
        int c = (text + i) / job->n_queries;
        n = (c + 1) * job->n_queries - (text + i);
        if (n > n_texts - i) n = n_texts - i;
        const Clip *clip = job->clips + c;
        float *some = wide + (size_t)i * n_heads * n_state;
        int n_some = n * n_heads, k = (int)clip->n_keys;
        for (int r = 0; r < n_some; r++)
            quantize_row_twice(some + (size_t)r * n_state, n_state, rows, r);
        multiply_digits(rows, n_some, n_state, clip->keys, k, weights->step / __builtin_sqrtf((float)n_state), clip->bias,
                        scores, k);
        for (int r = 0; r < n_some; r++) {
            softmax(scores + (size_t)r * k, k);
            quantize_row_twice(scores + (size_t)r * k, k, rows, r);
        }
        multiply_digits(rows, n_some, k, clip->values, n_state, weights->step, NULL, some, n_state);
    }
    for (int h = 0; h < n_heads; h++) {
        for (int i = 0; i < n_texts; i++) {
            from[i] = wide + (size_t)(i * n_heads + h) * n_state;
            to[i] = job->out + ((size_t)(text + i) * weights->n_heads + head + h) * WIDTH;
        }
        const uint16_t *outward = weights->outward + (size_t)(head + h) * WIDTH * n_state;
        project(from, n_texts, outward, n_state, WIDTH, to);
        for (int i = 0; i < n_texts; i++)
            for (int c = 0; c < WIDTH; c += LANES) {
                const float *bias = weights->outward_bias + (head + h) * WIDTH + c;
                _mm512_storeu_ps(to[i] + c,
                                 _mm512_add_ps(_mm512_loadu_ps(to[i] + c), _mm512_loadu_ps(bias)));
            }
    }
}

void cross_attention(const CrossWeights *weights, const Clip *clips, int n_clips, int n_queries,
                     const float *q, const int64_t *strides, float *out, int n_threads) {
    CrossAttention job = {weights, clips, n_queries, n_clips * n_queries, 1, q, strides, out};
    int n_groups = (weights->n_heads + SOME_HEADS - 1) / SOME_HEADS;
    job.size = n_groups * job.n_texts / (2 * n_threads); /* two items a thread, or more */
    job.size = job.size < 1 ? 1 : job.size > SOME_TEXTS ? SOME_TEXTS : job.size;
    int n_parts = (job.n_texts + job.size - 1) / job.size;
    run(n_threads, (int64_t)n_groups * n_parts, attend_texts, &job);
}

void asrmask_cross_attention(const uint16_t *inward, const uint16_t *outward,
                             const float *outward_bias, int n_heads, int n_state, float step,
                             const Clip *clips, int n_clips, int n_queries, const float *q,
                             const int64_t *strides, float *out, int n_threads) {
    CrossWeights weights = {inward, outward, outward_bias, n_heads, n_state, step};
    cross_attention(&weights, clips, n_clips, n_queries, q, strides, out, n_threads);
}
