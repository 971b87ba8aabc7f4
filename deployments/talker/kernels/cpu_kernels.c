/* The talker on a CPU: decoder stacks over a few rows in float32, and sampling.
 *
 * torch takes forty calls for a layer, which cost more than the arithmetic as long as the model is small. A row's
 * result depends on nothing but the row: each sum has one order, however many rows a call has. Built at install time
 * where a compiler is there (pyproject.toml); cpu_kernels.py calls it, and torch does the same without it.
 */
#include <math.h>
#include <stddef.h>
#include <stdlib.h>

#include "../../cpu.h"

#ifdef __aarch64__
#define LANES 4
#else
#define LANES 8 /* of a vector; GCC makes slow code of vectors that are wider than the CPU's */
#endif
#define TILE 16 /* outputs whose weights stand side by side */
#define PARTS (TILE / LANES)
#define MOST_ROWS 4 /* that share a reading of the weights */
#define MOST_TILES 4

typedef float vector __attribute__((vector_size(LANES * sizeof(float)), aligned(4)));

/* Version of this file's functions. A library whose version is not `_INTERFACE` of cpu_kernels.py is not called. */
int interface(void) { return 4; }

/* Whether this CPU has such vectors; without them torch is faster. */
int suits(void) {
#ifdef __x86_64__
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return 1;
#endif
}

ALWAYS_INLINE float sum_of(const vector *x) {
    float total = 0.0f;
    for (int lane = 0; lane < LANES; lane++)
        total += (*x)[lane];
    return total;
}

/* out [rows, outputs] of in [rows, inputs], for `tiles` of TILE outputs; `left` outputs are in the last one */
ALWAYS_INLINE void multiply_tiles(float *out, const float *in, const float *weights, ptrdiff_t inputs, ptrdiff_t outputs,
                                  int rows, int tiles, int left) {
    vector sums[MOST_ROWS][MOST_TILES * PARTS];
    for (int row = 0; row < rows; row++)
        for (int part = 0; part < tiles * PARTS; part++)
            sums[row][part] = (vector){0};
    for (ptrdiff_t input = 0; input < inputs; input++)
        for (int part = 0; part < tiles * PARTS; part++) {
            vector weight = *(const vector *)(weights + (part / PARTS * inputs + input) * TILE + part % PARTS * LANES);
            for (int row = 0; row < rows; row++)
                sums[row][part] += in[row * inputs + input] * weight;
        }
    for (int row = 0; row < rows; row++) {
        float values[MOST_TILES * TILE];
        memcpy(values, sums[row], tiles * TILE * sizeof(float));
        memcpy(out + row * outputs, values, ((tiles - 1) * TILE + left) * sizeof(float));
    }
}

ALWAYS_INLINE void multiply_rows(float *out, const float *in, const float *weights, ptrdiff_t inputs, ptrdiff_t outputs,
                                 int rows) {
    ptrdiff_t tiles = (outputs + TILE - 1) / TILE, tile = 0;
    int step = rows == 1 ? 4 : 1, left = (int)(outputs - (tiles - 1) * TILE);
    for (; tile + step <= tiles; tile += step)
        multiply_tiles(out + tile * TILE, in, weights + tile * inputs * TILE, inputs, outputs, rows, step,
                       tile + step == tiles ? left : TILE);
    for (; tile < tiles; tile++)
        multiply_tiles(out + tile * TILE, in, weights + tile * inputs * TILE, inputs, outputs, rows, 1,
                       tile + 1 == tiles ? left : TILE);
}

/* out [rows, outputs] = in [rows, inputs] by weights, packed as [outputs / TILE, inputs, TILE] */
ALWAYS_INLINE void product(float *out, const float *in, const float *weights, ptrdiff_t rows, ptrdiff_t inputs,
                           ptrdiff_t outputs) {
    ptrdiff_t row = 0;
    for (; row + MOST_ROWS <= rows; row += MOST_ROWS)
        multiply_rows(out + row * outputs, in + row * inputs, weights, inputs, outputs, MOST_ROWS);
    for (; row < rows; row++)
        multiply_rows(out + row * outputs, in + row * inputs, weights, inputs, outputs, 1);
}

FOR_THIS_CPU void multiply(float *out, const float *in, const float *weights, ptrdiff_t rows, ptrdiff_t inputs,
                           ptrdiff_t outputs) {
    product(out, in, weights, rows, inputs, outputs);
}

/* RMS norm of `size` values, a multiple of LANES */
ALWAYS_INLINE void norm(float *out, const float *in, const float *weight, ptrdiff_t size, float eps) {
    vector squares = {0};
    for (ptrdiff_t place = 0; place < size; place += LANES) {
        vector x = *(const vector *)(in + place);
        squares += x * x;
    }
    float scale = 1.0f / sqrtf(sum_of(&squares) / (float)size + eps);
    for (ptrdiff_t place = 0; place < size; place += LANES)
        *(vector *)(out + place) = *(const vector *)(weight + place) * (*(const vector *)(in + place) * scale);
}

/* The norm of one head, turned by its position */
ALWAYS_INLINE void turn(float *out, const float *in, const float *weight, const float *cosines, const float *sines,
                        ptrdiff_t size, float eps) {
    float normed[size];
    norm(normed, in, weight, size, eps);
    for (ptrdiff_t place = 0, half = size / 2; place < half; place++) {
        float first = normed[place], second = normed[place + half];
        out[place] = first * cosines[place] - second * sines[place];
        out[place + half] = second * cosines[place + half] + first * sines[place + half];
    }
}

/* Where keys and values stand: position p of row r has the slot tables[r, p / block] * block + p % block. */
typedef struct {
    float *keys, *values; /* of layer 0, [slots, kv_heads, head_dim] */
    ptrdiff_t layer; /* floats from a layer to the next */
    const int32_t *tables;
    ptrdiff_t width; /* of a row of the tables */
    ptrdiff_t block;
} Cache;

ALWAYS_INLINE ptrdiff_t slot(const Cache *cache, ptrdiff_t row, ptrdiff_t position) {
    return (ptrdiff_t)cache->tables[row * cache->width + position / cache->block] * cache->block + position % cache->block;
}

typedef struct {
    ptrdiff_t layers, hidden, intermediate, heads, kv_heads, head_dim;
    float eps;
} Shape;

/* One head of one row over `count` positions; the weights [count] of its attention are left in `weights`. */
ALWAYS_INLINE void attend(float *out, const float *query, const Cache *cache, const Shape *shape, ptrdiff_t layer,
                          ptrdiff_t row, ptrdiff_t kv_head, ptrdiff_t count, float *weights) {
    ptrdiff_t size = shape->head_dim, step = shape->kv_heads * size;
    const float *keys = cache->keys + layer * cache->layer + kv_head * size;
    const float *values = cache->values + layer * cache->layer + kv_head * size;
    float scale = 1.0f / sqrtf((float)size), most = -INFINITY, total = 0.0f;
    for (ptrdiff_t position = 0; position < count; position++) {
        const float *key = keys + slot(cache, row, position) * step;
        vector sums = {0};
        for (ptrdiff_t place = 0; place < size; place += LANES)
            sums += *(const vector *)(query + place) * *(const vector *)(key + place);
        weights[position] = sum_of(&sums) * scale;
        most = weights[position] > most ? weights[position] : most;
    }
    for (ptrdiff_t position = 0; position < count; position++) {
        weights[position] = exponential(weights[position] - most);
        total += weights[position];
    }
    for (ptrdiff_t place = 0; place < size; place++)
        out[place] = 0.0f;
    for (ptrdiff_t position = 0; position < count; position++) {
        const float *value = values + slot(cache, row, position) * step;
        weights[position] /= total;
        for (ptrdiff_t place = 0; place < size; place += LANES)
            *(vector *)(out + place) += weights[position] * *(const vector *)(value + place);
    }
}

/* Rows x [rows, hidden] at their positions become hidden states behind the final norm. `tensors`: input norm, q and k
 * and v in one, q norm, k norm, o, norm behind attention, gate, up, down of each layer, and the final norm. Products
 * are packed. `cosines` and `sines` [positions, head_dim]. `followed` [rows, followed_width], or none: the weights of
 * the attention of `followed_head` in `followed_layer`. `scratch`: see cpu_kernels.py. */
FOR_THIS_CPU void run_stack(const Shape *shape, const float *const *tensors, const Cache *cache, float *x, ptrdiff_t rows,
                            const int32_t *positions, const float *cosines, const float *sines, float *followed,
                            ptrdiff_t followed_width, ptrdiff_t followed_layer, ptrdiff_t followed_head, float *scratch) {
    ptrdiff_t hidden = shape->hidden, size = shape->head_dim, heads = shape->heads, kv_heads = shape->kv_heads;
    ptrdiff_t width = heads * size, qkv_width = (heads + 2 * kv_heads) * size, wide = shape->intermediate;
    float *normed = scratch, *qkv = normed + rows * hidden, *attended = qkv + rows * qkv_width;
    float *gate = attended + rows * width, *up = gate + rows * wide, *weights = up + rows * wide;
    for (ptrdiff_t layer = 0; layer < shape->layers; layer++, tensors += 9) {
        for (ptrdiff_t row = 0; row < rows; row++)
            norm(normed + row * hidden, x + row * hidden, tensors[0], hidden, shape->eps);
        product(qkv, normed, tensors[1], rows, hidden, qkv_width);
        for (ptrdiff_t row = 0; row < rows; row++) {
            float *row_qkv = qkv + row * qkv_width;
            const float *cosine = cosines + positions[row] * size, *sine = sines + positions[row] * size;
            ptrdiff_t at = layer * cache->layer + slot(cache, row, positions[row]) * kv_heads * size;
            for (ptrdiff_t head = 0; head < heads; head++)
                turn(row_qkv + head * size, row_qkv + head * size, tensors[2], cosine, sine, size, shape->eps);
            for (ptrdiff_t head = 0; head < kv_heads; head++)
                turn(cache->keys + at + head * size, row_qkv + width + head * size, tensors[3], cosine, sine, size, shape->eps);
            memcpy(cache->values + at, row_qkv + width + kv_heads * size, kv_heads * size * sizeof(float));
        }
        for (ptrdiff_t row = 0; row < rows; row++)
            for (ptrdiff_t head = 0; head < heads; head++) {
                attend(attended + row * width + head * size, qkv + row * qkv_width + head * size, cache, shape, layer, row,
                       head * kv_heads / heads, positions[row] + 1, weights);
                if (followed && layer == followed_layer && head == followed_head)
                    memcpy(followed + row * followed_width, weights, (positions[row] + 1) * sizeof(float));
            }
        product(normed, attended, tensors[4], rows, width, hidden);
        for (ptrdiff_t place = 0; place < rows * hidden; place++)
            x[place] += normed[place];
        for (ptrdiff_t row = 0; row < rows; row++)
            norm(normed + row * hidden, x + row * hidden, tensors[5], hidden, shape->eps);
        product(gate, normed, tensors[6], rows, hidden, wide);
        product(up, normed, tensors[7], rows, hidden, wide);
        for (ptrdiff_t place = 0; place < rows * wide; place++)
            gate[place] = silu(gate[place]) * up[place];
        product(normed, gate, tensors[8], rows, wide, hidden);
        for (ptrdiff_t place = 0; place < rows * hidden; place++)
            x[place] += normed[place];
    }
    for (ptrdiff_t row = 0; row < rows; row++)
        norm(x + row * hidden, x + row * hidden, tensors[0], hidden, shape->eps);
}

/* The first word of Philox4x32-10 (Salmon et al. 2011), keyed by a row's seed, counting (code, codebook, frame, 0). */
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

/* The columns of a packed FilterOptions, in its order; cpu_kernels.py compares types and names when it loads the library. */
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

/* The first of the largest values; NaN is none. */
ALWAYS_INLINE ptrdiff_t largest(const float *values, ptrdiff_t count) {
    ptrdiff_t best = 0;
    for (ptrdiff_t place = 1; place < count; place++)
        if (values[place] > values[best])
            best = place;
    return best;
}

/* The k-th largest value. `heap` [k]: the k largest so far, the least of them first. */
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

/* The least value that top-p keeps of those from `least` on, with all that equal it: the smaller ones sum to at most
 * 1 - top_p. */
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

/* Codes [rows] of logits [rows, vocab]: BatchSampler.sample in sampling.py, with its noise, row by row. Exponentials and
 * logarithms are rounded from float64, so that any C library has the same. `scratch` [2 * vocab]. */
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
