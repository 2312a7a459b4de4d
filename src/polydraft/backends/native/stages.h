/* The arguments of a pass, its working memory, and its threads, which go through the same stages and share out their items. */
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
