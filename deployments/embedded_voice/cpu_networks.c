/* Talker on a CPU: decoder stacks over a few rows in float32, and whole frames of the code predictor.
 *
 * torch makes forty calls per layer, which cost more than the arithmetic of a small model. A row's result depends only
 * on the row, because each sum has a fixed order for any number of rows. Reading the weights takes longest, so they are
 * stored as float16 if that is exact. The package build compiles this file if a compiler is available (pyproject.toml).
 * cpu_networks.py calls it; otherwise torch computes the same.
 */
#include <math.h>
#include <stddef.h>

#include "../c_library.h"

/* LANES is the width of a vector; GCC generates slow code for vectors wider than those of the CPU. */
#ifdef __aarch64__
#define LANES 4
#define FOR_VECTORS
#elif defined(__x86_64__)
#include <immintrin.h>
#define LANES 8
#define FOR_VECTORS __attribute__((target("avx2,fma,f16c"))) /* `suits` checks for them */
#else
#define LANES 8
#define FOR_VECTORS
#endif
#define TILE 16 /* outputs whose weights are stored side by side */
#define PARTS (TILE / LANES)
#define MOST_ROWS 4 /* rows that share one read of the weights */
#define MOST_TILES 4

typedef float vector __attribute__((vector_size(LANES * sizeof(float)), aligned(4)));

/* Matrix product. The weights are packed as [outputs / TILE, inputs, TILE], in float16 if `halves` is set. */
typedef struct {
    const void *weights;
    ptrdiff_t inputs, outputs, halves;
} Product;

/* Version of this file's functions. cpu_networks.py ignores a library whose version differs from its `_INTERFACE`. */
int interface(void) { return 6; }

/* Return whether this CPU has vectors of LANES floats and converts float16. Without them, torch is faster. */
int suits(void) {
#ifdef __x86_64__
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#elif defined(__aarch64__)
    return 1;
#else
    return 0;
#endif
}

ALWAYS_INLINE float sum_of(const vector *x) {
    float total = 0.0f;
    for (int lane = 0; lane < LANES; lane++)
        total += (*x)[lane];
    return total;
}

/* Load LANES weights from index `at` on. */
FOR_VECTORS ALWAYS_INLINE void load(vector *out, const void *weights, ptrdiff_t at, int halves) {
    if (!halves) {
        *out = *(const vector *)((const float *)weights + at);
        return;
    }
#ifdef __x86_64__
    *out = (vector)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)((const uint16_t *)weights + at)));
#elif defined(__aarch64__)
    typedef __fp16 half_vector __attribute__((vector_size(LANES * 2), aligned(2)));
    *out = __builtin_convertvector(*(const half_vector *)((const __fp16 *)weights + at), vector);
#endif
}

/* Compute out [rows, outputs] from in [rows, inputs] for `tiles` tiles of TILE outputs from `tile` on. */
FOR_VECTORS ALWAYS_INLINE void multiply_tiles(float *out, const float *in, const Product *product, int halves, int rows,
                                              ptrdiff_t tile, int tiles) {
    ptrdiff_t inputs = product->inputs, outputs = product->outputs, left = outputs - tile * TILE;
    vector sums[MOST_ROWS][MOST_TILES * PARTS], weight;
    for (int row = 0; row < rows; row++)
        for (int part = 0; part < tiles * PARTS; part++)
            sums[row][part] = (vector){0};
    for (ptrdiff_t input = 0; input < inputs; input++)
        for (int part = 0; part < tiles * PARTS; part++) {
            load(&weight, product->weights, ((tile + part / PARTS) * inputs + input) * TILE + part % PARTS * LANES, halves);
            for (int row = 0; row < rows; row++)
                sums[row][part] += in[row * inputs + input] * weight;
        }
    for (int row = 0; row < rows; row++) {
        float values[MOST_TILES * TILE];
        memcpy(values, sums[row], tiles * TILE * sizeof(float));
        memcpy(out + row * outputs + tile * TILE, values, (left < tiles * TILE ? left : tiles * TILE) * sizeof(float));
    }
}

/* Compute out [rows, outputs] from in [rows, inputs]. All rows use a tile before the next tile is read. */
FOR_VECTORS ALWAYS_INLINE void multiply_rows(float *out, const float *in, const Product *product, int halves,
                                             ptrdiff_t rows) {
    ptrdiff_t inputs = product->inputs, outputs = product->outputs, tiles = (outputs + TILE - 1) / TILE;
    ptrdiff_t grouped = rows / MOST_ROWS * MOST_ROWS;
    for (ptrdiff_t tile = 0; tile < tiles; tile++)
        for (ptrdiff_t row = 0; row < grouped; row += MOST_ROWS)
            multiply_tiles(out + row * outputs, in + row * inputs, product, halves, MOST_ROWS, tile, 1);
    for (ptrdiff_t row = grouped; row < rows; row++) {
        ptrdiff_t tile = 0;
        for (; tile + MOST_TILES <= tiles; tile += MOST_TILES)
            multiply_tiles(out + row * outputs, in + row * inputs, product, halves, 1, tile, MOST_TILES);
        for (; tile < tiles; tile++)
            multiply_tiles(out + row * outputs, in + row * inputs, product, halves, 1, tile, 1);
    }
}

FOR_VECTORS void multiply(float *out, const float *in, const Product *product, ptrdiff_t rows) {
    if (product->halves)
        multiply_rows(out, in, product, 1, rows);
    else
        multiply_rows(out, in, product, 0, rows);
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
    const float *input_norm, *q_norm, *k_norm, *post_norm;
    Product qkv, o, gate, up, down;
} Layer;

typedef struct {
    ptrdiff_t layers, hidden, intermediate, heads, kv_heads, head_dim;
    float eps;
    const Layer *layer;
    const float *norm, *cosines, *sines; /* the final norm; [positions, head_dim] */
} Stack;

/* Attend with one head of one row to `count` positions. Stores the attention weights [count] in `weights`. */
ALWAYS_INLINE void attend(float *out, const float *query, const Cache *cache, const Stack *stack, ptrdiff_t layer,
                          ptrdiff_t row, ptrdiff_t kv_head, ptrdiff_t count, float *weights) {
    ptrdiff_t size = stack->head_dim, step = stack->kv_heads * size;
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

/* Convert rows x [rows, hidden] at their positions to hidden states after the final norm, in place. `followed` [rows,
 * followed_width], unless NULL, receives the attention weights of `followed_head` in `followed_layer`. cpu_networks.py
 * sizes `scratch`. */
FOR_VECTORS void run_stack(const Stack *stack, const Cache *cache, float *x, ptrdiff_t rows, const int32_t *positions,
                           float *followed, ptrdiff_t followed_width, ptrdiff_t followed_layer, ptrdiff_t followed_head,
                           float *scratch) {
    ptrdiff_t hidden = stack->hidden, size = stack->head_dim, heads = stack->heads, kv_heads = stack->kv_heads;
    ptrdiff_t width = heads * size, qkv_width = (heads + 2 * kv_heads) * size, wide = stack->intermediate;
    float *normed = scratch, *qkv = normed + rows * hidden, *attended = qkv + rows * qkv_width;
    float *gate = attended + rows * width, *up = gate + rows * wide, *weights = up + rows * wide, eps = stack->eps;
    for (ptrdiff_t number = 0; number < stack->layers; number++) {
        const Layer *layer = stack->layer + number;
        for (ptrdiff_t row = 0; row < rows; row++)
            norm(normed + row * hidden, x + row * hidden, layer->input_norm, hidden, eps);
        multiply(qkv, normed, &layer->qkv, rows);
        for (ptrdiff_t row = 0; row < rows; row++) {
            float *row_qkv = qkv + row * qkv_width;
            const float *cosine = stack->cosines + positions[row] * size, *sine = stack->sines + positions[row] * size;
            ptrdiff_t at = number * cache->layer + slot(cache, row, positions[row]) * kv_heads * size;
            for (ptrdiff_t head = 0; head < heads; head++)
                turn(row_qkv + head * size, row_qkv + head * size, layer->q_norm, cosine, sine, size, eps);
            for (ptrdiff_t head = 0; head < kv_heads; head++)
                turn(cache->keys + at + head * size, row_qkv + width + head * size, layer->k_norm, cosine, sine, size, eps);
            memcpy(cache->values + at, row_qkv + width + kv_heads * size, kv_heads * size * sizeof(float));
        }
        for (ptrdiff_t row = 0; row < rows; row++)
            for (ptrdiff_t head = 0; head < heads; head++) {
                attend(attended + row * width + head * size, qkv + row * qkv_width + head * size, cache, stack, number, row,
                       head * kv_heads / heads, positions[row] + 1, weights);
                if (followed && number == followed_layer && head == followed_head)
                    memcpy(followed + row * followed_width, weights, (positions[row] + 1) * sizeof(float));
            }
        multiply(normed, attended, &layer->o, rows);
        for (ptrdiff_t place = 0; place < rows * hidden; place++)
            x[place] += normed[place];
        for (ptrdiff_t row = 0; row < rows; row++)
            norm(normed + row * hidden, x + row * hidden, layer->post_norm, hidden, eps);
        multiply(gate, normed, &layer->gate, rows);
        multiply(up, normed, &layer->up, rows);
        for (ptrdiff_t place = 0; place < rows * wide; place++)
            gate[place] = silu(gate[place]) * up[place];
        multiply(normed, gate, &layer->down, rows);
        for (ptrdiff_t place = 0; place < rows * hidden; place++)
            x[place] += normed[place];
    }
    for (ptrdiff_t row = 0; row < rows; row++)
        norm(x + row * hidden, x + row * hidden, stack->norm, hidden, eps);
}

/* `sample` of c_sampler.c, with `options`, `seeds` and `frames` for each row */
typedef struct {
    void (*sample)(int64_t *codes, const float *logits, const void *options, const int64_t *seeds, const int64_t *frames,
                   ptrdiff_t codebook, ptrdiff_t rows, ptrdiff_t vocab, float *scratch);
    const void *options;
    const int64_t *seeds, *frames;
} Draw;

typedef struct {
    const Stack *stack;
    const Product *narrow; /* from the talker's hidden size to the predictor's, or NULL if they are equal */
    const float *bias; /* of `narrow` */
    const Product *heads; /* of codebooks 1 and up */
    const float *const *tables; /* their embeddings [vocab, wide] */
    ptrdiff_t groups, wide; /* number of codebooks; the talker's hidden size */
} Predictor;

/* Complete `codes` [groups, rows] from those of codebook 0, for hidden states [rows, wide] of the talker. `total` [rows,
 * wide] is the sum of the codes' embeddings, at first that of codebook 0. cpu_networks.py sizes `scratch`. */
FOR_VECTORS void complete(const Predictor *predictor, const Cache *cache, const Draw *draw, int64_t *codes,
                          const float *hidden, float *total, ptrdiff_t rows, int32_t *positions, float *scratch) {
    ptrdiff_t wide = predictor->wide, narrow = predictor->stack->hidden, vocab = predictor->heads->outputs;
    float *row = scratch, *x = row + rows * wide, *logits = x + rows * narrow, *rest = logits + rows * vocab;
    memcpy(row, hidden, rows * wide * sizeof(float));
    for (ptrdiff_t group = 0; group < predictor->groups; group++) {
        if (predictor->narrow)
            multiply(x, row, predictor->narrow, rows);
        else
            memcpy(x, row, rows * narrow * sizeof(float));
        for (ptrdiff_t number = 0; number < rows; number++) {
            positions[number] = (int32_t)group;
            for (ptrdiff_t place = 0; predictor->narrow && place < narrow; place++)
                x[number * narrow + place] += predictor->bias[place];
        }
        run_stack(predictor->stack, cache, x, rows, positions, NULL, 0, 0, 0, rest);
        if (group == 0) {
            memcpy(row, total, rows * wide * sizeof(float));
            continue;
        }
        multiply(logits, x, predictor->heads + group - 1, rows);
        draw->sample(codes + group * rows, logits, draw->options, draw->seeds, draw->frames, group, rows, vocab, rest);
        for (ptrdiff_t number = 0; number < rows; number++) {
            const float *embedding = predictor->tables[group - 1] + codes[group * rows + number] * wide;
            memcpy(row + number * wide, embedding, wide * sizeof(float));
            for (ptrdiff_t place = 0; place < wide; place++)
                total[number * wide + place] += embedding[place];
        }
    }
}
