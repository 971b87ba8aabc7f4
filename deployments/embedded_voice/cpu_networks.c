/* Talker on a CPU: decoder stacks over a few rows in float32.
 *
 * torch makes forty calls per layer, which cost more than the arithmetic of a small model. A row's result depends only
 * on the row, because each sum has a fixed order for any number of rows. The package build compiles this file if a
 * compiler is available (pyproject.toml). cpu_networks.py calls it; otherwise torch computes the same.
 */
#include <math.h>
#include <stddef.h>

#include "../c_library.h"

#ifdef __aarch64__
#define LANES 4
#else
#define LANES 8 /* of a vector; GCC generates slow code for vectors wider than those of the CPU */
#endif
#define TILE 16 /* outputs whose weights are stored side by side */
#define PARTS (TILE / LANES)
#define MOST_ROWS 4 /* rows that share one read of the weights */
#define MOST_TILES 4

typedef float vector __attribute__((vector_size(LANES * sizeof(float)), aligned(4)));

/* Version of this file's functions. cpu_networks.py ignores a library whose version differs from its `_INTERFACE`. */
int interface(void) { return 5; }

/* Return whether this CPU has vectors of LANES floats. Without them, torch is faster. */
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

/* Compute out [rows, outputs] from in [rows, inputs] for `tiles` tiles of TILE outputs. The last tile has `left`
 * outputs. */
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

/* Compute out [rows, outputs] = in [rows, inputs] * weights, packed as [outputs / TILE, inputs, TILE]. */
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

/* RMS norm of `size` values, a multiple of LANES. */
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

/* Normalize one head and rotate it by its position. */
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

/* Location of keys and values: position p of row r is in slot tables[r, p / block] * block + p % block. */
typedef struct {
    float *keys, *values; /* of layer 0, [slots, kv_heads, head_dim] */
    ptrdiff_t layer; /* stride between layers in floats */
    const int32_t *tables;
    ptrdiff_t width; /* number of columns of the tables */
    ptrdiff_t block;
} Cache;

ALWAYS_INLINE ptrdiff_t slot(const Cache *cache, ptrdiff_t row, ptrdiff_t position) {
    return (ptrdiff_t)cache->tables[row * cache->width + position / cache->block] * cache->block + position % cache->block;
}

typedef struct {
    ptrdiff_t layers, hidden, intermediate, heads, kv_heads, head_dim;
    float eps;
} Shape;

/* Attend with one head of one row to `count` positions. Stores the attention weights [count] in `weights`. */
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

/* Convert rows x [rows, hidden] at their positions to hidden states after the final norm, in place. `tensors` holds for
 * each layer: input norm, q, k and v in one, q norm, k norm, o, post-attention norm, gate, up, down; then the final
 * norm. Products are packed. `cosines` and `sines` are [positions, head_dim]. `followed` [rows, followed_width], unless
 * NULL, receives the attention weights of `followed_head` in `followed_layer`. cpu_networks.py sizes `scratch`. */
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
