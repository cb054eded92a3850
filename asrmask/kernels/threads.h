/* PyTorch's threads: its OpenMP library runs our work too, so that no threads compete. */
#pragma once

#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

typedef void (*Parallel)(void (*body)(void *), void *data, unsigned n_threads, unsigned flags);

extern Parallel openmp_parallel; /* GOMP_parallel, or NULL: one thread */

typedef struct {
    void (*body)(const void *context, int64_t item);
    const void *context;
    int64_t n_items;
    _Atomic int64_t next;
} Job;

static inline void take_items(void *data) {
    Job *job = data;
    for (int64_t i; (i = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed)) < job->n_items;)
        job->body(job->context, i);
}

/* Run body(context, 0 … n_items - 1), in any order. */
static inline void run(int n_threads, int64_t n_items, void (*body)(const void *, int64_t),
                const void *context) {
    Job job = {body, context, n_items, 0};
    if (n_items < n_threads) n_threads = (int)n_items;
    if (openmp_parallel != NULL && n_threads > 1)
        openmp_parallel(take_items, &job, (unsigned)n_threads, 0);
    else
        take_items(&job);
}

/* Memory for this thread, kept from call to call. */
static inline void *scratch(size_t n_bytes) {
    static _Thread_local struct { void *memory; size_t size; } kept;
    if (kept.size < n_bytes) {
        free(kept.memory);
        kept.size = (n_bytes + 4095) / 4096 * 4096;
        kept.memory = aligned_alloc(64, kept.size);
        if (kept.memory == NULL) abort();
    }
    return kept.memory;
}
