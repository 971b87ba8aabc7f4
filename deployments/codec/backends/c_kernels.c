/* CPU kernels of the codec that are faster than torch: products with fused epilogues, and the snake in one pass.
 *
 * torch takes five passes for a snake (product, sine, square, sum and rounding). For products of few rows, oneDNN reads
 * weights at 10 GB/s although a core can read 15 GB/s. For convolutions of few channels, it reaches a third of the
 * speed of the matrix units. For convolutions of seven taps in float32, it does 3.5 times as many products. The package build compiles this file if a compiler is available (pyproject.toml).
 * c_kernels.py calls the kernels, and torch_backend.py uses torch if they are not built.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "../../c_library.h"

/* Version of this file's functions. c_kernels.py ignores a library with a different version. */
int interface(void) { return 6; }

/* Return whether `multiply` and `filter` are faster than oneDNN: this CPU has AVX2, but not AVX-512. */
int multiplies_floats(void) {
#ifdef HAS_CLONES
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && !__builtin_cpu_supports("avx512f");
#elif defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
    return 1;
#else
    return 0;
#endif
}

ALWAYS_INLINE float widened(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Round to the nearest bfloat16, ties to even. NaN stays NaN. */
ALWAYS_INLINE uint16_t rounded(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : (uint16_t)nearest;
}

/* sin(x)^2, which has a period of pi. Uses the Taylor series of the sine up to x^11, within 6e-8 for |r| <= pi / 2. */
ALWAYS_INLINE float sine_squared(float x) {
    float turns = __builtin_rintf(x * 0.318309886183790672f);
    float r = ((x - turns * 3.140625f) - turns * 9.67502593994140625e-4f) - turns * 1.509957990978376432e-7f;
    float square = r * r;
    float sine = -2.50521083854417188e-8f;
    sine = sine * square + 2.75573192239858907e-6f;
    sine = sine * square - 1.98412698412698413e-4f;
    sine = sine * square + 8.33333333333333333e-3f;
    sine = sine * square - 1.66666666666666667e-1f;
    sine = sine * square * r + r;
    return sine * sine;
}

/* GELU: x times the normal cumulative distribution function, by Abramowitz and Stegun 7.1.26, within 2e-7. */
ALWAYS_INLINE float gelu(float x) {
    float z = __builtin_fabsf(x) * 0.707106781186547524f;
    float t = 1.0f / (1.0f + 0.3275911f * z);
    float tail = 1.061405429f;
    tail = tail * t - 1.453152027f;
    tail = tail * t + 1.421413741f;
    tail = tail * t - 0.284496736f;
    tail = tail * t + 0.254829592f;
    tail = 0.5f * tail * t * exponential(-z * z);
    return x < 0.0f ? x * tail : x - x * tail;
}

ALWAYS_INLINE void snake_rows(const void *in, int halves_in, void *out, int halves_out, const float *frequency,
                              const float *amplitude, ptrdiff_t rows, ptrdiff_t channels) {
    for (ptrdiff_t row = 0; row < rows; row++) {
        const float *wide_in = (const float *)in + row * channels;
        const uint16_t *half_in = (const uint16_t *)in + row * channels;
        float *restrict wide_out = (float *)out + row * channels;
        uint16_t *restrict half_out = (uint16_t *)out + row * channels;
        for (ptrdiff_t channel = 0; channel < channels; channel++) {
            float x = halves_in ? widened(half_in[channel]) : wide_in[channel];
            float y = x + amplitude[channel] * sine_squared(frequency ? x * frequency[channel] : x);
            if (halves_out)
                half_out[channel] = rounded(y);
            else
                wide_out[channel] = y;
        }
    }
}

/* Store `count` values at index `first` of `out`, which is bfloat16 if `halves` is set. */
ALWAYS_INLINE void store(const float *values, void *out, ptrdiff_t first, ptrdiff_t count, ptrdiff_t halves) {
    if (!halves)
        memcpy((float *)out + first, values, count * sizeof *values);
    for (ptrdiff_t place = 0; halves && place < count; place++)
        ((uint16_t *)out)[first + place] = rounded(values[place]);
}

/* Copy `in` to `out` and convert between float32 and bfloat16. */
ALWAYS_INLINE void convert_rows(const void *in, int halves_in, void *out, int halves_out, ptrdiff_t count) {
    if (halves_in == halves_out) {
        memcpy(out, in, count * (halves_in ? sizeof(uint16_t) : sizeof(float)));
        return;
    }
    for (ptrdiff_t place = 0; place < count; place++) {
        if (halves_in)
            ((float *)out)[place] = widened(((const uint16_t *)in)[place]);
        else
            ((uint16_t *)out)[place] = rounded(((const float *)in)[place]);
    }
}

/* Build the input of a convolution: out [context + rows, channels] = past [context, channels], followed by
 * x + amplitude * sin(frequency * x)^2 for x in `in` [rows, channels]. NULL for frequency means 1. NULL for amplitude
 * means x itself. The last `context` rows of out are copied to `next`, the past of the next call. */
#define GATHER(name, halves_in, halves_out)                                                                      \
    FOR_THIS_CPU void name(const void *in, void *out, const float *frequency, const float *amplitude,            \
                           const void *past, void *next, ptrdiff_t context, ptrdiff_t rows, ptrdiff_t channels) { \
        const size_t past_bytes = context * channels * (halves_out ? sizeof(uint16_t) : sizeof(float));          \
        char *now = (char *)out + past_bytes;                                                                    \
        memcpy(out, past, past_bytes);                                                                           \
        if (amplitude)                                                                                           \
            snake_rows(in, halves_in, now, halves_out, frequency, amplitude, rows, channels);                    \
        else                                                                                                     \
            convert_rows(in, halves_in, now, halves_out, rows *channels);                                        \
        memcpy(next, (char *)out + rows * channels * (halves_out ? sizeof(uint16_t) : sizeof(float)), past_bytes); \
    }

GATHER(gather_float_float, 0, 0)
GATHER(gather_float_bfloat16, 0, 1)
GATHER(gather_bfloat16_float, 1, 0)
GATHER(gather_bfloat16_bfloat16, 1, 1)

/* Convolutions in bfloat16. A matrix product is a convolution with one tap. The weight is stored in the order of its
 * reads, in tiles of 32 inputs and 16 outputs, the format of the matrix units. c_kernels.py packs it as
 * [outputs / 32][taps][inputs / 32][2][16 pairs of inputs][16 outputs][2]. */
enum { NONE, AVX512_BF16, AMX_BF16 };
enum { SIDE = 32, HALF = SIDE / 2, TILE = SIDE * HALF }; /* inputs and outputs of a step; values of a weight tile */
enum { AHEAD = 2048 }; /* prefetch distance of weights in bytes */

struct convolution {
    const uint16_t *rows; /* [streams, context + time, inputs] */
    const uint16_t *weight;
    ptrdiff_t streams, time, taps, dilation, inputs;
};

/* Up to 16 rows of one stream that are multiplied together. */
struct row_group {
    const uint16_t *first; /* first input row of the first tap */
    ptrdiff_t count;
    ptrdiff_t place, num_before; /* index of the first result row, and number of leading rows that are repeated */
};

/* Number of groups of 16 rows over all streams. The last group of a stream overlaps the group before it. */
static ptrdiff_t sixteens(const struct convolution *c) { return c->streams * ((c->time + HALF - 1) / HALF); }

static struct row_group sixteen(const struct convolution *c, ptrdiff_t number) {
    ptrdiff_t per_stream = (c->time + HALF - 1) / HALF, stream = number / per_stream, row = number % per_stream * HALF;
    ptrdiff_t last = c->time > HALF ? c->time - HALF : 0, first = row < last ? row : last;
    ptrdiff_t length = (c->taps - 1) * c->dilation + c->time;
    struct row_group group = {c->rows + (stream * length + first) * c->inputs, c->time < HALF ? c->time : HALF,
                              stream * c->time + first, row - first};
    return group;
}

/* Compute sums [count, 32] of a group of rows, for 32 outputs whose weights begin at `weight`. */
static void sums_plain(const struct convolution *c, const struct row_group *group, const uint16_t *weight, float *sums) {
    memset(sums, 0, HALF * SIDE * sizeof *sums);
    for (ptrdiff_t tap = 0; tap < c->taps; tap++)
        for (ptrdiff_t input = 0; input < c->inputs; input++) {
            const uint16_t *tile = weight + (tap * c->inputs + input) / SIDE * 2 * TILE + input % SIDE / 2 * SIDE;
            const uint16_t *column = group->first + tap * c->dilation * c->inputs + input;
            for (ptrdiff_t row = 0; row < group->count; row++)
                for (ptrdiff_t output = 0; output < SIDE; output++)
                    sums[row * SIDE + output] += widened(column[row * c->inputs]) *
                                                 widened(tile[output / HALF * TILE + output % HALF * 2 + input % 2]);
        }
}

/* Eight values, unaligned. GCC handles vectors wider than those of the CPU twenty times as slowly. */
typedef float eight_floats __attribute__((vector_size(32), aligned(4)));

/* Compute sums [count, 16] of float32 rows, `stride` apart, for 16 outputs with weights [inputs, 16]. Sums are `width`
 * apart. A constant count of at most six keeps them in registers. */
ALWAYS_INLINE void float_sums_of_rows(const float *rows, ptrdiff_t stride, const float *weight, int count, ptrdiff_t inputs,
                                      float *sums, ptrdiff_t width) {
    eight_floats parts[6][2] = {0};
    for (ptrdiff_t input = 0; input < inputs; input++, weight += HALF) {
        const eight_floats left = *(const eight_floats *)weight, right = *(const eight_floats *)(weight + HALF / 2);
#pragma GCC unroll 6
        for (int row = 0; row < count; row++) {
            parts[row][0] += rows[row * stride + input] * left;
            parts[row][1] += rows[row * stride + input] * right;
        }
    }
#pragma GCC unroll 6
    for (int row = 0; row < count; row++)
        memcpy(sums + row * width, parts[row], sizeof parts[row]);
}

/* Compute the sums of any number of rows. */
ALWAYS_INLINE void float_sums(const float *rows, ptrdiff_t stride, const float *weight, ptrdiff_t count, ptrdiff_t inputs,
                              float *sums, ptrdiff_t width) {
    for (; count >= 6; count -= 6, rows += 6 * stride, sums += 6 * width)
        float_sums_of_rows(rows, stride, weight, 6, inputs, sums, width);
    for (; count >= 3; count -= 3, rows += 3 * stride, sums += 3 * width)
        float_sums_of_rows(rows, stride, weight, 3, inputs, sums, width);
    for (; count > 0; count--, rows += stride, sums += width)
        float_sums_of_rows(rows, stride, weight, 1, inputs, sums, width);
}

/* Compute sums [count, 32] of float32 rows, for 32 outputs with weights [2, inputs, 16]. */
FOR_THIS_CPU static void float_sums_plain(const float *rows, ptrdiff_t stride, const float *weight, ptrdiff_t count,
                                          ptrdiff_t inputs, float *sums) {
    float_sums(rows, stride, weight, count, inputs, sums, SIDE);
    float_sums(rows, stride, weight + inputs * HALF, count, inputs, sums + HALF, SIDE);
}

#if defined(FOR_SEVERAL_CPUS) && defined(__GNUC__) && (defined(__clang__) || __GNUC__ >= 11)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#define FOR_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))
#define FOR_AMX __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512bf16")))
enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };

/* Return the best matrix unit of this CPU that the operating system permits this process to use. */
int matrix_units(void) {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512bw"))
        return NONE;
    unsigned a, b, c, d;
    __asm__("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "0"(7), "2"(0));
    int has_amx = (d >> 22 & 1) && (d >> 24 & 1); /* AMX-BF16, AMX-TILE */
    if (has_amx && syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0)
        return AMX_BF16;
    return AVX512_BF16;
}

/* Prefetch weights for the first group of rows. Later groups find the weights in the cache. */
FOR_AVX512 ALWAYS_INLINE void fetch(const void *weight, ptrdiff_t bytes) {
#pragma GCC unroll 32
    for (ptrdiff_t line = 0; line < bytes; line += 64)
        _mm_prefetch((const char *)weight + AHEAD + line, _MM_HINT_T0);
}

/* Compute sums [2, 16, 32] of two groups of rows, as in sums_plain. `second` is NULL for a single group. */
FOR_AMX ALWAYS_INLINE void sums_of_tiles(const struct convolution *c, const struct row_group *group,
                                         const struct row_group *second, const uint16_t *weight, int is_new,
                                         float *sums) {
    const ptrdiff_t stride = c->inputs * 2, step = c->dilation * c->inputs;
    const uint16_t *upper = group->first, *lower = second ? second->first : 0;
    _tile_zero(0);
    _tile_zero(1);
    if (second) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (ptrdiff_t tap = 0; tap < c->taps; tap++, upper += step, lower += second ? step : 0)
        for (ptrdiff_t input = 0; input < c->inputs; input += SIDE, weight += 2 * TILE) {
            if (is_new)
                fetch(weight, 2 * TILE * sizeof *weight);
            _tile_loadd(4, upper + input, stride);
            _tile_loadd(6, weight, 64);
            _tile_loadd(7, weight + TILE, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if (second) {
                _tile_loadd(5, lower + input, stride);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
    _tile_stored(0, sums, SIDE * 4);
    _tile_stored(1, sums + HALF, SIDE * 4);
    if (second) {
        _tile_stored(2, sums + TILE, SIDE * 4);
        _tile_stored(3, sums + TILE + HALF, SIDE * 4);
    }
}

FOR_AMX static void sums_amx(const struct convolution *c, const struct row_group *group, const struct row_group *second,
                             const uint16_t *weight, int is_new, float *sums) {
    if (!second)
        sums_of_tiles(c, group, 0, weight, 1, sums);
    else if (is_new)
        sums_of_tiles(c, group, second, weight, 1, sums);
    else
        sums_of_tiles(c, group, second, weight, 0, sums);
}

/* Compute the sums of sums_plain for `count` rows from `row` on. */
FOR_AVX512 ALWAYS_INLINE void sums_of_dots(const struct convolution *c, const struct row_group *group, ptrdiff_t row,
                                           int count, const uint16_t *weight, float *sums) {
    __m512 left[8], right[8];
    for (int each = 0; each < count; each++)
        left[each] = right[each] = _mm512_setzero_ps();
    for (ptrdiff_t tap = 0; tap < c->taps; tap++) {
        const uint16_t *rows = group->first + (row + tap * c->dilation) * c->inputs;
        for (ptrdiff_t input = 0; input < c->inputs; input += SIDE, weight += 2 * TILE) {
            if (row == 0)
                fetch(weight, 2 * TILE * sizeof *weight);
            for (ptrdiff_t pair = 0; pair < HALF; pair++) {
                __m512bh w_left = (__m512bh)_mm512_loadu_si512(weight + pair * SIDE);
                __m512bh w_right = (__m512bh)_mm512_loadu_si512(weight + TILE + pair * SIDE);
#pragma GCC unroll 8
                for (int each = 0; each < count; each++) {
                    int two;
                    memcpy(&two, rows + each * c->inputs + input + 2 * pair, sizeof two);
                    __m512bh x = (__m512bh)_mm512_set1_epi32(two);
                    left[each] = _mm512_dpbf16_ps(left[each], x, w_left);
                    right[each] = _mm512_dpbf16_ps(right[each], x, w_right);
                }
            }
        }
    }
    for (int each = 0; each < count; each++) {
        _mm512_storeu_ps(sums + (row + each) * SIDE, left[each]);
        _mm512_storeu_ps(sums + (row + each) * SIDE + HALF, right[each]);
    }
}

/* Compute the sums of float_sums_plain for `count` rows, with weights [inputs, 32]. */
FOR_AVX512 ALWAYS_INLINE void float_sums_of(const float *rows, ptrdiff_t stride, const float *weight, int count,
                                            ptrdiff_t inputs, int is_new, float *sums) {
    __m512 left[8], right[8];
    for (int each = 0; each < count; each++)
        left[each] = right[each] = _mm512_setzero_ps();
    for (ptrdiff_t input = 0; input < inputs; input++, weight += SIDE) {
        if (is_new)
            fetch(weight, SIDE * sizeof *weight);
        __m512 w_left = _mm512_loadu_ps(weight), w_right = _mm512_loadu_ps(weight + HALF);
#pragma GCC unroll 8
        for (int each = 0; each < count; each++) {
            __m512 x = _mm512_set1_ps(rows[each * stride + input]);
            left[each] = _mm512_fmadd_ps(x, w_left, left[each]);
            right[each] = _mm512_fmadd_ps(x, w_right, right[each]);
        }
    }
    for (int each = 0; each < count; each++) {
        _mm512_storeu_ps(sums + each * SIDE, left[each]);
        _mm512_storeu_ps(sums + each * SIDE + HALF, right[each]);
    }
}

/* Run `work` for eight rows at a time, then for the remaining rows. Constant counts keep rows in registers. */
#define EIGHT_BY_EIGHT(count, work)                                                                              \
    for (ptrdiff_t row = 0, rows_left = (count); rows_left > 0;) {                                               \
        int some_of_them = rows_left >= 8 ? 8 : rows_left >= 4 ? 4 : rows_left >= 2 ? 2 : 1;                     \
        switch (some_of_them) {                                                                                  \
        case 8:                                                                                                  \
            work(8);                                                                                             \
            break;                                                                                               \
        case 4:                                                                                                  \
            work(4);                                                                                             \
            break;                                                                                               \
        case 2:                                                                                                  \
            work(2);                                                                                             \
            break;                                                                                               \
        default:                                                                                                 \
            work(1);                                                                                             \
        }                                                                                                        \
        row += some_of_them;                                                                                     \
        rows_left -= some_of_them;                                                                               \
    }

FOR_AVX512 static void sums_avx512(const struct convolution *c, const struct row_group *group, const uint16_t *weight,
                                   float *sums) {
#define DOTS(rows) sums_of_dots(c, group, row, rows, weight, sums)
    EIGHT_BY_EIGHT(group->count, DOTS)
}

FOR_AVX512 static void float_sums_avx512(const float *rows, ptrdiff_t stride, const float *weight, ptrdiff_t count,
                                         ptrdiff_t inputs, int is_new, float *sums) {
#define FLOATS(number)                                                                                           \
    float_sums_of(rows + row * stride, stride, weight, number, inputs, is_new && row == 0, sums + row * SIDE)
    EIGHT_BY_EIGHT(count, FLOATS)
}

/* Configure tiles for rows and sums of 1 to 16 rows. Uses inline assembly, because GCC 12 declares only the first eight
 * bytes of the configuration as read by the intrinsic, and would omit writing the other bytes. */
FOR_AMX static void configure_tiles(ptrdiff_t rows) {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } tiles = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {0}};
    for (int tile = 0; tile < 8; tile++)
        tiles.rows[tile] = tile < 6 && rows < HALF ? rows : HALF;
    __asm__ volatile("ldtilecfg %0" : : "m"(tiles));
}

FOR_AMX static void release_tiles(void) { _tile_release(); }
#else
int matrix_units(void) { return NONE; }
static void sums_avx512(const struct convolution *c, const struct row_group *group, const uint16_t *weight, float *sums) {
    sums_plain(c, group, weight, sums);
}
static void sums_amx(const struct convolution *c, const struct row_group *group, const struct row_group *second,
                     const uint16_t *weight, int is_new, float *sums) {
    (void)is_new;
    sums_plain(c, group, weight, sums);
    if (second)
        sums_plain(c, second, weight, sums + TILE);
}
static void float_sums_avx512(const float *rows, ptrdiff_t stride, const float *weight, ptrdiff_t count, ptrdiff_t inputs,
                              int is_new, float *sums) {
    (void)is_new;
    float_sums_plain(rows, stride, weight, count, inputs, sums);
}
static void configure_tiles(ptrdiff_t rows) { (void)rows; }
static void release_tiles(void) {}
#endif

/* What happens to sums plus bias [outputs] float32, numbered as in c_kernels.py. ADDED adds them to `out`, SNAKED applies
 * a snake with amplitude [outputs], and GELU applies gelu. GATED stores half as many outputs: of each 32, silu of the
 * first 16 times the others. `out` [rows, outputs] is bfloat16 if `halves` is set, and float32 otherwise. */
enum { PLAIN, ADDED, SNAKED, GELU, GATED };

struct results {
    int kind, halves;
    void *out;
    const float *bias, *amplitude;
    ptrdiff_t outputs;
};

/* Store `count` rows of sums for 32 outputs from `output` on. The first row is `place`. */
FOR_THIS_CPU static void finish(const struct results *r, const float *sums, ptrdiff_t place, ptrdiff_t count,
                                ptrdiff_t output) {
    const float *bias = r->bias + output;
    float values[SIDE];
    for (ptrdiff_t row = 0; row < count; row++, sums += SIDE) {
        const ptrdiff_t first = (place + row) * r->outputs + output;
        for (ptrdiff_t each = 0; each < SIDE; each++)
            values[each] = sums[each] + bias[each];
        if (r->kind == ADDED)
            for (ptrdiff_t each = 0; each < SIDE; each++)
                values[each] += ((const float *)r->out)[first + each];
        else if (r->kind == SNAKED)
            for (ptrdiff_t each = 0; each < SIDE; each++)
                values[each] += r->amplitude[output + each] * sine_squared(values[each]);
        else if (r->kind == GELU)
            for (ptrdiff_t each = 0; each < SIDE; each++)
                values[each] = gelu(values[each]);
        else if (r->kind == GATED)
            for (ptrdiff_t each = 0; each < HALF; each++)
                values[each] = silu(values[each]) * values[HALF + each];
        if (r->kind == GATED) /* constant counts are vectorized */
            store(values, r->out, first / 2, HALF, r->halves);
        else
            store(values, r->out, first, SIDE, r->halves);
    }
}

/* Convolve bfloat16 rows [streams, (taps - 1) * dilation + time, inputs]. Inputs and outputs are multiples of 32. If
 * time is less than 16, there must be one stream. `units` is a value of matrix_units that this CPU supports. `results`
 * describes the other parameters. */
void convolve(ptrdiff_t units, ptrdiff_t kind, ptrdiff_t halves, const uint16_t *rows, const uint16_t *weight,
              const float *bias, const float *amplitude, void *out, ptrdiff_t streams, ptrdiff_t time, ptrdiff_t taps, ptrdiff_t dilation,
              ptrdiff_t inputs, ptrdiff_t outputs) {
    const struct convolution c = {rows, weight, streams, time, taps, dilation, inputs};
    const struct results r = {(int)kind, (int)halves, out, bias, amplitude, outputs};
    const ptrdiff_t count = sixteens(&c);
    float sums[2 * HALF * SIDE] __attribute__((aligned(64)));
    if (units == AMX_BF16)
        configure_tiles(time);
    for (ptrdiff_t output = 0; output < outputs; output += SIDE)
        for (ptrdiff_t number = 0; number < count; number += 2) {
            const uint16_t *panel = weight + output * taps * inputs;
            int pairs = number + 1 < count;
            struct row_group two[2] = {sixteen(&c, number), sixteen(&c, number + pairs)};
            if (units == AMX_BF16)
                sums_amx(&c, &two[0], pairs ? &two[1] : 0, panel, number == 0, sums);
            for (int each = 0; each < 1 + pairs; each++) {
                const struct row_group *group = &two[each];
                float *own = sums + each * TILE;
                if (units == AVX512_BF16)
                    sums_avx512(&c, group, panel, own);
                else if (units == NONE)
                    sums_plain(&c, group, panel, own);
                finish(&r, own + group->num_before * SIDE, group->place + group->num_before, group->count - group->num_before, output);
            }
        }
    if (units == AMX_BF16)
        release_tiles();
}

/* Multiply float32 rows [streams, length, stride], of which `time` are used, by the weight of inputs that may continue
 * in later rows. The weight is [outputs / 32][inputs][32], or [outputs / 16][inputs][16] if `units` is NONE. */
void multiply(ptrdiff_t units, ptrdiff_t kind, const float *rows, const float *weight, const float *bias,
              const float *amplitude, float *out, ptrdiff_t streams, ptrdiff_t length, ptrdiff_t stride, ptrdiff_t time,
              ptrdiff_t inputs, ptrdiff_t outputs) {
    const struct results r = {(int)kind, 0, out, bias, amplitude, outputs};
    const ptrdiff_t most = units == NONE ? 12 : HALF; /* rows that are multiplied together, by six or by eight */
    float sums[HALF * SIDE] __attribute__((aligned(64)));
    for (ptrdiff_t output = 0; output < outputs; output += SIDE)
        for (ptrdiff_t stream = 0; stream < streams; stream++)
            for (ptrdiff_t row = 0; row < time; row += most) {
                const float *own = rows + (stream * length + row) * stride, *panel = weight + output * inputs;
                ptrdiff_t count = time - row < most ? time - row : most;
                if (units == NONE)
                    float_sums_plain(own, stride, panel, count, inputs, sums);
                else
                    float_sums_avx512(own, stride, panel, count, inputs, stream + row == 0, sums);
                finish(&r, sums, stream * time + row, count, output);
            }
}

/* Minimal filtering (Winograd 1980) of seven taps: six outputs take twelve products instead of 42. The products are
 * values of polynomials at 0, at plus and minus 1, 1/2, 2, 3/2 and 3/4, and at infinity. c_kernels.py evaluates the
 * weight. With other points, or with more of them, rounding errors grow. */
enum { TAPS = 7, PAIRS = 5, POINTS = 2 * PAIRS + 2, STEP = POINTS + 1 - TAPS, TILES = 48 };
static const float AT[PAIRS] = {1.0f, 0.5f, 2.0f, 1.5f, 0.75f};
/* Coefficients of the product of x - p^2 for all pairs, and for all but one */
static const float ALL[PAIRS] = {-1.265625f, 9.45703125f, -22.41015625f, 21.28125f, -8.0625f};
static const float OTHERS[PAIRS][PAIRS - 1] = {
    {1.265625f, -8.19140625f, 14.21875f, -7.0625f},     {5.0625f, -17.578125f, 19.328125f, -7.8125f},
    {0.31640625f, -2.28515625f, 5.03125f, -4.0625f},    {0.5625f, -3.953125f, 8.203125f, -5.8125f},
    {2.25f, -12.8125f, 17.0625f, -7.5f},
};

/* Evaluate POINTS input rows at the points, for `inputs` channels. Values of a point are `step` apart. */
ALWAYS_INLINE void evaluate(const float *const *rows, float *values, ptrdiff_t inputs, ptrdiff_t step) {
    for (ptrdiff_t place = 0; place < inputs; place += HALF / 2) {
        eight_floats x[POINTS], zero, end;
#pragma GCC unroll 12
        for (int row = 0; row < POINTS; row++)
            x[row] = *(const eight_floats *)(rows[row] + place);
        zero = x[POINTS - 2];
        end = x[POINTS - 1];
#pragma GCC unroll 5
        for (int pair = 0; pair < PAIRS; pair++) {
            eight_floats even = x[POINTS - 2], odd = x[POINTS - 3];
#pragma GCC unroll 4
            for (int power = 0; power < PAIRS - 1; power++) {
                even += OTHERS[pair][power] * x[2 * power + 2];
                odd += OTHERS[pair][power] * x[2 * power + 1];
            }
            odd *= AT[pair];
            *(eight_floats *)(values + (1 + 2 * pair) * step + place) = even + odd;
            *(eight_floats *)(values + (2 + 2 * pair) * step + place) = even - odd;
            zero += ALL[pair] * x[2 * pair];
            end += ALL[pair] * x[2 * pair + 1];
        }
        *(eight_floats *)(values + place) = zero;
        *(eight_floats *)(values + (POINTS - 1) * step + place) = end;
    }
}

/* Compute STEP output rows [16] from products [POINTS, 16], which are `step` apart. */
ALWAYS_INLINE void interpolate(const float *products, ptrdiff_t step, const float *bias, const float *amplitude,
                               float out[STEP][HALF]) {
    for (ptrdiff_t place = 0; place < HALF; place += HALF / 2) {
        eight_floats y[STEP] = {0};
        y[0] = *(const eight_floats *)(products + place);
        y[STEP - 1] = *(const eight_floats *)(products + (POINTS - 1) * step + place);
#pragma GCC unroll 5
        for (int pair = 0; pair < PAIRS; pair++) {
            eight_floats plus = *(const eight_floats *)(products + (1 + 2 * pair) * step + place);
            eight_floats minus = *(const eight_floats *)(products + (2 + 2 * pair) * step + place);
            eight_floats both[2] = {plus + minus, AT[pair] * (plus - minus)};
#pragma GCC unroll 6
            for (int row = 0; row < STEP; row++) {
                y[row] += both[row % 2];
                both[row % 2] *= AT[pair] * AT[pair];
            }
        }
        for (int row = 0; row < STEP; row++)
            *(eight_floats *)(out[row] + place) = y[row] + *(const eight_floats *)(bias + place);
    }
    for (int row = 0; amplitude && row < STEP; row++)
        for (ptrdiff_t each = 0; each < HALF; each++)
            out[row][each] += amplitude[each] * sine_squared(out[row][each]);
}

/* Convolve float32 rows [streams, 6 * dilation + time, inputs] to out [streams, time, outputs], and apply a snake unless
 * amplitude is NULL. The weight is [outputs / 16][POINTS][inputs][16], and scratch is [POINTS, TILES, inputs]. */
FOR_THIS_CPU void filter(const float *rows, const float *weight, const float *bias, const float *amplitude, float *out,
                         float *scratch, ptrdiff_t streams, ptrdiff_t time, ptrdiff_t dilation, ptrdiff_t inputs,
                         ptrdiff_t outputs) {
    const ptrdiff_t length = time + (TAPS - 1) * dilation, rest = time % (STEP * dilation), step = TILES * inputs;
    const ptrdiff_t tiles = time / (STEP * dilation) * dilation + (rest < dilation ? rest : dilation);
    float products[POINTS][6 * HALF], made[STEP][HALF];
    for (ptrdiff_t stream = 0; stream < streams; stream++, rows += length * inputs, out += time * outputs)
        for (ptrdiff_t first = 0; first < tiles; first += TILES) {
            const ptrdiff_t count = tiles - first < TILES ? tiles - first : TILES;
            for (ptrdiff_t tile = 0; tile < count; tile++) {
                const float *each[POINTS];
                for (ptrdiff_t point = 0; point < POINTS; point++) {
                    ptrdiff_t row = ((first + tile) / dilation * STEP + point) * dilation + (first + tile) % dilation;
                    each[point] = rows + (row < length ? row : length - 1) * inputs;
                }
                evaluate(each, scratch + tile * inputs, inputs, step);
            }
            for (ptrdiff_t output = 0; output < outputs; output += HALF)
                for (ptrdiff_t group = 0; group < count; group += 6) {
                    const ptrdiff_t some = count - group < 6 ? count - group : 6;
                    for (ptrdiff_t point = 0; point < POINTS; point++)
                        float_sums(scratch + point * step + group * inputs, inputs,
                                   weight + (output * POINTS + point * HALF) * inputs, some, inputs, products[point], HALF);
                    for (ptrdiff_t tile = 0; tile < some; tile++) {
                        ptrdiff_t number = first + group + tile, row = number / dilation * STEP * dilation + number % dilation;
                        interpolate(products[0] + tile * HALF, 6 * HALF, bias + output, amplitude ? amplitude + output : 0, made);
                        for (int each = 0; each < STEP && row < time; each++, row += dilation)
                            memcpy(out + row * outputs + output, made[each], sizeof made[each]);
                    }
                }
        }
}

/* Unfold rows of `bytes` bytes [streams, (taps - 1) * dilation + time] to out [streams, time, taps, bytes], which
 * contains the input of each product of a convolution. */
void unfold(const char *rows, char *out, ptrdiff_t streams, ptrdiff_t time, ptrdiff_t taps, ptrdiff_t dilation,
            ptrdiff_t bytes) {
    for (ptrdiff_t stream = 0; stream < streams; stream++, rows += (taps - 1) * dilation * bytes)
        for (ptrdiff_t row = 0; row < time; row++, rows += bytes)
            for (ptrdiff_t tap = 0; tap < taps; tap++, out += bytes)
                memcpy(out, rows + tap * dilation * bytes, bytes);
}

/* Compute out [frames, channels] as sums of table entries [.., channels] for codes [frames, groups]. The table of a
 * group begins at the group's offset. */
FOR_THIS_CPU void embed(const int64_t *codes, const int64_t *offsets, const float *tables, float *restrict out,
                        ptrdiff_t frames, ptrdiff_t groups, ptrdiff_t channels) {
    for (ptrdiff_t frame = 0; frame < frames; frame++, codes += groups, out += channels) {
        memset(out, 0, channels * sizeof *out);
        for (ptrdiff_t group = 0; group < groups; group++) {
            const float *entry = tables + (codes[group] + offsets[group]) * channels;
            for (ptrdiff_t channel = 0; channel < channels; channel++)
                out[channel] += entry[channel];
        }
    }
}

/* Divide float32 rows by their root mean square. out [rows, channels] is bfloat16 if `halves` is set. Channels are a
 * multiple of 32. */
FOR_THIS_CPU void norm(const float *in, void *out, ptrdiff_t halves, const float *eps, ptrdiff_t rows,
                       ptrdiff_t channels) {
    for (ptrdiff_t row = 0; row < rows; row++, in += channels) {
        float squares[SIDE] = {0}, sum = 0.0f;
        for (ptrdiff_t channel = 0; channel < channels; channel += SIDE)
            for (ptrdiff_t each = 0; each < SIDE; each++)
                squares[each] += in[channel + each] * in[channel + each];
        for (ptrdiff_t each = 0; each < SIDE; each++)
            sum += squares[each];
        const float scale = 1.0f / __builtin_sqrtf(sum / channels + *eps);
        float *restrict wide = (float *)out + row * channels;
        uint16_t *restrict half = (uint16_t *)out + row * channels;
        if (halves)
            for (ptrdiff_t channel = 0; channel < channels; channel++)
                half[channel] = rounded(in[channel] * scale);
        else
            for (ptrdiff_t channel = 0; channel < channels; channel++)
                wide[channel] = in[channel] * scale;
    }
}

/* Sixteen values, unaligned. */
typedef float sixteen_floats __attribute__((vector_size(64), aligned(4)));

/* Dot product of two vectors of `size` values, a multiple of 16. */
ALWAYS_INLINE float dot(const float *a, const float *b, ptrdiff_t size) {
    eight_floats low = {0}, high = {0};
    for (ptrdiff_t place = 0; place < size; place += HALF) {
        low += *(const eight_floats *)(a + place) * *(const eight_floats *)(b + place);
        high += *(const eight_floats *)(a + place + HALF / 2) * *(const eight_floats *)(b + place + HALF / 2);
    }
    low += high;
    return ((low[0] + low[4]) + (low[2] + low[6])) + ((low[1] + low[5]) + (low[3] + low[7]));
}

/* Rotary embedding in place: rotate each pair of values from the first and the second half of x [size]. */
ALWAYS_INLINE void rotate(float *x, const float *cosines, const float *sines, ptrdiff_t size) {
    for (ptrdiff_t first = 0, second = size / 2; second < size; first++, second++) {
        float one = x[first], other = x[second];
        x[first] = one * cosines[first] - other * sines[first];
        x[second] = other * cosines[second] + one * sines[second];
    }
}

/* Rows of one head: those of earlier calls, then those of this call. */
struct head_rows {
    const float *past, *now;
    ptrdiff_t count, stride; /* number of past rows; distance between rows of `now` */
};

ALWAYS_INLINE const float *row_of(const struct head_rows *rows, ptrdiff_t number, ptrdiff_t size) {
    return number < rows->count ? rows->past + number * size : rows->now + (number - rows->count) * rows->stride;
}

/* Copy the last rows to next [count, size]. */
static void keep(const struct head_rows *rows, float *next, ptrdiff_t frames, ptrdiff_t size) {
    ptrdiff_t old = frames < rows->count ? rows->count - frames : 0;
    memcpy(next, rows->past + (rows->count - old) * size, old * size * sizeof *next);
    for (ptrdiff_t row = old; row < rows->count; row++)
        memcpy(next + row * size, row_of(rows, frames + row, size), size * sizeof *next);
}

enum { MOST_KEYS = 256, MOST_SIZE = 256 };

/* Compute out [size]: values first to last, weighted by the softmax of key dot products with q [size]. */
ALWAYS_INLINE void weigh(const float *q, const struct head_rows *keys, const struct head_rows *values, ptrdiff_t first,
                         ptrdiff_t last, ptrdiff_t size, float *out) {
    float weights[MOST_KEYS], total = 0.0f, largest = -__builtin_inff(), scale = 1.0f / __builtin_sqrtf((float)size);
    sixteen_floats sums[MOST_SIZE / HALF];
    const ptrdiff_t count = last + 1 - first;
    for (ptrdiff_t each = 0; each < count; each++) {
        weights[each] = scale * dot(q, row_of(keys, first + each, size), size);
        largest = weights[each] > largest ? weights[each] : largest;
    }
    for (ptrdiff_t each = 0; each < count; each++)
        weights[each] = exponential(weights[each] - largest);
    for (ptrdiff_t each = 0; each < count; each++)
        total += weights[each];
    memset(sums, 0, size * sizeof *q);
    for (ptrdiff_t each = 0; each < count; each++) {
        const float *row = row_of(values, first + each, size);
        for (ptrdiff_t place = 0; place < size; place += HALF)
            sums[place / HALF] += weights[each] * *(const sixteen_floats *)(row + place);
    }
    for (ptrdiff_t place = 0; place < size; place++)
        out[place] = ((const float *)sums)[place] / total;
}

/* Attention of one stream. Each frame attends to itself and earlier frames, at most `window` frames in total.
 *
 * Queries and keys in qkv [frames, heads + 2 * kv_heads, size] are rotated in place by cosines and sines
 * [frames, size]. history and next are [2, kv_heads, window - 1, size]. The last `num_past` rows of history contain
 * frames. out is [frames, heads, size], bfloat16 if `halves` is set. A window has at most 256 frames, and size is a multiple of 32 up to
 * 256. */
FOR_THIS_CPU void attend(float *qkv, const float *cosines, const float *sines, const float *history, float *next,
                         void *out, ptrdiff_t halves, ptrdiff_t frames, ptrdiff_t heads, ptrdiff_t kv_heads,
                         ptrdiff_t window, ptrdiff_t size, const int64_t *num_past) {
    float attended[MOST_SIZE];
    const ptrdiff_t width = (heads + 2 * kv_heads) * size, past = window - 1;
    const ptrdiff_t unknown = past > *num_past ? past - *num_past : 0;
    for (ptrdiff_t frame = 0; frame < frames; frame++)
        for (ptrdiff_t head = 0; head < heads + kv_heads; head++)
            rotate(qkv + frame * width + head * size, cosines + frame * size, sines + frame * size, size);
    for (ptrdiff_t kv_head = 0; kv_head < kv_heads; kv_head++) {
        const float *now = qkv + (heads + kv_head) * size, *before = history + kv_head * past * size;
        const struct head_rows keys = {before, now, past, width};
        const struct head_rows values = {before + kv_heads * past * size, now + kv_heads * size, past, width};
        for (ptrdiff_t frame = 0; frame < frames; frame++)
            for (ptrdiff_t head = kv_head * heads / kv_heads; head < (kv_head + 1) * heads / kv_heads; head++) {
                weigh(qkv + frame * width + head * size, &keys, &values, frame > unknown ? frame : unknown,
                      frame + past, size, attended);
                store(attended, out, (frame * heads + head) * size, size, halves);
            }
        keep(&keys, next + kv_head * past * size, frames, size);
        keep(&values, next + (kv_heads + kv_head) * past * size, frames, size);
    }
}

/* Depthwise convolution of one stream. Each row is then normalized to mean 0 and deviation 1.
 *
 * The input rows are past [count - 1, channels] and now [time, channels]. taps is [count, channels], bias is
 * [channels], out is [time, channels], bfloat16 if `halves` is set, and next [count - 1, channels] receives the last input rows. Channels
 * are at most 4096. */
FOR_THIS_CPU void depthwise_norm(const float *past, const float *now, const float *taps, const float *bias, float *next,
                                 void *out, ptrdiff_t halves, const float *eps, ptrdiff_t time, ptrdiff_t count,
                                 ptrdiff_t channels) {
    const struct head_rows rows = {past, now, count - 1, channels};
    float sums[4096];
    for (ptrdiff_t row = 0; row < time; row++) {
        double mean = 0.0, square = 0.0;
        memcpy(sums, bias, channels * sizeof *bias);
        for (ptrdiff_t tap = 0; tap < count; tap++) {
            const float *own = row_of(&rows, row + tap, channels), *weight = taps + tap * channels;
            for (ptrdiff_t channel = 0; channel < channels; channel++)
                sums[channel] += own[channel] * weight[channel];
        }
        for (ptrdiff_t channel = 0; channel < channels; channel++)
            mean += sums[channel];
        mean /= channels;
        for (ptrdiff_t channel = 0; channel < channels; channel++)
            square += (sums[channel] - mean) * (sums[channel] - mean);
        const float shift = (float)mean, scale = (float)(1.0 / __builtin_sqrt(square / channels + *eps));
        for (ptrdiff_t channel = 0; channel < channels; channel++)
            sums[channel] = (sums[channel] - shift) * scale;
        store(sums, out, row * channels, channels, halves);
    }
    keep(&rows, next, time, channels);
}

/* Compute out [time] = bias + a convolution of rows [count - 1 + time, channels] to one channel, with taps
 * [count, channels]. Channels are a multiple of 16. */
FOR_THIS_CPU void convolve_to_one(const float *rows, const float *taps, const float *bias, float *out, ptrdiff_t time,
                                  ptrdiff_t count, ptrdiff_t channels) {
    for (ptrdiff_t row = 0; row < time; row++)
        out[row] = *bias + dot(rows + row * channels, taps, count * channels);
}

/* A captured call: the address of a function above, and its arguments. All arguments are pointers or ptrdiff_t, so one
 * signature fits all functions. */
enum { MOST_ARGUMENTS = 15 };
struct step {
    void (*function)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                     int64_t, int64_t, int64_t, int64_t);
    int64_t arguments[MOST_ARGUMENTS];
};

void replay(const struct step *steps, ptrdiff_t count) {
    for (const struct step *step = steps; step < steps + count; step++) {
        const int64_t *a = step->arguments;
        step->function(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14]);
    }
}
