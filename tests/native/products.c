/* Products with int8 weights, written to the standard output, for a test to compare between instruction sets. */
#include "body.c"

#include <stdio.h>
#include <stdlib.h>

int main(void) {
    /* Rows, columns, tokens, and whether all numbers are as large as can be. */
    static const int64_t sizes[][4] = {{37, 83, 9}, {4, 64, 1}, {50, 1000, 7}, {130, 576, 64}, {6, 9000, 3}, {5, 1000, 2, 1}};
    uint32_t state = 1;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        const int64_t rows = sizes[i][0], columns = sizes[i][1], tokens = sizes[i][2], stride = padded(columns);
        int8_t *weights = calloc((size_t)(rows * stride), 1);
        float *scales = malloc((size_t)rows * 4), *inputs = malloc((size_t)(tokens * columns) * 4);
        float *outputs = malloc((size_t)(tokens * rows) * 4);
#define NEXT ((int32_t)((state = state * 1664525u + 1013904223u) >> 8) - (1 << 23))
        for (int64_t at = 0; at < rows * columns; at++)
            weights[at / columns * stride + at % columns] = (int8_t)(sizes[i][3] ? -128 : NEXT % 128);
        for (int64_t at = 0; at < rows; at++) scales[at] = (float)NEXT / 8388608.0f;
        for (int64_t at = 0; at < tokens * columns; at++) inputs[at] = sizes[i][3] ? 1.0f : (float)NEXT / 65536.0f;
        const Matrix matrix = {weights, scales, NULL, rows, columns, stride, INT8, FLOAT32};
        char *memory = aligned_alloc(64, (size_t)align(polydraft_product_memory(&matrix, tokens)));
        polydraft_product(&matrix, inputs, columns, outputs, tokens, 1, memory);
        fwrite(outputs, 4, (size_t)(tokens * rows), stdout);
    }
    return 0;
}
