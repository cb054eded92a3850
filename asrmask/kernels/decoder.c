/* A step of the decoder: the next token of every text, through all layers. */

#include "layers.h"

/* The weights of a layer, as __init__.py lists their addresses. */
typedef struct {
    const uint8_t *weight;
    const float *scale, *bias;
} Weights;

typedef struct {
    Weights self, out, query, cross_out, up, down;
    const uint16_t *inward, *outward;
    const float *outward_bias;
} Layer;

/* The table of tokens and the codes of their positions. */
typedef struct {
    const uint16_t *rows; /* (n_vocab, n_state), float16 */
    const float *positions;
} Embedding;

/* The keys and values of a layer: (n_texts, n_heads, capacity, 64) */
typedef struct {
    float *keys, *values;
} TextCache;

typedef struct {
    const float *qkv; /* (n_texts, 3, n_heads, 64) */
    float *keys, *values, *out; /* out: (n_texts, n_heads, 64) */
    int n_heads, capacity, length;
} TextAttention;

/* A head of a text: put its key and value into the cache, and attend to all of them. */
static void attend_head(const TextAttention *job, int64_t item) {
    const int64_t text = item / job->n_heads, head = item % job->n_heads;
    const int n_state = job->n_heads * WIDTH, n_keys = job->length + 1;
    const float *q = job->qkv + text * 3 * n_state + head * WIDTH;
    float *keys = job->keys + item * job->capacity * WIDTH;
    float *values = job->values + item * job->capacity * WIDTH;
    float *weights = scratch(sizeof(float) * n_keys);
    __m512 query[4], sums[4], sum = _mm512_setzero_ps();
    for (int c = 0; c < 4; c++) {
        __m512 key = _mm512_loadu_ps(q + n_state + c * LANES);
        __m512 value = _mm512_loadu_ps(q + 2 * n_state + c * LANES);
        _mm512_storeu_ps(keys + (size_t)job->length * WIDTH + c * LANES, key);
        _mm512_storeu_ps(values + (size_t)job->length * WIDTH + c * LANES, value);
        query[c] = _mm512_mul_ps(_mm512_loadu_ps(q + c * LANES), _mm512_set1_ps(0.125f));
        sums[c] = _mm512_setzero_ps();
    }
    float largest = -__builtin_inff();
    for (int i = 0; i < n_keys; i++) {
        __m512 products = _mm512_setzero_ps();
        for (int c = 0; c < 4; c++)
            products = _mm512_fmadd_ps(query[c], _mm512_loadu_ps(keys + i * WIDTH + c * LANES),
                                       products);
        weights[i] = _mm512_reduce_add_ps(products);
        if (weights[i] > largest) largest = weights[i];
    }
    for (int i = 0; i < n_keys; i += LANES) {
        __mmask16 mask = first_lanes(n_keys - i);
        __m512 x = _mm512_sub_ps(_mm512_maskz_loadu_ps(mask, weights + i), _mm512_set1_ps(largest));
        x = _mm512_maskz_mov_ps(mask, exponential(x));
        sum = _mm512_add_ps(sum, x);
        _mm512_mask_storeu_ps(weights + i, mask, x);
    }
    for (int i = 0; i < n_keys; i++) {
        __m512 weight = _mm512_set1_ps(weights[i]);
        for (int c = 0; c < 4; c++)
            sums[c] = _mm512_fmadd_ps(weight, _mm512_loadu_ps(values + i * WIDTH + c * LANES),
                                      sums[c]);
    }
    __m512 factor = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(sum));
    for (int c = 0; c < 4; c++)
        _mm512_storeu_ps(job->out + item * WIDTH + c * LANES, _mm512_mul_ps(sums[c], factor));
}

static void attend_text(const void *context, int64_t text) {
    const TextAttention *job = context;
    for (int head = 0; head < job->n_heads; head++) attend_head(job, text * job->n_heads + head);
}

static void embed_token(const Embedding *table, int64_t token, int position, int n, float *x) {
    const uint16_t *row = table->rows + (size_t)token * n;
    const float *code = table->positions + (size_t)position * n;
    for (int i = 0; i < n; i += LANES)
        _mm512_storeu_ps(x + i, _mm512_add_ps(half(row + i), _mm512_loadu_ps(code + i)));
}

/* tokens: (n_texts), of n_clips times n_queries texts; x: (n_texts, n_state), the output, normalized
   memory: 9 times as many floats as x
   length: of the texts in the cache, without these tokens */
void asrmask_decoder_step(const Embedding *table, const Layer *layers, int n_layers, int n_heads,
                          float step, const Clip *clips, int n_clips, int n_queries,
                          const TextCache *cache, int capacity, int length, const int64_t *tokens,
                          float *x, float *memory, int n_threads) {
    const int n = n_heads * WIDTH, n_texts = n_clips * n_queries;
    float *qkv = memory, *attended = memory + (size_t)3 * n * n_texts;
    float *query = attended + (size_t)n * n_texts, *wide = query + (size_t)n * n_texts;
    const int64_t strides[3] = {(int64_t)n_queries * n, WIDTH, n};
    for (int i = 0; i < n_texts; i++) embed_token(table, tokens[i], length, n, x + (size_t)i * n);
    for (const Layer *layer = layers; layer < layers + n_layers; layer++, cache++) {
        const Weights *w = &layer->self;
        Matrix self = {w->weight, w->scale, w->bias, 3 * n, n, NORMALIZE | TWO_DIGITS};
        linear(&self, x, n_texts, qkv, NULL, n_threads);
        TextAttention job = {qkv, cache->keys, cache->values, attended, n_heads, capacity, length};
        run(n_texts < 4 ? 1 : n_threads, n_texts, attend_text, &job);
        w = &layer->out;
        Matrix out = {w->weight, w->scale, w->bias, n, n, TWO_DIGITS};
        linear(&out, attended, n_texts, x, x, n_threads);
        w = &layer->query;
        Matrix to_query = {w->weight, w->scale, w->bias, n, n, NORMALIZE | TWO_DIGITS};
        linear(&to_query, x, n_texts, query, NULL, n_threads);
        CrossWeights cross = {layer->inward, layer->outward, layer->outward_bias, n_heads, n, step};
        cross_attention(&cross, clips, n_clips, n_queries, query, strides, attended, n_threads);
        w = &layer->cross_out;
        Matrix cross_out = {w->weight, w->scale, w->bias, n, n, TWO_DIGITS};
        linear(&cross_out, attended, n_texts, x, x, n_threads);
        w = &layer->up;
        Matrix up = {w->weight, w->scale, w->bias, 4 * n, n, NORMALIZE | GELU | TWO_DIGITS};
        w = &layer->down;
        Matrix down = {w->weight, w->scale, w->bias, n, 4 * n, ROTATE | TWO_DIGITS};
        feed_forward(&up, &down, x, n_texts, x, wide, n_threads);
    }
    for (int i = 0; i < n_texts; i++) normalize(x + (size_t)i * n, n, x + (size_t)i * n);
}

static float largest_of(const float *x, int64_t n) {
    __m512 most = _mm512_set1_ps(-__builtin_inff());
    for (int64_t i = 0; i < n; i += LANES)
        most = _mm512_max_ps(most, _mm512_mask_loadu_ps(most, first_lanes(n - i), x + i));
    return _mm512_reduce_max_ps(most);
}

typedef struct {
    const uint16_t *table; /* (n, k), float16 */
    const float *x; /* (n_rows, k) */
    float *logits; /* (n_rows, n) */
    int64_t n;
    int k;
    float margin;
} Refinement;

static void refine_row(const void *context, int64_t row) {
    const Refinement *job = context;
    const float *x = job->x + row * job->k;
    float *logits = job->logits + row * job->n;
    const __m512 least = _mm512_set1_ps(largest_of(logits, job->n) - job->margin);
    for (int64_t i = 0; i < job->n; i += LANES) {
        __mmask16 mask = first_lanes(job->n - i);
        __m512 some = _mm512_maskz_loadu_ps(mask, logits + i);
        unsigned close = _mm512_mask_cmp_ps_mask(mask, some, least, _CMP_GE_OQ);
        for (; close; close &= close - 1) {
            int64_t token = i + __builtin_ctz(close);
            const uint16_t *weights = job->table + token * job->k;
            __m512 sum = _mm512_setzero_ps();
            for (int c = 0; c < job->k; c += LANES)
                sum = _mm512_fmadd_ps(half(weights + c), _mm512_loadu_ps(x + c), sum);
            logits[token] = _mm512_reduce_add_ps(sum);
        }
    }
}

/* Compute logits again, with float16 weights, that are at most `margin` below their row's largest. */
void asrmask_refine(const uint16_t *table, const float *x, int n_rows, int64_t n, int k,
                    float margin, float *logits, int n_threads) {
    Refinement job = {table, x, logits, n, k, margin};
    run(n_rows < 4 ? 1 : n_threads, n_rows, refine_row, &job);
}

typedef struct {
    const float *logits; /* (n_rows, n) */
    int64_t n;
    int64_t *token; /* (n_rows) */
    float *sum; /* (n_rows), of e to the power of what logits have less than the largest */
} Choice;

static void choose_token(const void *context, int64_t row) {
    const Choice *job = context;
    const float *x = job->logits + row * job->n;
    const __m512 none = _mm512_set1_ps(-__builtin_inff());
    __m512 most = _mm512_set1_ps(largest_of(x, job->n)), sum = _mm512_setzero_ps();
    int64_t token = -1;
    for (int64_t i = 0; i < job->n; i += LANES) {
        __m512 y = _mm512_mask_loadu_ps(none, first_lanes(job->n - i), x + i);
        __mmask16 is_most = _mm512_cmp_ps_mask(y, most, _CMP_EQ_OQ);
        if (token < 0 && is_most) token = i + __builtin_ctz(is_most);
        sum = _mm512_add_ps(sum, exponential(_mm512_sub_ps(y, most)));
    }
    job->token[row] = token;
    job->sum[row] = _mm512_reduce_add_ps(sum);
}

/* The first of the largest of each row, and 1 / its probability. */
void asrmask_choose_tokens(const float *logits, int n_rows, int64_t n, int64_t *token,
                           float *sum, int n_threads) {
    Choice job = {logits, n, token, sum};
    run(n_threads, n_rows, choose_token, &job);
}
