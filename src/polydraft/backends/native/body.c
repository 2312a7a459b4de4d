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

typedef struct {
    const void *attention_norm, *mlp_norm;
    Matrix qkv, output, gate_up, down;
} Layer;

typedef struct {
    const Layer *layers;
    const void *final_norm, *embedding;
    const void *feature_norm, *token_norm;   /* only in feature heads, where `join` multiplies both */
    Matrix join;
    int64_t num_layers, hidden, queries, keys, channels, mlp, vocabulary;
    float epsilon, scale;
    int32_t format;                          /* of norms, embedding, memory and features: FLOAT32 or BFLOAT16 */
    int32_t reserved;
} Body;

typedef struct {
    const int64_t *tokens;                   /* ids, row by row of the batch */
    const int64_t *depths;                   /* positions after the committed text */
    const int64_t *chosen;                   /* uncommitted places that tokens take; null: those from `start` on */
    const int64_t *lengths;                  /* committed tokens per row */
    int64_t *slot_positions;                 /* [batch, slot_stride] */
    const uint8_t *visible;                  /* uncommitted places that a token sees */
    const float *cosines, *sines;            /* [positions, channels] */
    const void *features;                    /* only for feature heads: the features before each token */
    void *keys, *values;                     /* [layers, stored rows, heads, slots, channels], from the batch's first row on */
    void *output;                            /* [tokens, output_stride]: last hidden states, then taps */
    const int64_t *taps;
    char *memory;                            /* as many bytes as `polydraft_memory` says */
    int64_t batch, size, start, places, capacity, most_position;
    int64_t depth_batch, depth_token, visible_batch, visible_token, visible_place, slot_stride, output_stride;
    int64_t num_taps, window, threads;       /* a window of 0 means no window */
    int64_t stored;                          /* rows per layer of keys and values; the batch may be only some of them */
} Pass;

typedef struct {
    float *hidden, *wide, *mixed, *scores;
    char *input;
    float *scales;
    int32_t *places;                         /* uncommitted slots that each token sees, in order */
    int32_t *counts, *starts;
    int64_t *positions, *slots;              /* of each token */
    int32_t *next;                           /* items taken so far, per stage */
    Barrier *barrier;
    int64_t wide_stride, mixed_stride, input_stride, scores_stride;
} Memory;

#define STAGES_PER_LAYER 10
#define APART 16  /* each counter has its own cache line */

static int64_t align(int64_t bytes) { return (bytes + 63) / 64 * 64; }

static int64_t stages(const Body *b, const Pass *p) { return STAGES_PER_LAYER * (b->num_layers + 1) + p->num_taps; }

/* Lay out the working memory; returns its size. */
static int64_t lay_out(const Body *b, const Pass *p, Memory *m) {
    const int64_t tokens = p->batch * p->size, heads = (b->queries + 2 * b->keys) * b->channels;
    const int64_t mixed = MAX(b->queries * b->channels, MAX(b->mlp, b->feature_norm ? 2 * b->hidden : 0));
    int64_t seen = 0;
    for (int64_t row = 0; row < p->batch; row++) seen = MAX(seen, p->lengths[row] + p->places);
    char *at = p->memory;
    m->wide_stride = padded(heads), m->mixed_stride = padded(MAX(mixed, b->hidden));
    m->input_stride = m->mixed_stride * 4, m->scores_stride = align((seen + LANES) * 4) / 4;
#define TAKE(field, bytes) (m->field = (void *)at, at += align(bytes))
    TAKE(hidden, tokens * b->hidden * 4);
    TAKE(wide, tokens * m->wide_stride * 4);
    TAKE(mixed, tokens * m->mixed_stride * 4);
    TAKE(input, grouped(tokens) * m->input_stride);
    TAKE(scales, tokens * 4);
    TAKE(scores, p->threads * b->queries * m->scores_stride * 4);
    TAKE(places, tokens * p->places * 4);
    TAKE(counts, tokens * 4);
    TAKE(starts, tokens * 4);
    TAKE(positions, tokens * 8);
    TAKE(slots, tokens * 8);
    TAKE(next, stages(b, p) * APART * 4);
    TAKE(barrier, (int64_t)sizeof(Barrier));
    return at - p->memory;
}

typedef struct {
    const Body *b;
    const Pass *p;
    const Memory *m;
    int64_t tokens, thread, stage;
} Worker;

static int64_t taken(Worker *w) { return __atomic_fetch_add(&w->m->next[w->stage * APART], 1, __ATOMIC_RELAXED); }

static void finish(Worker *w) {
    w->stage++;
    wait_for_all(w->m->barrier);
}

#ifdef _OPENMP
extern int omp_get_thread_num(void), omp_get_num_threads(void);
#else
static int omp_get_thread_num(void) { return 0; }
static int omp_get_num_threads(void) { return 1; }
#endif

/* There may be fewer threads than requested, so they are counted before the first barrier. */
static int64_t arrive(Barrier *m) {
#pragma omp single
    *m = (Barrier){.threads = omp_get_num_threads()};
    return omp_get_thread_num();
}

#define EACH_ITEM(count) for (int64_t item; (item = taken(w)) < (count);)

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
        const int64_t token = item / shares * BLOCK, count = MIN(BLOCK, w->tokens - token);
        const int64_t end = MIN(rows, (item % shares + 1) * share);
        const Input input = {w->m->input + token * bytes, w->m->scales + token, padded(matrix->columns)};
        for (int64_t first = item % shares * share; first < end; first += CHUNK) {
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

static void prepare_all(Worker *w, const Matrix *matrix, const float *from, int64_t pitch) {
    EACH_ITEM(w->tokens) {
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
    EACH_ITEM(w->tokens) {
        float *normed = w->m->mixed + item * w->m->mixed_stride;
        normalise(w->b, w->m->hidden + item * w->b->hidden, weight, normed);
        void *to = input_of(w, item, next->format, next->columns);
        prepare(next->format, normed, next->columns, to, w->m->scales + item);
    }
    finish(w);
}

/* --- attention ---------------------------------------------------------------------------------------------------------- */

/* Find the tokens' slots and positions; returns whether the slots exist. */
static int place_tokens(const Body *b, const Pass *p, const Memory *m) {
    for (int64_t token = 0; token < p->batch * p->size; token++) {
        const int64_t row = token / p->size, column = token % p->size;
        const int64_t slot = p->lengths[row] + (p->chosen ? p->chosen[token] : p->start + column);
        const int64_t depth = p->depths[row * p->depth_batch + column * p->depth_token];
        if (slot < 0 || slot >= p->capacity || p->lengths[row] + p->places > p->capacity) return 0;
        m->slots[token] = slot;
        m->positions[token] = MAX(0, MIN(p->lengths[row] + depth, p->most_position));
        p->slot_positions[row * p->slot_stride + slot] = m->positions[token];
    }
    return b->queries % b->keys == 0;
}

/* Find the slots that each token sees: committed ones from `starts` on, then `places`, whose order is that of the path. */
static void find_places(Worker *w) {
    const Pass *p = w->p;
    EACH_ITEM(w->tokens) {
        const int64_t row = item / p->size, length = p->lengths[row];
        const uint8_t *visible = p->visible + row * p->visible_batch + item % p->size * p->visible_token;
        const int64_t oldest = p->window ? w->m->positions[item] - p->window + 1 : 0;
        int32_t *places = w->m->places + item * p->places, count = 0;
        for (int64_t place = 0; place < p->places; place++)
            if (visible[place * p->visible_place] && p->slot_positions[row * p->slot_stride + length + place] >= oldest)
                places[count++] = (int32_t)(length + place);
        w->m->counts[item] = count;
        w->m->starts[item] = (int32_t)MIN(MAX(oldest, 0), length);
    }
    finish(w);
}

static void rotate(const Body *b, const float *cosines, const float *sines, float *head) {
    const int64_t half = b->channels / 2;
    for (int64_t c = 0; c < half; c++) {
        const float x = head[c], y = head[c + half];
        head[c] = x * cosines[c] - y * sines[c];
        head[c + half] = y * cosines[c + half] + x * sines[c + half];
    }
}

static int64_t slot_place(const Worker *w, int64_t layer, int64_t row, int64_t head) {
    return ((layer * w->p->stored + row) * w->b->keys + head) * w->p->capacity * w->b->channels;
}

/* Rotate queries and keys by their positions (RoPE), and store keys and values in their slots. */
static void rotate_store(Worker *w, int64_t layer) {
    const Body *b = w->b;
    EACH_ITEM(w->tokens) {
        float *heads = w->m->wide + item * w->m->wide_stride;
        const int64_t line = w->m->positions[item] * b->channels, slot = w->m->slots[item] * b->channels;
        for (int64_t head = 0; head < b->queries + b->keys; head++)
            rotate(b, w->p->cosines + line, w->p->sines + line, heads + head * b->channels);
        for (int64_t head = 0; head < b->keys; head++) {
            const int64_t place = slot_place(w, layer, item / w->p->size, head) + slot;
            store_as(b->format, w->p->keys, place, heads + (b->queries + head) * b->channels, b->channels);
            store_as(b->format, w->p->values, place, heads + (b->queries + b->keys + head) * b->channels, b->channels);
        }
    }
    finish(w);
}

typedef struct {
    const void *keys, *values;  /* of one row and head */
    const int32_t *places;
    int64_t start, committed, count;  /* first committed slot seen, number of committed slots seen, and of all slots seen */
} Sight;

INLINE int64_t seen_slot(const Sight *s, int64_t i) {
    return i < s->committed ? s->start + i : s->places[i - s->committed];
}

/* Load a vector; a vector that may be cut off (ragged) is slower to load, so loops over whole vectors are separate. */
INLINE Floats part(const int format, const int ragged, const void *from, int64_t place, int64_t left) {
    return load_as(format, from, place, ragged ? left : LANES);
}

/* Several heads read the same keys and values, so each number is read once for up to HEADS of them. `heads` is a constant
 * wherever this is inlined, and does not change the order of any sum.
 */
#define HEADS (LANES == 8 ? 2 : 4)
#define SPAN 16          /* most vectors of channels mixed at a time, so that no sum waits for the one before */
#define SPAN_OF(heads) ((heads) == 1 && LANES == 4 ? SPAN : 4)
#define SLOTS_AHEAD 12   /* slots to prefetch ahead */
#define EACH_HEAD _Pragma("GCC unroll 4") for (int h = 0; h < heads; h++)
#define EACH_SLOT _Pragma("GCC unroll 4") for (int j = 0; j < 4; j++)

typedef struct {
    const float *query;  /* of the first head; the other heads' follow, and likewise for scores and outputs */
    float *scores, *to;
    int64_t channels, scores_stride;
    float scale, factors[HEADS];
} Heads;

/* Scores with four slots, of which the first `some` are stored. */
INLINE void score_four(const int format, const int ragged, const int heads, const Heads *a, const char *const key[4], int64_t i,
                       int64_t some) {
    Floats sum[HEADS][4];
    EACH_HEAD EACH_SLOT sum[h][j] = all(0);
    for (int64_t c = 0; c < a->channels; c += LANES) {
        Floats k[4];
        EACH_SLOT k[j] = part(format, ragged, key[j], c, a->channels - c);
        EACH_HEAD {
            const Floats q = part(FLOAT32, ragged, a->query + h * a->channels, c, a->channels - c);
            EACH_SLOT sum[h][j] = fused(q, k[j], sum[h][j]);
        }
    }
    EACH_HEAD {
        const Four four = four_sums(sum[h][0], sum[h][1], sum[h][2], sum[h][3]) * a->scale;
        memcpy(a->scores + h * a->scores_stride + i, &four, (size_t)some * 4);
    }
}

INLINE void score(const int format, const int ragged, const int heads, const Heads *a, const Sight *s) {
    const int64_t line = a->channels * (format == BFLOAT16 ? 2 : 4);
    const char *key[4];
    int64_t i = 0;
    for (; i + 4 <= s->committed; i += 4) {
        EACH_SLOT key[j] = (const char *)s->keys + (s->start + i + j) * line;
        score_four(format, ragged, heads, a, key, i, 4);
    }
    for (; i < s->count; i += 4) {
        EACH_SLOT key[j] = (const char *)s->keys + seen_slot(s, MIN(i + j, s->count - 1)) * line;
        score_four(format, ragged, heads, a, key, i, MIN(s->count - i, 4));
    }
}

/* Turn scores into weights, in place; returns 1 over their sum. */
static float weigh(float *scores, int64_t count) {
    Floats high = all(scores[0]), sum = {0};
    for (int64_t i = count; i % LANES; i++) scores[i] = -INFINITY;  /* the buffer has room; they are not counted below */
    for (int64_t i = 0; i < count; i += LANES) {
        const Floats part = load(scores + i);
        high = choose(part > high, part, high);
    }
    float most = high[0];
    for (int i = 1; i < LANES; i++) most = high[i] > most ? high[i] : most;
    for (int64_t i = 0; i < count; i += LANES) {
        const Floats score = load(scores + i), weight = exponential(score - most);
        const Floats counted = choose(score > -INFINITY, weight, all(0));
        store(scores + i, weight);
        sum += counted;
    }
    return 1.0f / one_sum(sum);
}

/* Weighted sums of the values of all slots, for some channels from `first` on. */
#define EACH_VECTOR _Pragma("GCC unroll 16") for (int v = 0; v < vectors; v++)
INLINE void mix_span(const int format, const int ragged, const int heads, const int vectors, const Heads *a, const Sight *s,
                     int64_t first) {
    const int64_t size = format == BFLOAT16 ? 2 : 4;
    Floats sum[HEADS][SPAN];
    EACH_HEAD EACH_VECTOR sum[h][v] = all(0);
    for (int64_t i = 0; i < s->count; i++) {
        const int64_t place = seen_slot(s, i) * a->channels + first;
        const char *later = (const char *)s->values + (place + SLOTS_AHEAD * a->channels) * size;
        _Pragma("GCC unroll 4") for (int64_t at = 0; at < vectors * LANES * size; at += LINE) __builtin_prefetch(later + at, 0, 3);
        Floats value[SPAN];
        EACH_VECTOR value[v] = part(format, ragged, s->values, place + v * LANES, a->channels - first - v * LANES);
        EACH_HEAD {
            const Floats weight = all(a->scores[h * a->scores_stride + i]);
            EACH_VECTOR sum[h][v] = fused(weight, value[v], sum[h][v]);
        }
    }
    EACH_HEAD EACH_VECTOR {
        sum[h][v] *= a->factors[h];
        memcpy(a->to + h * a->channels + first + v * LANES, &sum[h][v], (size_t)MIN(a->channels - first - v * LANES, LANES) * 4);
    }
}

INLINE void attend_heads(const int format, const int heads, Heads *a, const Sight *s) {
    if (a->channels % LANES) score(format, 1, heads, a, s);
    else score(format, 0, heads, a, s);
    EACH_HEAD a->factors[h] = weigh(a->scores + h * a->scores_stride, s->count);
    int64_t first = 0;
    for (; first + SPAN_OF(heads) * LANES <= a->channels; first += SPAN_OF(heads) * LANES)
        mix_span(format, 0, heads, SPAN_OF(heads), a, s, first);
    for (; first + LANES <= a->channels; first += LANES) mix_span(format, 0, heads, 1, a, s, first);
    if (first < a->channels) mix_span(format, 1, heads, 1, a, s, first);
}

INLINE void attend_some(const int format, int64_t heads, Heads *a, const Sight *s) {
    switch (heads) {
    case 1: attend_heads(format, 1, a, s); break;
    case 2: attend_heads(format, 2, a, s); break;
    case 3: attend_heads(format, MIN(3, HEADS), a, s); break;
    default: attend_heads(format, HEADS, a, s); break;
    }
}

static void attend(Worker *w, int64_t layer) {
    const Body *b = w->b;
    const Pass *p = w->p;
    const int64_t group = b->queries / b->keys, lone = w->tokens * b->keys < 4 * p->threads;
    const int64_t share = lone ? 1 : group, shares = b->queries / share;  /* heads per item */
    const size_t size = b->format == BFLOAT16 ? 2 : 4;
    EACH_ITEM(w->tokens * shares) {
        const int64_t token = item / shares, head = item % shares * share, row = token / p->size;
        const size_t place = (size_t)slot_place(w, layer, row, head / group) * size;
        Sight s = {(const char *)p->keys + place, (const char *)p->values + place, w->m->places + token * p->places,
                   w->m->starts[token], p->lengths[row] - w->m->starts[token], 0};
        s.count = s.committed + w->m->counts[token];
        for (int64_t h = head, some; h < head + share; h += some) {
            some = MIN(HEADS, head + share - h);
            Heads heads = {w->m->wide + token * w->m->wide_stride + h * b->channels,
                           w->m->scores + w->thread * b->queries * w->m->scores_stride,
                           w->m->mixed + token * w->m->mixed_stride + h * b->channels,
                           b->channels, w->m->scores_stride, b->scale, {0}};
            if (b->format == BFLOAT16) attend_some(BFLOAT16, some, &heads, &s);
            else attend_some(FLOAT32, some, &heads, &s);
        }
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
