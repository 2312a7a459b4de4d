/* Products of some tokens with a weight matrix in torch's own memory.
 *
 * A weight is read once for up to BLOCK tokens, four rows at a time, along the rows: each output is the sum over the lanes of
 * one vector of partial sums. Inputs are prepared once per product: unchanged (float32), rounded (bfloat16, if the CPU
 * multiplies it), or quantised to 15 bits per token (int8 weights): with 8 bits, the few large channels of a hidden state would
 * leave too little precision for the others. If the CPU multiplies only 8 bits, an input is two planes, 128 times one plus the
 * other; matrix units for 8 bits (Arm's i8mm) need the planes interleaved, eight numbers of each.
 */
#define BLOCK 64      /* tokens for which weights are read once */
#define CHUNK 32      /* rows whose products are buffered before they are stored */
#define SHARE 262144  /* most bytes of a weight that a thread takes at a time */
#define LINE 64       /* bytes per cache line */
#define FAR 16384     /* bytes to prefetch ahead */
#define NEAR 24576    /* bytes of inputs that stay in the L1 cache beside some rows */
#define PADDING 64    /* inputs, and rows of int8 weights, are padded with zeros to a multiple of this */

typedef struct {
    const void *data;
    const float *scales;     /* int8: one per row */
    const void *bias;        /* in format `small`, or null */
    int64_t rows, columns, stride;
    int32_t format, small;
} Matrix;

typedef struct {
    const void *data;
    const float *scales;   /* int8: one per token */
    int64_t stride;        /* numbers per token */
} Input;

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define BF16_INPUT uint16_t
#else
#define BF16_INPUT float
#endif
#if defined(__ARM_FEATURE_DOTPROD)
typedef int8_t Quantum;
#define PLANES 2
INLINE int8x16_t bytes_of(const int16x4_t parts[4]) {
    return vcombine_s8(vmovn_s16(vcombine_s16(parts[0], parts[1])), vmovn_s16(vcombine_s16(parts[2], parts[3])));
}
#if defined(__ARM_FEATURE_MATMUL_INT8)
#define SQUARES  /* one instruction multiplies two rows by two rows */
INLINE int8x16_t first_halves(int8x16_t a, int8x16_t b) { return (int8x16_t)vzip1q_s64((int64x2_t)a, (int64x2_t)b); }
INLINE int8x16_t last_halves(int8x16_t a, int8x16_t b) { return (int8x16_t)vzip2q_s64((int64x2_t)a, (int64x2_t)b); }
#endif
#else
typedef int16_t Quantum;
#define PLANES 1
#endif
#define STEPS 16256  /* quantisation steps of the largest input: 127 * 128 */

/* Matrix units (AMX) multiply 16 rows of a bfloat16 weight, in place, by 16 tokens at once. Inputs then come in groups of 16
 * tokens, with pairs of numbers adjacent: numbers 2k and 2k + 1 of a group's token t are word 16 k + t of the group.
 */
#if defined(__AMX_TILE__) && defined(__AMX_BF16__)
#define TILES
#include <sys/syscall.h>
#include <unistd.h>
static int tiles_granted;
__attribute__((constructor)) static void ask_for_tiles(void) {
    tiles_granted = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
}
INLINE int uses_tiles(int format, int64_t columns) { return tiles_granted && format == BFLOAT16 && columns % 32 == 0; }
#else
INLINE int uses_tiles(int format, int64_t columns) { return 0; }
#endif
#define GROUP 16  /* tokens */

INLINE int64_t grouped(int64_t tokens) { return (tokens + GROUP - 1) / GROUP * GROUP; }

INLINE int64_t padded(int64_t count) { return (count + PADDING - 1) / PADDING * PADDING; }

/* Load LANES of `count` numbers, with zeros after the end. */
INLINE Floats part_of(const float *from, int64_t place, int64_t count) {
    if (place + LANES <= count) return load(from + place);
    return place < count ? load_as(FLOAT32, from, place, count - place) : all(0);
}

/* Convert one token's numbers to the form that products with weights of this format need. */
static void prepare(int format, const float *from, int64_t count, void *to, float *scale) {
    const int64_t stride = padded(count);
    if (format == FLOAT32 || (format == BFLOAT16 && sizeof(BF16_INPUT) == 4)) {
        if (from != to) memcpy(to, from, (size_t)count * 4);
        memset((float *)to + count, 0, (size_t)(stride - count) * 4);
    } else if (uses_tiles(format, count)) {
        for (int64_t i = 0; i < count; i += 32) {
            uint16_t numbers[32];
            uint32_t pairs[16];
            for (int j = 0; j < 32; j++) numbers[j] = rounded(from[i + j]);
            memcpy(pairs, numbers, sizeof pairs);
            for (int j = 0; j < 16; j++) ((uint32_t *)to)[(i / 2 + j) * GROUP] = pairs[j];
        }
    } else if (format == BFLOAT16) {
        for (int64_t i = 0; i < count; i++) ((uint16_t *)to)[i] = rounded(from[i]);
        memset((uint16_t *)to + count, 0, (size_t)(stride - count) * 2);
    } else {
        Floats most[4] = {{0}}, faults[4] = {{0}};  /* four of each, so that none waits for the one before */
        for (int64_t i = 0; i < count; i += 4 * LANES)
            for (int j = 0; j < 4; j++) {
                const Floats x = part_of(from, i + j * LANES, count);
                most[j] = larger(most[j], x);
                faults[j] += x * 0.0f;  /* NaN for infinities and NaNs; passed on in the scale */
            }
        float largest = 0;
        for (int i = 0; i < 4 * LANES; i++) largest = MAX(largest, most[i / LANES][i % LANES]);
        const float steps = (float)MIN(STEPS, INT32_MAX / 128 / (stride / LANES));  /* so that no lane's sum overflows */
        const float factor = largest > 0 ? steps / largest : 0;
        const Floats magic = all(12582912.0f);
        Quantum *quanta = to;
#if PLANES == 2
        for (int64_t i = 0; i < stride; i += 4 * LANES) {
            int16x4_t high[4], low[4];
            for (int j = 0; j < 4; j++) {
                const int64_t at = i + j * LANES;
                const Floats x = part_of(from, at, count);
                const Ints whole = (Ints)fused(x, all(factor), magic) - (Ints)magic, upper = (whole + 64) >> 7;
                high[j] = vmovn_s32((int32x4_t)upper), low[j] = vmovn_s32((int32x4_t)(whole - 128 * upper));
            }
            const int8x16_t upper8 = bytes_of(high), lower8 = bytes_of(low);
#ifdef SQUARES  /* eight of one plane, eight of the other */
            vst1q_s8(quanta + 2 * i, first_halves(upper8, lower8));
            vst1q_s8(quanta + 2 * i + 16, last_halves(upper8, lower8));
#else
            vst1q_s8(quanta + i, upper8);
            vst1q_s8(quanta + stride + i, lower8);
#endif
        }
#else
        for (int64_t i = 0; i < stride; i += LANES) {
            const Floats x = part_of(from, i, count);
            const Ints whole = (Ints)fused(x, all(factor), magic) - (Ints)magic;
            for (int j = 0; j < LANES; j++) quanta[i + j] = (Quantum)whole[j];
        }
#endif
        *scale = largest / steps + one_sum(faults[0] + faults[1] + faults[2] + faults[3]);
    }
}

INLINE size_t input_bytes(int format) {
    return format == INT8 ? PLANES * sizeof(Quantum) : format == BFLOAT16 ? sizeof(BF16_INPUT) : 4;
}

/* Return the address of one token's numbers. */
INLINE char *input_at(char *inputs, int64_t token, int format, int64_t columns) {
    const int64_t bytes = padded(columns) * (int64_t)input_bytes(format);
    return uses_tiles(format, columns) ? inputs + token / GROUP * GROUP * bytes + token % GROUP * 4 : inputs + token * bytes;
}

/* Products of `tokens` inputs with four rows: one vector per token. `tokens` is a constant wherever this is inlined. */
#define AT_ONCE(tokens) ((tokens) > 2 ? 0 : LINE)  /* bytes of a row per step: for more than two tokens, registers run out */
#define EACH_TOKEN _Pragma("GCC unroll 8") for (int t = 0; t < tokens; t++)
#define EACH_ROW _Pragma("GCC unroll 4") for (int r = 0; r < TILE_ROWS; r++)

/* Prefetch as much of the next rows, which are adjacent, as `bytes` of each current row at `place`. */
INLINE void fetch(const char *rows, int64_t place, const int64_t bytes) {
    _Pragma("GCC unroll 8") for (int64_t at = 0; at < TILE_ROWS * bytes; at += LINE)
        __builtin_prefetch(rows + TILE_ROWS * place + at, 0, 2);
}

INLINE void tile_floats(const int tokens, const int format, const Matrix *m, const void *const rows[TILE_ROWS], const float *x,
                        int64_t stride, int64_t ahead, Four *sums) {
    Floats sum[TILE_TOKENS][TILE_ROWS];
    EACH_TOKEN EACH_ROW sum[t][r] = all(0);
    const int64_t size = format == BFLOAT16 ? 2 : 4, whole = m->columns / LANES * LANES, step = AT_ONCE(tokens) / size;
    int64_t k = 0;
    for (; step > LANES && k + step <= whole; k += step) {
        if (ahead) fetch((const char *)rows[0] + ahead, k * size, step * size);
        _Pragma("GCC unroll 8") for (int64_t u = k; u < k + step; u += LANES) {
            Floats w[TILE_ROWS];
            EACH_ROW w[r] = load_as(format, rows[r], u, LANES);
            EACH_TOKEN {
                const Floats v = load(x + t * stride + u);
                EACH_ROW sum[t][r] = fused(w[r], v, sum[t][r]);
            }
        }
    }
    for (; k < whole; k += LANES) {
        Floats w[TILE_ROWS];
        EACH_ROW w[r] = load_as(format, rows[r], k, LANES);
        if (ahead) fetch((const char *)rows[0] + ahead, k * size, LANES * size);
        EACH_TOKEN {
            const Floats v = load(x + t * stride + k);
            EACH_ROW sum[t][r] = fused(w[r], v, sum[t][r]);
        }
    }
    if (whole < m->columns) {
        Floats w[TILE_ROWS];
        EACH_ROW w[r] = load_as(format, rows[r], whole, m->columns - whole);
        EACH_TOKEN {
            const Floats v = load(x + t * stride + whole);
            EACH_ROW sum[t][r] = fused(w[r], v, sum[t][r]);
        }
    }
    EACH_TOKEN sums[t] = four_sums(sum[t][0], sum[t][1], sum[t][2], sum[t][3]);
}

#if defined(__AVX512BF16__)
#define PAIRS 32
typedef __m512bh Pairs;
INLINE Floats paired(Floats sum, Pairs w, Pairs x) { return (Floats)_mm512_dpbf16_ps((__m512)sum, w, x); }
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define PAIRS 8
typedef bfloat16x8_t Pairs;
INLINE Floats paired(Floats sum, Pairs w, Pairs x) { return (Floats)vbfdotq_f32((float32x4_t)sum, w, x); }
#endif

#ifdef PAIRS
INLINE void tile_pairs(const int tokens, const Matrix *m, const void *const rows[TILE_ROWS], const uint16_t *x, int64_t stride,
                       int64_t ahead, Four *sums) {
    Floats sum[TILE_TOKENS][TILE_ROWS];
    EACH_TOKEN EACH_ROW sum[t][r] = all(0);
    for (int64_t k = 0; k < m->columns; k += PAIRS) {
        Pairs w[TILE_ROWS], v;
        const int64_t left = m->columns - k;
        if (left >= PAIRS) EACH_ROW memcpy(&w[r], (const uint16_t *)rows[r] + k, sizeof v);
        else {
            memset(w, 0, sizeof w);
            EACH_ROW memcpy(&w[r], (const uint16_t *)rows[r] + k, (size_t)left * 2);
        }
        if (ahead) fetch((const char *)rows[0] + ahead, k * 2, PAIRS * 2);
        EACH_TOKEN {
            memcpy(&v, x + t * stride + k, sizeof v);
            EACH_ROW sum[t][r] = paired(sum[t][r], w[r], v);
        }
    }
    EACH_TOKEN sums[t] = four_sums(sum[t][0], sum[t][1], sum[t][2], sum[t][3]);
}
#endif

/* Sums of whole numbers are exact, so only the sum over the lanes has an order. */
#ifdef SQUARES
/* One instruction multiplies two rows by both planes of a token; the sums are exact, and rounded once at the end. */
INLINE void tile_quanta(const int tokens, const Matrix *m, const void *const rows[TILE_ROWS], const Quantum *x, int64_t stride,
                        int64_t ahead, Four *sums) {
    int32x4_t sum[TILE_TOKENS / 2][TILE_ROWS];  /* first and last eight columns of rows 0 and 1, then of rows 2 and 3 */
    const int64_t step = MAX(16, AT_ONCE(tokens));
    _Pragma("GCC unroll 3") for (int t = 0; t < tokens / 2; t++) EACH_ROW sum[t][r] = vdupq_n_s32(0);
    for (int64_t k = 0; k < m->stride; k += step) {
        if (ahead) fetch((const char *)rows[0] + ahead, k, step);
        _Pragma("GCC unroll 4") for (int64_t u = k; u < k + step; u += 16) {
            int8x16_t row[TILE_ROWS], w[TILE_ROWS];
            EACH_ROW row[r] = vld1q_s8((const int8_t *)rows[r] + u);
            EACH_ROW w[r] = r % 2 ? last_halves(row[r - 1], row[r]) : first_halves(row[r], row[r + 1]);
            _Pragma("GCC unroll 3") for (int t = 0; t < tokens / 2; t++) {
                const Quantum *v = x + 2 * (t * stride + u);
                EACH_ROW sum[t][r] = vmmlaq_s32(sum[t][r], w[r], vld1q_s8(v + r % 2 * 16));
            }
        }
    }
    _Pragma("GCC unroll 3") for (int t = 0; t < tokens / 2; t++) {
        const int32x4_t upper = vaddq_s32(sum[t][0], sum[t][1]), lower = vaddq_s32(sum[t][2], sum[t][3]);
        sums[2 * t] = (Four)vcvtq_f32_s32(vuzp1q_s32(upper, lower));
        sums[2 * t + 1] = (Four)vcvtq_f32_s32(vuzp2q_s32(upper, lower));
    }
}
#else
#if defined(__ARM_FEATURE_DOTPROD)
#define QUANTA 16
typedef int8x16_t Weights8;
typedef int8x16_t Inputs8;
INLINE Weights8 weights8(const int8_t *from) { return vld1q_s8(from); }
INLINE Inputs8 inputs8(const Quantum *from) { return vld1q_s8(from); }
INLINE Ints multiplied(Ints sum, Weights8 w, Inputs8 x) { return (Ints)vdotq_s32((int32x4_t)sum, w, x); }
#elif defined(__AVX512BW__)
#define QUANTA 32
typedef __m512i Weights8;
typedef __m512i Inputs8;
INLINE Weights8 weights8(const int8_t *from) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const void *)from)); }
INLINE Inputs8 inputs8(const Quantum *from) { return _mm512_loadu_si512(from); }
#if defined(__AVX512VNNI__)
INLINE Ints multiplied(Ints sum, Weights8 w, Inputs8 x) { return (Ints)_mm512_dpwssd_epi32((__m512i)sum, w, x); }
#else
INLINE Ints multiplied(Ints sum, Weights8 w, Inputs8 x) { return sum + (Ints)_mm512_madd_epi16(w, x); }
#endif
#elif defined(__AVX2__)
#define QUANTA 16
typedef __m256i Weights8;
typedef __m256i Inputs8;
INLINE Weights8 weights8(const int8_t *from) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)from)); }
INLINE Inputs8 inputs8(const Quantum *from) { return _mm256_loadu_si256((const void *)from); }
INLINE Ints multiplied(Ints sum, Weights8 w, Inputs8 x) { return sum + (Ints)_mm256_madd_epi16(w, x); }
#else
#define QUANTA LANES
typedef Ints Weights8;
typedef Ints Inputs8;
INLINE Weights8 weights8(const int8_t *from) {
    Ints value;
    for (int i = 0; i < LANES; i++) value[i] = from[i];
    return value;
}
INLINE Inputs8 inputs8(const Quantum *from) {
    Ints value;
    for (int i = 0; i < LANES; i++) value[i] = from[i];
    return value;
}
INLINE Ints multiplied(Ints sum, Weights8 w, Inputs8 x) { return sum + w * x; }
#endif

INLINE void tile_quanta(const int tokens, const Matrix *m, const void *const rows[TILE_ROWS], const Quantum *x, int64_t stride,
                        int64_t ahead, Four *sums) {
    Ints sum[TILE_TOKENS][TILE_ROWS];
    EACH_TOKEN EACH_ROW sum[t][r] = (Ints){0};
    const int64_t step = MAX(QUANTA, AT_ONCE(tokens));
    for (int64_t k = 0; k < m->stride; k += step) {
        if (ahead) fetch((const char *)rows[0] + ahead, k, step);
        _Pragma("GCC unroll 16") for (int64_t u = 0; u < step; u += QUANTA) {
            Weights8 w[TILE_ROWS];
            EACH_ROW w[r] = weights8((const int8_t *)rows[r] + k + u);
            EACH_TOKEN {
                const Inputs8 v = inputs8(x + t * stride + k + u);
                EACH_ROW sum[t][r] = multiplied(sum[t][r], w[r], v);
            }
        }
    }
    EACH_TOKEN {
        Floats floats[TILE_ROWS];
        EACH_ROW floats[r] = __builtin_convertvector(sum[t][r], Floats);
        sums[t] = four_sums(floats[0], floats[1], floats[2], floats[3]);
    }
}
#endif

#define WITH_TOKENS(count, call)                                                                                               \
    switch (count) {                                                                                                           \
    case 1: { enum { N = 1 }; call; break; }                                                                                   \
    case 2: { enum { N = 2 }; call; break; }                                                                                   \
    case 3: { enum { N = MIN(3, TILE_TOKENS) }; call; break; }                                                                 \
    case 4: { enum { N = MIN(4, TILE_TOKENS) }; call; break; }                                                                 \
    case 5: { enum { N = MIN(5, TILE_TOKENS) }; call; break; }                                                                 \
    default: { enum { N = TILE_TOKENS }; call; break; }                                                                        \
    }

#ifdef TILES
typedef struct {
    uint8_t palette, start, none[14];
    uint16_t width[16];
    uint8_t height[16];
} TileShape;

/* Multiply up to four groups of tokens by 16 rows at a time: tiles 0 to 3 are sums, 4 the weight, 5 the inputs. */
static void multiply_tiles(const Matrix *m, Input input, int64_t tokens, int64_t first, int64_t count, float *to, int64_t pitch) {
    TileShape shape = {.palette = 1};
    for (int i = 0; i < 6; i++) shape.width[i] = 64, shape.height[i] = GROUP;
    _tile_loadconfig(&shape);
    const int64_t groups = grouped(tokens) / GROUP, size = GROUP * input.stride;
    float sums[BLOCK / GROUP + 1][GROUP][GROUP];  /* row, token; the last group is read past the end of rows only */
    const __m512i column = _mm512_mullo_epi32(_mm512_set1_epi32(GROUP), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    uint16_t few[GROUP * 32] = {0};
    for (int64_t row = 0; row < count; row += GROUP) {
        const int64_t top = MAX(0, MIN(first + row, m->rows - GROUP)), here = MIN(GROUP, count - row);
        const uint16_t *weights = (const uint16_t *)m->data + top * m->stride;
        const int ahead = top + 2 * GROUP <= m->rows;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t k = 0; k < m->columns; k += 32) {
            const uint16_t *x = (const uint16_t *)input.data + k * GROUP;
            if (m->rows >= GROUP) _tile_loadd(4, weights + k, m->stride * 2);
            else {
                for (int64_t r = 0; r < m->rows; r++) memcpy(few + 32 * r, weights + r * m->stride + k, 64);
                _tile_loadd(4, few, 64);
            }
            if (ahead)
                for (int64_t r = GROUP; r < 2 * GROUP; r++) __builtin_prefetch(weights + r * m->stride + k, 0, 2);
            _tile_loadd(5, x, 64);
            _tile_dpbf16ps(0, 4, 5);
            if (groups > 1) {
                _tile_loadd(5, x + size, 64);
                _tile_dpbf16ps(1, 4, 5);
            }
            if (groups > 2) {
                _tile_loadd(5, x + 2 * size, 64);
                _tile_dpbf16ps(2, 4, 5);
            }
            if (groups > 3) {
                _tile_loadd(5, x + 3 * size, 64);
                _tile_dpbf16ps(3, 4, 5);
            }
        }
        _tile_stored(0, sums[0], 64);
        if (groups > 1) _tile_stored(1, sums[1], 64);
        if (groups > 2) _tile_stored(2, sums[2], 64);
        if (groups > 3) _tile_stored(3, sums[3], 64);
        const int64_t skip = first + row - top;
        const Floats bias = m->bias ? load_as(m->small, m->bias, first + row, here) : all(0);
        for (int64_t t = 0; t < tokens; t++) {
            const Floats value = (Floats)_mm512_i32gather_ps(column, &sums[t / GROUP][skip][t % GROUP], 4) + bias;
            if (here == GROUP) store(to + t * pitch + row, value);
            else memcpy(to + t * pitch + row, &value, (size_t)here * 4);
        }
    }
    _tile_release();
}
#endif

/* Outputs of up to BLOCK tokens for rows `first` to `first + count`, with scale and bias: `to[token * pitch + row]`. */
static void multiply_rows(const Matrix *m, Input input, int64_t tokens, int64_t first, int64_t count, float *to, int64_t pitch) {
#ifdef TILES
    if (uses_tiles(m->format, m->columns)) {
        multiply_tiles(m, input, tokens, first, count, to, pitch);
        return;
    }
#endif
    const int64_t size = m->format == INT8 ? 1 : m->format == BFLOAT16 ? 2 : 4;
    const int64_t planes = m->format == INT8 ? PLANES : 1, most = TILE_TOKENS / planes, parts = (tokens + most - 1) / most;
    const int64_t far = MAX(1, FAR / (TILE_ROWS * m->stride * size));  /* tiles to prefetch ahead */
    /* A few tokens stay in the cache while each row is read once; many tokens are taken in parts, and rows are read again. */
    const int near = tokens * input.stride * (int64_t)input_bytes(m->format) <= NEAR;
    const int64_t tiles = (count + TILE_ROWS - 1) / TILE_ROWS, inner = near ? parts : tiles, outer = near ? tiles : parts;
    const int64_t least = tokens / parts, fuller = tokens % parts;  /* parts are as even as possible */
    for (int64_t i = 0, j = 0; i < outer; j + 1 < inner ? j++ : (i++, j = 0)) {
        const int64_t part = near ? j : i, row = (near ? i : j) * TILE_ROWS;
        const int64_t token = part * least + MIN(part, fuller), some = least + (part < fuller);
        const int64_t here = MIN(count - row, TILE_ROWS);
        const void *rows[TILE_ROWS];
        for (int r = 0; r < TILE_ROWS; r++)  /* past the end, repeat the last row */
            rows[r] = (const char *)m->data + (first + row + MIN(r, here - 1)) * m->stride * size;
        const int64_t ahead = part == 0 && first + row + (far + 1) * TILE_ROWS <= m->rows ? far * TILE_ROWS * m->stride * size : 0;
        Four sums[TILE_TOKENS], scale = {0}, bias = {0};
        if (m->bias) for (int r = 0; r < here; r++) bias[r] = load_as(m->small, m->bias, first + row + r, 1)[0];
        if (m->format == INT8) {
            const Quantum *x = (const Quantum *)input.data + token * PLANES * input.stride;
            WITH_TOKENS(some * PLANES, tile_quanta(N, m, rows, x, input.stride, ahead, sums))
            memcpy(&scale, m->scales + first + row, (size_t)here * 4);
            for (int64_t t = 0; t < some; t++) {
                const Four whole = PLANES == 1 ? sums[t] : sums[2 * t] * 128.0f + sums[(2 * t + 1) % TILE_TOKENS];
                sums[t] = whole * (scale * input.scales[token + t]);
            }
        } else if (m->format == BFLOAT16) {
            const BF16_INPUT *x = (const BF16_INPUT *)input.data + token * input.stride;
#ifdef PAIRS
            WITH_TOKENS(some, tile_pairs(N, m, rows, x, input.stride, ahead, sums))
#else
            WITH_TOKENS(some, tile_floats(N, BFLOAT16, m, rows, x, input.stride, ahead, sums))
#endif
        } else {
            const float *x = (const float *)input.data + token * input.stride;
            WITH_TOKENS(some, tile_floats(N, FLOAT32, m, rows, x, input.stride, ahead, sums))
        }
        for (int64_t t = 0; t < some; t++) {
            const Four value = m->bias ? sums[t] + bias : sums[t];
            if (here == TILE_ROWS) memcpy(to + (token + t) * pitch + row, &value, sizeof value);
            else memcpy(to + (token + t) * pitch + row, &value, (size_t)here * 4);
        }
    }
}
