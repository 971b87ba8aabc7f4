/* Sampler in C for CPUs. The package build compiles this file if a compiler is available (pyproject.toml).
 * torch_sampler.py calls it. */
#include <math.h>
#include <stddef.h>
#include <stdlib.h>

#include "../../c_library.h"

/* Version of this file's functions. torch_sampler.py ignores a library whose version differs from its `_INTERFACE`. */
int interface(void) { return 5; }

/* Return the first word of Philox4x32-10 (Salmon et al. 2011) for key `seed` and counter (code, codebook, frame, 0). */
ALWAYS_INLINE uint32_t first_word(uint64_t seed, uint32_t code, uint32_t codebook, uint32_t frame) {
    uint32_t low = (uint32_t)seed, high = (uint32_t)(seed >> 32), first = code, second = codebook, third = frame, fourth = 0;
    for (int round = 0; round < 10; round++) {
        uint64_t product_1 = (uint64_t)first * 0xD2511F53u, product_3 = (uint64_t)third * 0xCD9E8D57u;
        first = (uint32_t)(product_3 >> 32) ^ second ^ low;
        second = (uint32_t)product_3;
        third = (uint32_t)(product_1 >> 32) ^ fourth ^ high;
        fourth = (uint32_t)product_1;
        low += 0x9E3779B9u;
        high += 0xBB67AE85u;
    }
    return first;
}

/* Columns of a packed DrawingOptions, in order. torch_sampler.py compares types and names. */
#define OPTIONS(COLUMN) \
    COLUMN(int32_t, do_sample) \
    COLUMN(float, temperature) \
    COLUMN(int32_t, top_k) \
    COLUMN(float, top_p)
#define AS_FIELD(type, name) type name;
#define AS_TEXT(type, name) #type " " #name ";"

typedef struct {
    OPTIONS(AS_FIELD)
} Options;

const char *option_columns(void) { return OPTIONS(AS_TEXT); }

/* Return the index of the first largest value, ignoring NaN. */
ALWAYS_INLINE ptrdiff_t largest(const float *values, ptrdiff_t count) {
    ptrdiff_t best = 0;
    for (ptrdiff_t place = 1; place < count; place++)
        if (values[place] > values[best])
            best = place;
    return best;
}

/* Return the k-th largest value. `heap` [k] holds the k largest values so far as a min-heap. */
ALWAYS_INLINE float kth_largest(const float *values, ptrdiff_t count, float *heap, ptrdiff_t k) {
    for (ptrdiff_t place = 0; place < k; place++)
        heap[place] = -INFINITY;
    for (ptrdiff_t place = 0; place < count; place++) {
        float value = values[place];
        if (!(value > heap[0]))
            continue;
        ptrdiff_t hole = 0, child;
        for (; (child = 2 * hole + 1) < k; hole = child) {
            child += child + 1 < k && heap[child + 1] < heap[child];
            if (value <= heap[child])
                break;
            heap[hole] = heap[child];
        }
        heap[hole] = value;
    }
    return heap[0];
}

static int ascending(const void *one, const void *other) {
    float left = *(const float *)one, right = *(const float *)other;
    return (left > right) - (left < right);
}

/* Return the smallest value that top-p keeps among those from `least` on, including equal values. Smaller values have a
 * total probability of at most 1 - top_p. */
ALWAYS_INLINE float least_of_top_p(const float *values, ptrdiff_t count, float *kept, float least, float most, float top_p) {
    ptrdiff_t num_kept = 0, first = 0;
    double total = 0.0, sum = 0.0;
    for (ptrdiff_t place = 0; place < count; place++)
        if (values[place] >= least && values[place] > -INFINITY)
            kept[num_kept++] = values[place];
    qsort(kept, num_kept, sizeof *kept, ascending);
    for (ptrdiff_t place = 0; place < num_kept; place++)
        total += exp(kept[place] - most);
    for (; first < num_kept - 1; first++) {
        sum += exp(kept[first] - most);
        if (sum > (1.0f - top_p) * total)
            break;
    }
    return num_kept ? kept[first] : most;
}

/* Sample codes [rows] from logits [rows, vocab] like `sample` of torch_sampler.py, with the same noise. Exponentials
 * and logarithms are rounded from float64, so all C libraries give equal results. `scratch` has 2 * vocab values. */
FOR_THIS_CPU void sample(int64_t *codes, const float *logits, const Options *options, const int64_t *seeds,
                         const int64_t *frames, ptrdiff_t codebook, ptrdiff_t rows, ptrdiff_t vocab, float *scratch) {
    float *scaled = scratch, *largest_values = scratch + vocab;
    for (ptrdiff_t row = 0; row < rows; row++, logits += vocab, options++) {
        codes[row] = largest(logits, vocab);
        if (!options->do_sample)
            continue;
        for (ptrdiff_t code = 0; code < vocab; code++)
            scaled[code] = logits[code] / options->temperature;
        float most = scaled[codes[row]], least = -INFINITY, best = 0.0f;
        if (options->top_k > 0 && options->top_k < vocab)
            least = kth_largest(scaled, vocab, largest_values, options->top_k);
        if (options->top_p < 1.0f)
            least = least_of_top_p(scaled, vocab, largest_values, least, most, options->top_p);
        for (ptrdiff_t code = 0; code < vocab; code++) {
            if (!(scaled[code] >= least && scaled[code] > -INFINITY))
                continue;
            uint32_t word = first_word((uint64_t)seeds[row], (uint32_t)code, (uint32_t)codebook, (uint32_t)frames[row]);
            float noise = (float)-log((word + 0.5) / 4294967296.0);
            float score = (float)exp(scaled[code] - most) / noise;
            if (score > best) {
                best = score;
                codes[row] = code;
            }
        }
    }
}
