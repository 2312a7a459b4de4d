/* The stages of attention: where tokens stand and what they see, rotation (RoPE), and the running sums over keys and values. */

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
