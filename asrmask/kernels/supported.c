/* Whether this processor has what the kernels are compiled for. Compiled for any x86-64. */

#include <cpuid.h>
#include "threads.h"

Parallel openmp_parallel = NULL;

void asrmask_use_openmp(Parallel parallel) { openmp_parallel = parallel; }

int asrmask_supported(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1)) return 0; /* XSAVE by the system */
    const unsigned has_f16c = c >> 29 & 1, has_fma = c >> 12 & 1;
    unsigned low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & 0xE6) != 0xE6) return 0; /* the system keeps all of the vector registers */
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    const unsigned f = b >> 16 & 1, dq = b >> 17 & 1, bw = b >> 30 & 1, vl = b >> 31 & 1;
    return has_f16c && has_fma && f && dq && bw && vl && (c >> 11 & 1); /* the last is VNNI */
}
