/* AMX's tiles and AVX-512's bfloat16 products written out in C, so that code for them runs on CPUs without. */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
#define __AVX512BF16__ 1
#include <sys/syscall.h>
#include <unistd.h>
#define syscall(...) 0L /* granted */

static __thread uint8_t emulated[8][16][64];

static float emulated_number(const uint8_t *at) {
    uint16_t half;
    memcpy(&half, at, 2);
    const uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static void emulated_product(int to, int a, int b) {
    for (int row = 0; row < 16; row++)
        for (int column = 0; column < 16; column++) {
            float sum;
            memcpy(&sum, &emulated[to][row][4 * column], 4);
            for (int k = 0; k < 16; k++)
                for (int half = 0; half < 2; half++)
                    sum += emulated_number(&emulated[a][row][4 * k + 2 * half]) * emulated_number(&emulated[b][k][4 * column + 2 * half]);
            memcpy(&emulated[to][row][4 * column], &sum, 4);
        }
}

static void emulated_copy(int tile, void *memory, int64_t stride, int load) {
    for (int row = 0; row < 16; row++) {
        if (load) memcpy(emulated[tile][row], (char *)memory + row * stride, 64);
        else memcpy((char *)memory + row * stride, emulated[tile][row], 64);
    }
}

#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_zero
#undef _tile_loadconfig
#undef _tile_release
#define _tile_loadconfig(shape) ((void)(shape))
#define _tile_release() ((void)0)
#define _tile_zero(tile) memset(emulated[tile], 0, sizeof emulated[tile])
#define _tile_loadd(tile, from, stride) emulated_copy(tile, (void *)(from), stride, 1)
#define _tile_stored(tile, to, stride) emulated_copy(tile, (void *)(to), stride, 0)
#define _tile_dpbf16ps(to, a, b) emulated_product(to, a, b)

static __m512 emulated_pairs(__m512 sum, __m512bh w, __m512bh x) {
    float sums[16];
    uint8_t left[64], right[64];
    memcpy(sums, &sum, 64), memcpy(left, &w, 64), memcpy(right, &x, 64);
    for (int i = 0; i < 16; i++)
        for (int half = 0; half < 2; half++)
            sums[i] += emulated_number(left + 4 * i + 2 * half) * emulated_number(right + 4 * i + 2 * half);
    memcpy(&sum, sums, 64);
    return sum;
}
#define _mm512_dpbf16_ps emulated_pairs
