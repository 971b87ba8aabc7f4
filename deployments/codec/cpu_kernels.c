/* What the codec does on a CPU faster than torch: a convolution of few channels in bfloat16, a snake in one pass.
 *
 * torch takes five passes for a snake (a product, a sine, a square, a sum and a rounding), and oneDNN a third of what
 * the matrix units of a core can do for such a convolution. Built at install time where a compiler is there
 * (pyproject.toml); cpu_kernels.py calls it, and torch_backend.py torch where it was not built.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__linux__)
#if __GNUC__ >= 12
#define FOR_THIS_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_THIS_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#endif
#else
#define FOR_THIS_CPU
#endif
#define ALWAYS_INLINE static inline __attribute__((always_inline))

/* That of all functions here, as cpu_kernels.py has it: one built for another one is not called. */
int interface(void) { return 1; }

ALWAYS_INLINE float widened(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* To the nearest bfloat16, to even between two; NaN stays NaN. */
ALWAYS_INLINE uint16_t rounded(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : (uint16_t)nearest;
}

/* sin(x)^2: its period is pi. The Taylor series of the sine up to x^11, within 6e-8 on half of that. */
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

/* out [rows, channels] = x + amplitude * sin(frequency * x)^2 of in [rows, channels]; NULL: every frequency is 1. */
#define SNAKE(name, halves_in, halves_out)                                                                       \
    FOR_THIS_CPU void name(const void *in, void *out, const float *frequency, const float *amplitude,            \
                           ptrdiff_t rows, ptrdiff_t channels) {                                                 \
        snake_rows(in, halves_in, out, halves_out, frequency, amplitude, rows, channels);                        \
    }

SNAKE(snake_float_float, 0, 0)
SNAKE(snake_float_bfloat16, 0, 1)
SNAKE(snake_bfloat16_float, 1, 0)
SNAKE(snake_bfloat16_bfloat16, 1, 1)

/* sum [count] += halves [count] */
FOR_THIS_CPU void add_bfloat16(float *restrict sum, const uint16_t *restrict halves, ptrdiff_t count) {
    for (ptrdiff_t place = 0; place < count; place++)
        sum[place] += widened(halves[place]);
}

/* Convolutions in bfloat16. The weight stands as the units of a core read it, in tiles of 32 inputs and 16 outputs:
 * [outputs / 32][taps][inputs / 32][2][16 pairs of inputs][16 outputs][2], cpu_kernels.py packs it. */
enum { NONE, AVX512_BF16, AMX_BF16 };
enum { SIDE = 32, TILE = SIDE * SIDE / 2 }; /* rows, inputs and outputs of a step; values of one tile of weights */

struct convolution {
    const uint16_t *rows; /* [context + time, inputs] */
    const uint16_t *weight;
    ptrdiff_t taps, dilation, inputs;
};

/* sums [32, 32] of 32 rows from `first` on, for 32 outputs whose weights begin at `weight`. */
static void sums_plain(const struct convolution *c, ptrdiff_t first, const uint16_t *weight, float *sums) {
    memset(sums, 0, SIDE * SIDE * sizeof *sums);
    for (ptrdiff_t tap = 0; tap < c->taps; tap++)
        for (ptrdiff_t input = 0; input < c->inputs; input++) {
            const uint16_t *tile = weight + (tap * c->inputs + input) / SIDE * 2 * TILE + input % SIDE / 2 * SIDE;
            const uint16_t *column = c->rows + (first + tap * c->dilation) * c->inputs + input;
            for (ptrdiff_t row = 0; row < SIDE; row++)
                for (ptrdiff_t output = 0; output < SIDE; output++)
                    sums[row * SIDE + output] +=
                        widened(column[row * c->inputs]) *
                        widened(tile[output / (SIDE / 2) * TILE + output % (SIDE / 2) * 2 + input % 2]);
        }
}

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && (defined(__clang__) || __GNUC__ >= 11)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#define FOR_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))
#define FOR_AMX __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512bf16")))
enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };

/* Which of them this CPU has, and the kernel lets this process use. */
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

/* As sums_plain. */
FOR_AMX static void sums_amx(const struct convolution *c, ptrdiff_t first, const uint16_t *weight, float *sums) {
    const ptrdiff_t stride = c->inputs * 2;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (ptrdiff_t tap = 0; tap < c->taps; tap++) {
        const uint16_t *upper = c->rows + (first + tap * c->dilation) * c->inputs;
        const uint16_t *lower = upper + SIDE / 2 * c->inputs;
        for (ptrdiff_t input = 0; input < c->inputs; input += SIDE, weight += 2 * TILE) {
            _tile_loadd(4, upper + input, stride);
            _tile_loadd(6, weight, 64);
            _tile_loadd(7, weight + TILE, 64);
            _tile_loadd(5, lower + input, stride);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, SIDE * 4);
    _tile_stored(1, sums + SIDE / 2, SIDE * 4);
    _tile_stored(2, sums + SIDE / 2 * SIDE, SIDE * 4);
    _tile_stored(3, sums + SIDE / 2 * SIDE + SIDE / 2, SIDE * 4);
}

/* As sums_plain, eight rows at a time. */
FOR_AVX512 static void sums_avx512(const struct convolution *c, ptrdiff_t first, const uint16_t *weight, float *sums) {
    for (ptrdiff_t row = 0; row < SIDE; row += 8) {
        __m512 left[8], right[8];
        for (int each = 0; each < 8; each++)
            left[each] = right[each] = _mm512_setzero_ps();
        const uint16_t *tile = weight;
        for (ptrdiff_t tap = 0; tap < c->taps; tap++) {
            const uint16_t *rows = c->rows + (first + row + tap * c->dilation) * c->inputs;
            for (ptrdiff_t input = 0; input < c->inputs; input += SIDE, tile += 2 * TILE)
                for (ptrdiff_t pair = 0; pair < SIDE / 2; pair++) {
                    __m512bh w_left = (__m512bh)_mm512_loadu_si512(tile + pair * SIDE);
                    __m512bh w_right = (__m512bh)_mm512_loadu_si512(tile + TILE + pair * SIDE);
#pragma GCC unroll 8
                    for (int each = 0; each < 8; each++) {
                        int two;
                        memcpy(&two, rows + each * c->inputs + input + 2 * pair, sizeof two);
                        __m512bh x = (__m512bh)_mm512_set1_epi32(two);
                        left[each] = _mm512_dpbf16_ps(left[each], x, w_left);
                        right[each] = _mm512_dpbf16_ps(right[each], x, w_right);
                    }
                }
        }
        for (int each = 0; each < 8; each++) {
            _mm512_storeu_ps(sums + (row + each) * SIDE, left[each]);
            _mm512_storeu_ps(sums + (row + each) * SIDE + SIDE / 2, right[each]);
        }
    }
}

/* Constant: GCC 12 tells its optimiser only of the first eight bytes that the instruction reads, and so other values may
 * never be written. */
static const struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} ALL_TILES = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

FOR_AMX static void configure_tiles(void) { _tile_loadconfig(&ALL_TILES); }

FOR_AMX static void release_tiles(void) { _tile_release(); }
#else
int matrix_units(void) { return NONE; }
#define sums_avx512 sums_plain
#define sums_amx sums_plain
static void configure_tiles(void) {}
static void release_tiles(void) {}
#endif

/* What becomes of the sums of a block, [time, outputs] all, each with its bias [outputs] float32. */
struct results {
    uint16_t *rounded;      /* bfloat16, behind a snake where there is an amplitude [outputs]; or NULL, and then they */
    float *total;           /* are added to this */
    const float *bias, *amplitude;
    ptrdiff_t outputs;
};

/* The rows from `row` on of a block that begins at row `first`, 32 outputs from `output` on. */
FOR_THIS_CPU static void finish(const struct results *r, const float *sums, ptrdiff_t first, ptrdiff_t row,
                                ptrdiff_t output) {
    const float *bias = r->bias + output;
    for (ptrdiff_t end = first + SIDE; row < end; row++) {
        const float *own = sums + (row - first) * SIDE;
        ptrdiff_t place = row * r->outputs + output;
        if (!r->rounded) {
            float *restrict total = r->total + place;
            for (ptrdiff_t each = 0; each < SIDE; each++)
                total[each] += own[each] + bias[each];
        } else if (!r->amplitude) {
            uint16_t *restrict out = r->rounded + place;
            for (ptrdiff_t each = 0; each < SIDE; each++)
                out[each] = rounded(own[each] + bias[each]);
        } else {
            const float *amplitude = r->amplitude + output;
            uint16_t *restrict out = r->rounded + place;
            for (ptrdiff_t each = 0; each < SIDE; each++) {
                float x = own[each] + bias[each];
                out[each] = rounded(x + amplitude[each] * sine_squared(x));
            }
        }
    }
}

/* A convolution of rows [(taps - 1) * dilation + time, inputs] bfloat16; inputs and outputs are multiples of 32, time
 * is at least 32. `units` are those of matrix_units, or fewer. See `results` for the rest. */
void convolve(int units, const uint16_t *rows, const uint16_t *weight, const float *bias, const float *amplitude,
              uint16_t *rounded, float *total, ptrdiff_t time, ptrdiff_t taps, ptrdiff_t dilation, ptrdiff_t inputs,
              ptrdiff_t outputs) {
    const struct convolution c = {rows, weight, taps, dilation, inputs};
    const struct results r = {rounded, total, bias, amplitude, outputs};
    float sums[SIDE * SIDE] __attribute__((aligned(64)));
    if (units == AMX_BF16)
        configure_tiles();
    for (ptrdiff_t output = 0; output < outputs; output += SIDE)
        for (ptrdiff_t row = 0; row < time; row += SIDE) {
            ptrdiff_t first = row + SIDE <= time ? row : time - SIDE; /* the last block has some rows again */
            const uint16_t *panel = weight + output * taps * inputs;
            if (units == AMX_BF16)
                sums_amx(&c, first, panel, sums);
            else if (units == AVX512_BF16)
                sums_avx512(&c, first, panel, sums);
            else
                sums_plain(&c, first, panel, sums);
            finish(&r, sums, first, row, output);
        }
    if (units == AMX_BF16)
        release_tiles();
}
