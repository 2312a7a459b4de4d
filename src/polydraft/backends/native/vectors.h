/* The compiler's vector types, as wide as the CPU's: one source for NEON, AVX2, AVX-512 and anything else.
 *
 * All functions compute each number by itself, or sum in an order that depends only on the length. No sum may depend on the
 * number of tokens, rows or threads: that gives a token the same bits in a tree, in a batch and alone.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
/* Most tokens whose sums with four rows of a weight fit into the registers. */
#if defined(__AVX512F__) || defined(__aarch64__)
#define TILE_TOKENS 6
#else
#define TILE_TOKENS 2
#endif
#define TILE_ROWS 4
#define INLINE static inline __attribute__((always_inline))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
typedef float Four __attribute__((vector_size(16)));

/* Pick from four lanes of `a` (0 to 3) and of `b` (LANES to LANES + 3), in the same way in every group of four lanes. */
#if LANES == 16
#define GROUPS(i, j, k, l) i, j, k, l, i + 4, j + 4, k + 4, l + 4, i + 8, j + 8, k + 8, l + 8, i + 12, j + 12, k + 12, l + 12
#elif LANES == 8
#define GROUPS(i, j, k, l) i, j, k, l, i + 4, j + 4, k + 4, l + 4
#else
#define GROUPS(i, j, k, l) i, j, k, l
#endif
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLED(a, b, i, j, k, l) __builtin_shufflevector(a, b, GROUPS(i, j, k, l))
#else
#define SHUFFLED(a, b, i, j, k, l) __builtin_shuffle(a, b, (Ints){GROUPS(i, j, k, l)})
#endif

enum { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2 };

INLINE Floats load(const float *from) {
    Floats value;
    memcpy(&value, from, sizeof value);
    return value;
}

INLINE void store(float *to, Floats value) { memcpy(to, &value, sizeof value); }

INLINE Floats all(float value) { return value - (Floats){0}; }

/* a * b + c, rounded once if the CPU can. Compilers fuse in some loops and not in others (GCC for Zen, and since GCC 13 for
 * Sapphire Rapids), so a sum would depend on how many tokens share its loop. So they must not fuse, and sums call this instead.
 */
INLINE Floats fused(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

INLINE Floats choose(Ints mask, Floats yes, Floats no) { return (Floats)((mask & (Ints)yes) | (~mask & (Ints)no)); }

/* The larger of `most` and the absolute value of each number; either of the two for NaN. */
INLINE Floats larger(Floats most, Floats x) {
#if defined(__aarch64__)
    return (Floats)vmaxq_f32((float32x4_t)most, vabsq_f32((float32x4_t)x));
#else
    const Floats size = choose(x < 0, -x, x);
    return choose(size > most, size, most);
#endif
}

#if defined(__aarch64__)  /* GCC 12 would otherwise move numbers one by one */
INLINE Floats widened(Halves halves) { return (Floats)vshll_n_u16((uint16x4_t)halves, 16); }
#else
INLINE Floats widened(Halves halves) { return (Floats)(__builtin_convertvector(halves, Words) << 16); }
#endif

/* Load LANES numbers of either format; if only `left` are left, pad with zeros. */
INLINE Floats load_as(int format, const void *from, int64_t place, int64_t left) {
    const size_t whole = (size_t)MIN(left, LANES);
    if (format == BFLOAT16) {
        Halves halves = {0};
        if (left >= LANES) memcpy(&halves, (const uint16_t *)from + place, sizeof halves);
        else memcpy(&halves, (const uint16_t *)from + place, whole * 2);
        return widened(halves);
    }
    Floats value = {0};
    if (left >= LANES) memcpy(&value, (const float *)from + place, sizeof value);
    else memcpy(&value, (const float *)from + place, whole * 4);
    return value;
}

/* Round to the nearest bfloat16, ties to even; NaN stays NaN. */
INLINE uint16_t rounded(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)((bits >> 16) | 64);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE void store_as(int format, void *to, int64_t place, const float *from, int64_t count) {
    if (format == FLOAT32) memcpy((float *)to + place, from, (size_t)count * 4);
    else for (int64_t i = 0; i < count; i++) ((uint16_t *)to + place)[i] = rounded(from[i]);
}

/* Sums over the lanes of four vectors, each in the same order. */
INLINE Four four_sums(Floats a, Floats b, Floats c, Floats d) {
#if defined(__aarch64__)
    return (Four)vpaddq_f32(vpaddq_f32((float32x4_t)a, (float32x4_t)b), vpaddq_f32((float32x4_t)c, (float32x4_t)d));
#else
    enum { B = LANES };
    const Floats ab = SHUFFLED(a, b, 0, B, 1, B + 1) + SHUFFLED(a, b, 2, B + 2, 3, B + 3);
    const Floats cd = SHUFFLED(c, d, 0, B, 1, B + 1) + SHUFFLED(c, d, 2, B + 2, 3, B + 3);
    const Floats groups = SHUFFLED(ab, cd, 0, 1, B, B + 1) + SHUFFLED(ab, cd, 2, 3, B + 2, B + 3);
    float parts[LANES];
    Four sum, more;
    memcpy(parts, &groups, sizeof parts);
    memcpy(&sum, parts, sizeof sum);
    for (int i = 4; i < LANES; i += 4) {
        memcpy(&more, parts + i, sizeof more);
        sum += more;
    }
    return sum;
#endif
}

INLINE float one_sum(Floats value) { return four_sums(value, value, value, value)[0]; }

/* e to the power of each number: 2^n times a polynomial of the remainder (relative error below 2e-7). */
INLINE Floats exponential(Floats x) {
    const Floats most = all(88.0f), least = all(-87.0f), magic = all(12582912.0f);
    x = choose(x > most, most, x);  /* NaN passes through */
    x = choose(x < least, least, x);
    const Floats shifted = fused(x, all(1.44269504f), magic);
    const Floats whole = shifted - magic;
    const Floats rest = fused(whole, all(2.12194440e-4f), fused(whole, all(-0.693359375f), x));
    Floats sum = all(1.9875691500e-4f);
    sum = fused(sum, rest, all(1.3981999507e-3f));
    sum = fused(sum, rest, all(8.3334519073e-3f));
    sum = fused(sum, rest, all(4.1665795894e-2f));
    sum = fused(sum, rest, all(1.6666665459e-1f));
    sum = fused(sum, rest, all(5.0000001201e-1f));
    sum = fused(sum * rest, rest, rest) + 1.0f;
    const Ints power = ((Ints)shifted - (Ints)magic + 127) << 23;
    return sum * (Floats)power;
}
