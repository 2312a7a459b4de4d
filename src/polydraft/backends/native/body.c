/* A pass of a Llama-shaped model, or of a feature head, in one call.
 *
 * All threads go through the same stages, and wait for each other between stages. Within a stage they take items (some rows of
 * a product, one token's norm, one token's attention with some heads) until none is left; which thread computes an item does
 * not change its bits.
 */
#define _GNU_SOURCE /* for sched_getcpu */
#include <math.h>

#include "vectors.h"
#include "products.h"
#include "barrier.h"
#include "stages.h"
#include "attention.h"

/* --- products ----------------------------------------------------------------------------------------------------------- */

enum { STORE, ADD, GATE };

/* Rows that a thread takes at a time: many adjacent ones, for prefetching, but several items for each thread. */
static int64_t share_of(const Matrix *m, int64_t rows, int64_t threads) {
    const int64_t bytes = m->stride * (m->format == INT8 ? 1 : m->format == BFLOAT16 ? 2 : 4);
    const int64_t even = MIN(rows / (4 * threads), SHARE / bytes) / TILE_ROWS * TILE_ROWS;
    return MAX(TILE_ROWS, even);
}

/* Store or add the products of a token with some rows, or with GATE store SiLU of the first times the second. */
static void put(int kind, float *target, float *sum, float *other, int64_t count) {
    if (kind == STORE) memcpy(target, sum, (size_t)count * 4);
    else if (kind == ADD) for (int64_t r = 0; r < count; r++) target[r] += sum[r];
    else {
        for (int64_t r = count; r < CHUNK; r++) sum[r] = other[r] = 0;
        for (int64_t r = 0; r < count; r += LANES) {
            const Floats gate = load(sum + r);
            store(sum + r, gate / (exponential(-gate) + 1.0f) * load(other + r));
        }
        memcpy(target, sum, (size_t)count * 4);
    }
}

/* Multiply all tokens by a weight. GATE takes rows from both halves of the weight. */
static void product(Worker *w, const Matrix *matrix, int kind, float *to, int64_t pitch) {
    const int64_t rows = kind == GATE ? matrix->rows / 2 : matrix->rows, share = share_of(matrix, rows, w->p->threads);
    const int64_t shares = (rows + share - 1) / share, blocks = (w->tokens + BLOCK - 1) / BLOCK;
    const int64_t bytes = padded(matrix->columns) * (int64_t)input_bytes(matrix->format);
    float sums[BLOCK * CHUNK], more[BLOCK * CHUNK];
    EACH_ITEM(shares * blocks) {
        const int64_t token = item % blocks * BLOCK, count = MIN(BLOCK, w->tokens - token);  /* the weight stays in the cache */
        const int64_t start = item / blocks * share, end = MIN(rows, start + share);
        const Input input = {w->m->input + token * bytes, w->m->scales + token, padded(matrix->columns)};
        for (int64_t first = start; first < end; first += CHUNK) {
            const int64_t some = MIN(CHUNK, end - first);
            multiply_rows(matrix, input, count, first, some, sums, CHUNK);
            if (kind == GATE) multiply_rows(matrix, input, count, rows + first, some, more, CHUNK);
            for (int64_t t = 0; t < count; t++)
                put(kind, to + (token + t) * pitch + first, sums + t * CHUNK, more + t * CHUNK, some);
        }
    }
    finish(w);
}

static void *input_of(Worker *w, int64_t token, int format, int64_t columns) {
    return input_at(w->m->input, token, format, columns);
}

/* Tokens whose inputs one thread prepares: those of many whole groups share cache lines. */
static int64_t prepared_at_once(const Worker *w, const Matrix *next) {
    return uses_tiles(next->format, next->columns) && w->tokens > GROUP * w->p->threads ? GROUP : 1;
}
#define EACH_TOKEN_FOR(next)                                                                                                   \
    for (int64_t some = prepared_at_once(w, next), share; (share = taken(w)) * some < w->tokens;)                              \
        for (int64_t item = share * some; item < MIN(w->tokens, (share + 1) * some); item++)

static void prepare_all(Worker *w, const Matrix *matrix, const float *from, int64_t pitch) {
    EACH_TOKEN_FOR(matrix) {
        void *to = input_of(w, item, matrix->format, matrix->columns);
        prepare(matrix->format, from + item * pitch, matrix->columns, to, w->m->scales + item);
    }
    finish(w);
}

/* Divide by the root of the mean square and multiply by the weight. */
static void normalise(const Body *b, const float *from, const void *weight, float *to) {
    Floats sum = {0};
    for (int64_t i = 0; i < b->hidden; i += LANES) {
        const Floats x = load_as(FLOAT32, from, i, b->hidden - i);
        sum = fused(x, x, sum);
    }
    const float factor = 1.0f / sqrtf(one_sum(sum) / (float)b->hidden + b->epsilon);
    for (int64_t i = 0; i < b->hidden; i += LANES) {
        const int64_t left = b->hidden - i;
        const Floats y = load_as(FLOAT32, from, i, left) * factor * load_as(b->format, weight, i, left);
        memcpy(to + i, &y, (size_t)MIN(left, LANES) * 4);
    }
}

static void norm_all(Worker *w, const void *weight, const Matrix *next) {
    EACH_TOKEN_FOR(next) {
        float *normed = w->m->mixed + item * w->m->mixed_stride;
        normalise(w->b, w->m->hidden + item * w->b->hidden, weight, normed);
        void *to = input_of(w, item, next->format, next->columns);
        prepare(next->format, normed, next->columns, to, w->m->scales + item);
    }
    finish(w);
}

/* --- the pass ----------------------------------------------------------------------------------------------------------- */

static void as_floats(int format, const void *from, int64_t place, int64_t count, float *to) {
    for (int64_t i = 0; i < count; i += LANES) {
        const Floats value = load_as(format, from, place + i, count - i);
        memcpy(to + i, &value, (size_t)MIN(count - i, LANES) * 4);
    }
}

static void embed(Worker *w) {
    const Body *b = w->b;
    EACH_ITEM(w->tokens) {
        const int64_t id = MIN(MAX(w->p->tokens[item], 0), b->vocabulary - 1);
        float *hidden = w->m->hidden + item * b->hidden, *pair = w->m->mixed + item * w->m->mixed_stride;
        as_floats(b->format, b->embedding, id * b->hidden, b->hidden, hidden);
        if (!b->feature_norm) continue;
        normalise(b, hidden, b->token_norm, pair + b->hidden);
        as_floats(b->format, w->p->features, item * b->hidden, b->hidden, hidden);
        normalise(b, hidden, b->feature_norm, pair);
        prepare(b->join.format, pair, b->join.columns, input_of(w, item, b->join.format, b->join.columns), w->m->scales + item);
    }
    finish(w);
    if (b->feature_norm) product(w, &b->join, STORE, w->m->hidden, b->hidden);
}

static void run_layer(Worker *w, int64_t number) {
    const Layer *layer = w->b->layers + number;
    const Memory *m = w->m;
    norm_all(w, layer->attention_norm, &layer->qkv);
    product(w, &layer->qkv, STORE, m->wide, m->wide_stride);
    rotate_store(w, number);
    if (!w->p->output && number + 1 == w->b->num_layers) return; /* only keys and values are wanted */
    attend(w, number);
    prepare_all(w, &layer->output, m->mixed, m->mixed_stride);
    product(w, &layer->output, ADD, m->hidden, w->b->hidden);
    norm_all(w, layer->mlp_norm, &layer->gate_up);
    product(w, &layer->gate_up, GATE, m->mixed, m->mixed_stride);
    prepare_all(w, &layer->down, m->mixed, m->mixed_stride);
    product(w, &layer->down, ADD, m->hidden, w->b->hidden);
}

static void give(Worker *w, int64_t column) {
    EACH_ITEM(w->tokens) {
        const int64_t place = item * w->p->output_stride + column * w->b->hidden;
        const float *hidden = w->m->hidden + item * w->b->hidden;
        float *normed = w->m->mixed + item * w->m->mixed_stride;
        if (column == 0) normalise(w->b, hidden, w->b->final_norm, normed);
        store_as(w->b->format, w->p->output, place, column == 0 ? normed : hidden, w->b->hidden);
    }
    finish(w);
}

int64_t polydraft_memory(const Body *body, const Pass *pass) {
    Memory memory;
    Pass blank = *pass;
    blank.memory = NULL;
    return lay_out(body, &blank, &memory);
}

/* Run a pass; returns whether the slots of all tokens exist. */
int32_t polydraft_pass(const Body *body, const Pass *pass) {
    Memory memory;
    lay_out(body, pass, &memory);
    if (!place_tokens(body, pass, &memory)) return 0;
    memset(memory.next, 0, (size_t)stages(body, pass) * APART * 4);
#pragma omp parallel num_threads((int)pass->threads)
    {
        const int64_t thread = arrive(memory.barrier);
        Worker worker = {body, pass, &memory, pass->batch * pass->size, thread, 0}, *w = &worker;
        find_places(w);
        embed(w);
        for (int64_t number = 0; number < body->num_layers; number++) {
            run_layer(w, number);
            for (int64_t tap = 0; tap < pass->num_taps; tap++)
                if (pass->taps[tap] == number + 1) give(w, tap + 1);
        }
        if (pass->output) give(w, 0);
    }
    return 1;
}

/* Bytes of memory that `polydraft_product` needs: multiply tokens by one matrix, with float32 inputs and outputs. */
int64_t polydraft_product_memory(const Matrix *matrix, int64_t tokens) {
    const int64_t inputs = align(grouped(tokens) * padded(matrix->columns) * (int64_t)input_bytes(matrix->format));
    return inputs + align(tokens * 4) + 2 * APART * 4 + (int64_t)sizeof(Barrier);
}

void polydraft_product(const Matrix *matrix, const float *from, int64_t stride, float *to, int64_t tokens, int64_t threads,
                       char *memory) {
    const int64_t bytes = align(grouped(tokens) * padded(matrix->columns) * (int64_t)input_bytes(matrix->format));
    Memory m = {.input = memory, .scales = (void *)(memory + bytes), .next = (void *)(memory + bytes + align(tokens * 4))};
    m.barrier = (void *)(m.next + 2 * APART);
    const Pass pass = {.threads = threads};
    memset(m.next, 0, 2 * APART * 4);
#pragma omp parallel num_threads((int)threads)
    {
        Worker worker = {NULL, &pass, &m, tokens, arrive(m.barrier), 0}, *w = &worker;
        prepare_all(w, matrix, from, stride);
        product(w, matrix, STORE, to, matrix->rows);
    }
}

/* Name the widest instructions that this was compiled for, for people to read. */
const char *polydraft_instructions(void) {
#ifdef TILES
    if (tiles_granted) return "AVX-512 with VNNI and bfloat16, and AMX";
#endif
#if defined(__AVX512VNNI__) && defined(__AVX512BF16__)
    return "AVX-512 with VNNI and bfloat16";
#elif defined(__AVX512VNNI__)
    return "AVX-512 with VNNI";
#elif defined(__AVX512BW__)
    return "AVX-512";
#elif defined(__AVX2__)
    return "AVX2";
#elif defined(SQUARES) && defined(PAIRS)
    return "NEON with 8-bit matrix products and bfloat16";
#elif defined(SQUARES)
    return "NEON with 8-bit matrix products";
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return "NEON with dot products and bfloat16";
#elif defined(__ARM_FEATURE_DOTPROD)
    return "NEON with dot products";
#else
    return "vectors of four numbers";
#endif
}
