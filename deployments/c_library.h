/* Shared part of the CPU kernels: compilation for several kinds of CPUs, and functions that compilers can vectorize.
 *
 * TALKRAY_ONE_CPU, as in CFLAGS="-march=x86-64-v3 -DTALKRAY_ONE_CPU", compiles each function once, for the CPU of
 * -march, without support for matrix units. */
#pragma once
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__linux__) && !defined(TALKRAY_ONE_CPU)
#define FOR_SEVERAL_CPUS /* x86, which selects functions by CPU at run time */
#endif

/* Only glibc supports the selection between clones. */
#if defined(FOR_SEVERAL_CPUS) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define HAS_CLONES
#if __GNUC__ >= 12
#define FOR_THIS_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_THIS_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#endif
#else
#define FOR_THIS_CPU
#endif
#define ALWAYS_INLINE static inline __attribute__((always_inline))

/* e^x within a relative error of 2e-7, for x clamped to -87 to 88. */
ALWAYS_INLINE float exponential(float x) {
    x = x > 88.0f ? 88.0f : x < -87.0f ? -87.0f : x;
    float power = __builtin_rintf(x * 1.44269504088896341f);
    float r = (x - power * 0.693359375f) + power * 2.12194440054690583e-4f;
    float e = 1.9875691500e-4f;
    e = e * r + 1.3981999507e-3f;
    e = e * r + 8.3334519073e-3f;
    e = e * r + 4.1665795894e-2f;
    e = e * r + 1.6666665459e-1f;
    e = e * r + 5.0000001201e-1f;
    e = e * r * r + r + 1.0f;
    uint32_t bits = ((uint32_t)(int32_t)power + 127u) << 23;
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return e * scale;
}

/* x * sigmoid(x) */
ALWAYS_INLINE float silu(float x) { return x / (1.0f + exponential(-x)); }
