/* Drawing and verification on a CPU: the largest weights of a row, tokens drawn from it, races between children (explained in
 * polydraft.verify.contest) and the end of a path (polydraft.verify.block). The formulas and their order are the same as in
 * torch, which takes hundreds of small operations per node that cost more to call than to compute. One row at a time, in float64.
 */
#include <stdint.h>
#include <string.h>

#define NO_TOKEN (-1)
#define FEW 64             /* most children per node */
#define SMALLEST 1e-300    /* replaces a denominator of zero */
#define BELOW_ONE 0x1.fffffffffffffp-1
#define LESS(a, b) ((a) < (b) ? (a) : (b))
#define MORE(a, b) ((a) > (b) ? (a) : (b))

typedef struct {
    const float *target;          /* p, [rows, vocabulary], unnormalised */
    const float *draft;           /* each row's q begins `offsets` numbers after this */
    const int64_t *offsets;
    const int64_t *known;         /* tokens of the draft's columns; null: it knows all tokens */
    const int64_t *column_of;     /* each token's column */
    const double *others;         /* 1 for each token that the draft does not know */
    const int64_t *children;      /* tokens, [rows, width] */
    const int64_t *nodes;
    const double *uniforms;       /* [rows, uniform_stride] */
    const uint8_t *state;         /* of each row: 0 if its path has ended above, 1 if it ends here, 2 if a child is picked */
    double *lumped, *distribution;  /* p and r, [rows, columns]; one column more than the draft's if it lacks tokens */
    double *ratio, *mass;         /* p(x)/r(x) of the picked child x; the sum of p */
    int64_t *child;               /* the picked child's node; NO_TOKEN for none */
    int64_t *fault;               /* 1: the target's distribution is NaN, 2: the draft's */
    void *memory;                 /* as many bytes as `polydraft_pick_memory` says */
    int64_t rows, vocabulary, draft_columns, columns, width, uniform_stride, buckets;
    double threshold;             /* for certain children; infinity: none is certain */
} Pick;

typedef struct {                  /* one race, over cells */
    double *target, *weight, *draft, *above, *raised, *selected, *drift, *gains, *losses, *left;
    int32_t *cell;                /* of each column */
    int64_t cells, racing;
} Race;

static double quotient(double numerator, double denominator) { return numerator / MORE(denominator, SMALLEST); }

/* Sums in eight strands, because a single one would wait for each addition. */
#define STRANDS 8
#define SUM_OF(name, arguments, term)                                                \
    static double name(arguments, int64_t count) {                                   \
        double sums[STRANDS] = {0}, sum = 0;                                         \
        int64_t i = 0;                                                               \
        for (; i + STRANDS <= count; i += STRANDS)                                   \
            for (int j = 0; j < STRANDS; j++) sums[j] += term(i + j);                \
        for (; i < count; i++) sum += term(i);                                       \
        for (int j = 0; j < STRANDS; j++) sum += sums[j];                            \
        return sum;                                                                  \
    }
#define COMMA ,
#define NUMBER(i) ((double)number[i])
#define COUNTED(i) ((double)number[i] * counted[i])
#define EXCESS(i) MORE(p[i] * share - r[i], 0)
SUM_OF(sum_of, const double *number, NUMBER)
SUM_OF(sum_of_floats, const float *number, NUMBER)
SUM_OF(sum_of_counted, const float *number COMMA const double *counted, COUNTED)
SUM_OF(sum_of_excess, const double *p COMMA const double *r COMMA double share, EXCESS)

static int64_t rounded_up(int64_t bytes) { return (bytes + 63) / 64 * 64; }

int64_t polydraft_pick_memory(int64_t columns, int64_t buckets) {
    return 10 * rounded_up((buckets + 1) * 8) + rounded_up(columns * 4);
}

static Race laid_out(const Pick *p) {
    char *at = p->memory;
    const int64_t size = rounded_up((p->buckets + 1) * 8);
    Race race = {.cells = p->buckets + 1};
    double **tables[] = {&race.target, &race.weight, &race.draft,  &race.above, &race.raised,
                         &race.selected, &race.drift, &race.gains, &race.losses, &race.left};
    for (int i = 0; i < 10; i++, at += size) *tables[i] = (double *)at;
    race.cell = (int32_t *)at;
    return race;
}

/* Number of entries of a rising table that do not exceed a mark. */
static int64_t searched(const double *table, int64_t count, double mark) {
    int64_t low = 0, high = count;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (table[middle] <= mark) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* How many of the first children are certain. */
static int64_t certain_children(const int64_t *child, const double *value, int64_t width, double total, int64_t count,
                                double threshold) {
    double running = 0;
    int64_t certain = 0;
    for (; certain + 1 < width; certain++) {
        const int64_t left = count - certain;
        running += value[certain];
        const double rest = total - running + value[certain];
        if (!(value[certain] * (double)left >= rest * threshold && left > 1 && child[certain + 1] != child[certain])) break;
    }
    return certain;
}

/* Equal steps of 1/(1 + q/p), the largest ratio first. */
static void fill_cells(const double *target, const float *draft, int64_t drawn, int64_t columns, double scale, int64_t buckets,
                       int32_t *cell) {
    const double step = scale / (double)buckets, one = 1.0 / (double)buckets, most = (double)buckets;
    for (int64_t x = 0; x < drawn; x++) {
        double place = 1.0 / ((double)draft[x] / target[x] * step + one);
        place = place >= 1 ? place : 1;  /* 0/0 may land in any cell */
        cell[x] = (int32_t)(place <= most ? place : most);
    }
    if (drawn < columns) cell[drawn] = (int32_t)buckets;
}

static void plan(Race *r) {
    double above = 0, target = 0, most = 0, gains = 0, losses = 0;
    double *excess = r->left, *hull = r->gains;
    for (int64_t c = 0; c < r->cells; c++) {
        above += r->draft[c], target += r->target[c];
        double raised = above;
        for (int64_t power = 1; power < r->racing; power++) raised *= above;
        r->above[c] = above, r->raised[c] = raised, excess[c] = raised - target;
        most = c ? MORE(most, excess[c]) : excess[c];
        hull[c] = most;
    }
    for (int64_t c = r->cells - 1; c >= 0; c--) {
        most = c == r->cells - 1 ? excess[c] : MORE(most, excess[c]);
        hull[c] = LESS(hull[c], most);
    }
    for (int64_t c = r->cells - 1; c >= 0; c--) {
        const double wanted = r->target[c] + hull[c] - (c ? hull[c - 1] : 0);
        r->selected[c] = LESS(MORE(wanted, 0), r->draft[c] * (double)r->racing);
        r->drift[c] = r->selected[c] - r->raised[c] + (c ? r->raised[c - 1] : 0);
    }
    for (int64_t c = 0; c < r->cells; c++) {
        const double gain = MORE(r->drift[c], 0);
        gains += gain, losses += gain - r->drift[c];
        r->gains[c] = gains, r->losses[c] = losses;
    }
}

/* Compute what winners keep after `certain` mass goes from where r exceeds p to certain children. */
static void hand_over(Race *r, double certain) {
    double sum = 0;
    for (int64_t c = 0; c < r->cells; c++) sum += MORE(r->selected[c] - r->target[c], 0);
    const double share = LESS(quotient(certain, sum), 1);
    for (int64_t c = 0; c < r->cells; c++) r->left[c] = r->selected[c] - MORE(r->selected[c] - r->target[c], 0) * share;
}

/* m = sum over j < n of X^j Y^(n-1-j). */
static double slope(const Race *r, int64_t cell) {
    const double above = r->above[cell], below = above - r->draft[cell];
    double sum = 0, power = 1;
    for (int64_t j = 0; j < r->racing; j++) {
        double term = power;
        for (int64_t i = j + 1; i < r->racing; i++) term *= below;
        sum += term, power *= above;
    }
    return sum;
}

static double place(const Race *r, int64_t cell, double partner, double number) {
    const double drift = r->drift[cell], size = drift < 0 ? -drift : drift;
    const int gaining = drift > 0;
    const double mark = (gaining ? r->gains : r->losses)[cell] - (1 - partner) * size;
    const int64_t other = LESS(searched(gaining ? r->losses : r->gains, r->cells, mark), r->cells - 1);
    const double apart = slope(r, other) - slope(r, cell);
    const double away = LESS(quotient(size, r->draft[cell] * (apart < 0 ? -apart : apart)), 1);
    const int swapped = number < away;
    const double below = swapped ? 1 - quotient(number, away) : quotient(1 - number, 1 - away);
    const int64_t whose = swapped ? other : cell;
    return r->above[whose] - below * r->draft[whose];
}

/* Race the children of one row; returns the index of the picked one, and r in `distribution`. */
static int64_t raced(const Pick *p, Race *r, const double *target, const float *draft, const int64_t *column, const double *number,
                     double *distribution) {
    const int64_t width = p->width;
    int64_t token[FEW], cell[FEW], count = 0;
    double value[FEW], certain[FEW], apart_weight = 0, certain_mass = 0;
    const double total = sum_of_floats(draft, p->draft_columns);
    for (int64_t k = 0; k < width; k++) {
        token[k] = MORE(column[k] != NO_TOKEN ? column[k] : column[0], 0);
        value[k] = token[k] < p->draft_columns ? (double)draft[token[k]] : 0;
        count += column[k] != NO_TOKEN;
    }
    if (count == 1) {  /* the only child wins, and r is q: no race to plan */
        const double scale = quotient(1, total);
        for (int64_t x = 0; x < p->draft_columns; x++) distribution[x] = (double)draft[x] * scale;
        if (p->draft_columns < p->columns) distribution[p->draft_columns] = 0;
        for (int64_t k = 0; k < width; k++)
            if (column[k] != NO_TOKEN) return k;
    }
    const int64_t first = certain_children(column, value, width, total, count, p->threshold);
    for (int64_t k = 0; k < first; k++) apart_weight += value[k];
    fill_cells(target, draft, p->draft_columns, p->columns, quotient(total, total - apart_weight), p->buckets, r->cell);
    for (int64_t k = 0; k < width; k++) {
        const int racing = column[k] != NO_TOKEN && k >= first;
        cell[k] = racing || !first ? r->cell[token[k]] : 0;  /* the mass of cell 0 is dropped */
    }
    for (int64_t k = 0; k < width; k++) r->cell[token[k]] = (int32_t)cell[k];
    memset(r->target, 0, (size_t)r->cells * 8);
    memset(r->weight, 0, (size_t)r->cells * 8);
    for (int64_t x = 0; x < p->columns; x++) {
        r->target[r->cell[x]] += target[x];
        if (x < p->draft_columns) r->weight[r->cell[x]] += (double)draft[x];
    }
    const double mass = sum_of(r->target, r->cells);
    r->target[0] = r->weight[0] = 0;
    const double weight = sum_of(r->weight, r->cells);
    for (int64_t c = 0; c < r->cells; c++) {
        r->target[c] = quotient(r->target[c], mass);
        r->draft[c] = quotient(r->weight[c], weight);
    }
    r->racing = count - LESS(first, count);
    plan(r);
    for (int64_t k = 0; k < width; k++) {
        certain[k] = k < first ? quotient(target[token[k]], mass) : 0;
        certain_mass += certain[k];
    }
    hand_over(r, certain_mass);
    for (int64_t k = 0; k < width; k++) value[k] = quotient(r->left[cell[k]], r->selected[cell[k]]);  /* chance to keep */
    for (int64_t c = 0; c < r->cells; c++) r->weight[c] = quotient(r->left[c], r->weight[c]);
    for (int64_t x = 0; x < p->draft_columns; x++) distribution[x] = r->weight[r->cell[x]] * (double)draft[x];
    if (p->draft_columns < p->columns) distribution[p->draft_columns] = 0;
    for (int64_t k = 0; k < first; k++) distribution[token[k]] += certain[k];

    int64_t winner = NO_TOKEN;
    double best = -1;
    for (int64_t k = first; k < width; k++) {
        if (column[k] == NO_TOKEN) continue;
        const double where = place(r, cell[k], number[1 + 2 * k], number[2 + 2 * k]);
        if (winner == NO_TOKEN || where > best) winner = k, best = where;
    }
    if (winner == NO_TOKEN || !first || number[0] < value[winner]) return winner;
    /* A number above the chance to keep is uniform there, so it also decides who takes over. */
    double running = 0;
    const double mark = quotient(number[0] - value[winner], 1 - value[winner]) * certain_mass;
    for (int64_t k = 0; k < width; k++) {
        running += certain[k];
        if (running > mark) return k;
    }
    return winner;  /* rounding has put the mark at the very end */
}

/* Write p by column, the last one for all tokens that the draft does not know; returns its sum. */
static double lump(const Pick *p, const float *target, double *lumped) {
    if (!p->known) for (int64_t x = 0; x < p->columns; x++) lumped[x] = (double)target[x];
    else {
        for (int64_t x = 0; x < p->draft_columns; x++) lumped[x] = (double)target[p->known[x]];
        /* Summed directly, not as a difference, so that it is 0 if they all are. */
        lumped[p->draft_columns] = sum_of_counted(target, p->others, p->vocabulary);
    }
    return sum_of(lumped, p->columns);
}

/* Pick a child of one node per row. */
void polydraft_pick(const Pick *p) {
    Race race = laid_out(p);
    for (int64_t row = 0; row < p->rows; row++) {
        const float *target = p->target + row * p->vocabulary, *draft = p->draft + p->offsets[row];
        const int64_t *children = p->children + row * p->width;
        double *lumped = p->lumped + row * p->columns, *distribution = p->distribution + row * p->columns;
        int64_t column[FEW];
        p->child[row] = NO_TOKEN, p->ratio[row] = 0, p->mass[row] = 1, p->fault[row] = 0;
        if (!p->state[row]) continue;
        const double sum = sum_of_floats(draft, p->draft_columns);
        p->fault[row] = target[0] != target[0] ? 1 : sum != sum ? 2 : 0;
        if (p->state[row] == 1 || p->fault[row]) continue;
        for (int64_t k = 0; k < p->width; k++)
            column[k] = !p->known || children[k] == NO_TOKEN ? children[k] : p->column_of[children[k]];
        p->mass[row] = lump(p, target, lumped);
        const int64_t index = raced(p, &race, lumped, draft, column, p->uniforms + row * p->uniform_stride, distribution);
        if (index == NO_TOKEN) continue;
        const int64_t token = MORE(column[index], 0);
        const double chance = distribution[token] * p->mass[row];
        p->ratio[row] = chance > 0 ? lumped[token] / chance : 0;
        for (int64_t k = p->width - 1; k >= 0; k--)  /* first match: a token drawn twice has equal subtrees in distribution */
            if (column[k] == token) p->child[row] = p->nodes[row * p->width + k];
    }
}

typedef struct {
    const double *const *lumped, *const *distribution;  /* of each level, [rows, columns] */
    const float *const *target;                /* of each level, [rows, vocabulary] */
    const double *weight, *mass;               /* a and the sum of p, [levels + 1, rows] and [levels, rows] */
    const uint8_t *going;                      /* [levels, rows]: whether the path goes on below */
    const int64_t *known;
    const double *uniforms;                    /* two per row: where to stop, and what follows */
    double *memory;                            /* as many bytes as `polydraft_draw_memory` says */
    int64_t *accepted;                         /* NO_TOKEN if there is nothing to draw */
    int64_t *token;                            /* NO_TOKEN also if the distribution after the last level is needed */
    int64_t rows, levels, vocabulary, draft_columns, columns, uniform_stride;
} End;

enum { BLOCK = 256 };

static double fill_sums(const double *weight, int64_t count, double *sums) {
    double total = 0;
    for (int64_t first = 0, block = 0; first < count; first += BLOCK, block++)
        total += sums[block] = sum_of(weight + first, LESS(BLOCK, count - first));
    return total;
}

/* Find the block that a uniform number falls into, then the token inside it; NO_TOKEN if there is no weight. */
static int64_t found(const double *weight, int64_t count, const double *sums, double total, double uniform) {
    const double mark = LESS(uniform, BELOW_ONE) * total;
    double before = 0;
    if (!(total > 0)) return NO_TOKEN;
    for (int64_t first = 0, block = 0; first < count; first += BLOCK, block++) {
        if (before + sums[block] > mark) {  /* true for some block, because these very sums add up to the total */
            int64_t last = NO_TOKEN;
            for (int64_t i = first; i < LESS(first + BLOCK, count); i++) {
                before += weight[i];
                if (weight[i] > 0) last = i;
                if (before > mark) break;
            }
            return last;  /* has weight, even if rounding puts the mark at the block's end */
        }
        before += sums[block];
    }
    return NO_TOKEN;
}

int64_t polydraft_draw_memory(int64_t count) { return (count + count / BLOCK + 1) * 8; }

static int64_t drawn(double *weight, int64_t count, double uniform) {
    double *sums = weight + count;
    const double total = fill_sums(weight, count, sums);
    return found(weight, count, sums, total, uniform);
}

/* Draw tokens with replacement, from unnormalised weights. */
void polydraft_draw(const float *weight, int64_t stride, int64_t rows, int64_t count, const double *uniforms,
                    int64_t uniform_stride, int64_t width, double *memory, int64_t *token) {
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t i = 0; i < count; i++) memory[i] = (double)weight[row * stride + i];
        const double total = fill_sums(memory, count, memory + count);
        for (int64_t k = 0; k < width; k++)
            token[row * width + k] = found(memory, count, memory + count, total, uniforms[row * uniform_stride + k]);
    }
}

/* Find the largest weights of each row in order, of equal ones the first; returns 0 if there are NaNs. */
int32_t polydraft_largest(const float *weight, int64_t stride, int64_t rows, int64_t count, int64_t width, float *value,
                          int64_t *token) {
    enum { STEP = 64 };
    int32_t comparable = 1;
    for (int64_t row = 0; row < rows; row++) {
        const float *from = weight + row * stride;
        float *best = value + row * width;
        int64_t *where = token + row * width, have = 0;
        for (int64_t first = 0; first < count; first += STEP) {
            const int64_t stop = LESS(first + STEP, count);
            int32_t beaten = have < width, strange = 0;
            const float least = have == width ? best[width - 1] : 0;
            if (stop == first + STEP)
                for (int64_t i = 0; i < STEP; i++) beaten |= from[first + i] > least, strange |= from[first + i] != from[first + i];
            else
                for (int64_t i = first; i < stop; i++) beaten |= from[i] > least, strange |= from[i] != from[i];
            if (strange) comparable = 0;
            if (!beaten) continue;
            for (int64_t i = first; i < stop; i++) {
                if (have == width && !(from[i] > best[width - 1])) continue;
                int64_t at = have < width ? have++ : width - 1;
                for (; at && from[i] > best[at - 1]; at--) best[at] = best[at - 1], where[at] = where[at - 1];
                best[at] = from[i], where[at] = i;
            }
        }
    }
    return comparable;
}

static inline uint32_t bits_of(float number) {
    uint32_t bits;
    memcpy(&bits, &number, 4);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float number;
    memcpy(&number, &bits, 4);
    return number;
}

/* The natural logarithm of a positive, normal number, off by less than two units in the last place. Numbers are compared by their
 * bits: comparisons of floats would keep loops from running on vectors. */
static inline float logarithm(float number) {
    const uint32_t bits = bits_of(number), fraction = (bits & 0x7fffff) | 0x3f000000;
    const float small = (float)(int32_t)(fraction < 0x3f3504f3);  /* below the root of 1/2 */
    const float power = (float)((int32_t)(bits >> 23) - 126) - small;
    float part = float_of(fraction);
    part = part - 1 + small * part;
    const float square = part * part;
    float sum = 7.0376836292e-2f;
    sum = sum * part - 1.1514610310e-1f, sum = sum * part + 1.1676998740e-1f, sum = sum * part - 1.2420140846e-1f;
    sum = sum * part + 1.4249322787e-1f, sum = sum * part - 1.6668057665e-1f, sum = sum * part + 2.0000714765e-1f;
    sum = sum * part - 2.4999993993e-1f, sum = sum * part + 3.3333331174e-1f;
    sum = sum * part * square - 2.12194440e-4f * power - 0.5f * square;
    return part + sum + 0.693359375f * power;
}

static inline uint32_t mixed_low(uint32_t bits) {
    bits = (bits ^ bits >> 16) * 0x7FEB352Du;
    bits = (bits ^ bits >> 15) * 0x846CA68Bu;
    return bits ^ bits >> 16;
}

/* The bits that a token's noise is made from; the fewer, the larger the noise. */
static inline uint32_t noise_bits(uint32_t token, uint32_t low, uint32_t high) {
    return mixed_low(mixed_low(token * 0x9E3779B1u + low) ^ high);
}

static inline float gumbel_of(uint32_t bits) {
    const uint32_t few = -(uint32_t)(bits < 1u << 27);
    bits = LESS(bits, 0xFFFFFF00u);  /* the largest that is rounded to a number below 2^32 */
    const float uniform = ((float)bits + 0.5f) * 0x1p-32f;
    float series = (float)(1.0 / 5) + uniform * (float)(1.0 / 6);  /* where 1 - uniform would round most of it off */
    series = uniform * (1 + uniform * (0.5f + uniform * ((float)(1.0 / 3) + uniform * (0.25f + uniform * series))));
    const float exact = -logarithm(1 - uniform);
    return -logarithm(float_of((bits_of(series) & few) | (bits_of(exact) & ~few)));
}

/* Mix the bits of a text's key and a position: the finaliser of SplitMix64. */
static uint64_t mixed(uint64_t key, uint64_t position) {
    key += position * 0x9E3779B97F4A7C15u;
    key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9u;
    key = (key ^ key >> 27) * 0x94D049BB133111EBu;
    return key ^ key >> 31;
}

/* Add scaled Gumbel noise, a function of key, position and token, to scores [rows, places, nodes, count]; the nodes of a place
 * have the same position. `tokens` are those of the columns, null for all in order. polydraft.sampling.gumbel has the formula. */
void polydraft_perturb(const float *scores, int64_t rows, int64_t places, int64_t nodes, int64_t count, const uint64_t *keys,
                       const uint64_t *positions, const float *scales, const int64_t *tokens, float *noisy) {
    for (int64_t place = 0; place < rows * places; place++) {
        const uint64_t key = mixed(keys[place / places], positions[place]);
        const uint32_t low = (uint32_t)key, high = (uint32_t)(key >> 32);
        const float scale = scales[place / places], *from = scores + place * nodes * count;
        float *to = noisy + place * nodes * count;
        if (scale == 0) {
            memcpy(to, from, sizeof(float) * (size_t)(nodes * count));
            continue;
        }
        if (tokens)
            for (int64_t i = 0; i < count; i++) to[i] = scale * gumbel_of(noise_bits((uint32_t)tokens[i], low, high));
        else
            for (int64_t i = 0; i < count; i++) to[i] = scale * gumbel_of(noise_bits((uint32_t)i, low, high));
        for (int64_t node = nodes - 1; node >= 0; node--)  /* last the first, which holds the noise */
            for (int64_t i = 0; i < count; i++) to[node * count + i] = from[node * count + i] + to[i];
    }
}

#define MOST_NOISE 23.0f  /* of the fewest bits */

/* An upper bound of the noise of some bits: it is below -log((bits + 1/2) / 2^32), rounded up to powers of 2. */
static inline float noise_bound(uint32_t bits) {
    return (float)(160 - (int32_t)(bits_of((float)bits + 0.5f) >> 23)) * 0.69314722f;
}

#define MOST_PERTURBED 64

/* Find the columns of a node's largest scores with noise, in order, of equal ones the first; NO_TOKEN for those not finite. Noise
 * takes most of the time, so it is computed only where its bound says that a score may be among the largest. */
static void largest_perturbed(const float *score, int64_t count, uint64_t key, float scale, const int64_t *tokens, int64_t width,
                              int64_t *column) {
    enum { STEP = 64 };
    const uint32_t low = (uint32_t)key, high = (uint32_t)(key >> 32);
    const int64_t most = LESS(width, count);
    float best[MOST_PERTURBED];
    for (int64_t k = 0; k < width; k++) column[k] = NO_TOKEN;
    if (!most || !polydraft_largest(score, count, 1, count, most, best, column)) {
        for (int64_t k = 0; k < width; k++) column[k] = NO_TOKEN;
        return;
    }
    float least = best[0];  /* the least that may count: that of the largest scores, whatever their noise */
    for (int64_t k = 0; scale != 0 && k < most; k++) {
        const int64_t at = column[k];
        const float value = score[at] + scale * gumbel_of(noise_bits((uint32_t)(tokens ? tokens[at] : at), low, high));
        least = k && least < value ? least : value;
    }
    int64_t have = 0;
    for (int64_t first = 0; scale != 0 && first < count; first += STEP) {
        const int64_t size = LESS(STEP, count - first);
        const float *from = score + first, enough = least - MOST_NOISE * scale;
        uint32_t bits[STEP];
        int32_t beaten = size < STEP;
        if (size == STEP)
            for (int64_t i = 0; i < STEP; i++) beaten |= from[i] >= enough;
        if (!beaten) continue;
        if (tokens)
            for (int64_t i = 0; i < size; i++) bits[i] = noise_bits((uint32_t)tokens[first + i], low, high);
        else
            for (int64_t i = 0; i < size; i++) bits[i] = noise_bits((uint32_t)(first + i), low, high);
        if (size == STEP) {
            beaten = 0;
            for (int64_t i = 0; i < STEP; i++) beaten |= from[i] + scale * noise_bound(bits[i]) >= least;
            if (!beaten) continue;
        }
        for (int64_t i = 0; i < size; i++) {
            if (!(from[i] + scale * noise_bound(bits[i]) >= least)) continue;
            const float value = from[i] + scale * gumbel_of(bits[i]);
            if (have == most ? !(value > best[most - 1]) : !(value >= least)) continue;
            int64_t at = have < most ? have++ : most - 1;
            for (; at && value > best[at - 1]; at--) best[at] = best[at - 1], column[at] = column[at - 1];
            best[at] = value, column[at] = first + i;
            if (have == most) least = best[most - 1];
        }
    }
    for (int64_t k = 0; k < most; k++)
        if (best[k] - best[k] != 0) column[k] = NO_TOKEN;
}

/* Arguments as for `polydraft_perturb`; writes the columns of each node's `width` largest scores with noise. */
void polydraft_largest_perturbed(const float *scores, int64_t rows, int64_t places, int64_t nodes, int64_t count,
                                 const uint64_t *keys, const uint64_t *positions, const float *scales, const int64_t *tokens,
                                 int64_t width, int64_t *columns) {
    for (int64_t place = 0; place < rows * places; place++) {
        const uint64_t key = mixed(keys[place / places], positions[place]);
        for (int64_t node = place * nodes; node < (place + 1) * nodes; node++)
            largest_perturbed(scores + node * count, count, key, scales[place / places], tokens, width, columns + node * width);
    }
}

/* Compute the chance of stopping at each depth, from the end upwards. */
static void fill_stops(const End *e, int64_t row, double *stop) {
    double passed = 1;
    for (int64_t level = e->levels; level >= 0; level--) {
        const double weight = e->weight[level * e->rows + row];
        const int64_t at = level * e->rows + row;
        double mass = weight;  /* at a path's end nothing is picked, so the excess is all of a p */
        if (level < e->levels && e->going[at]) {
            const double *p = e->lumped[level] + row * e->columns, *r = e->distribution[level] + row * e->columns;
            mass = sum_of_excess(p, r, weight / e->mass[at], e->columns);
        }
        const double rest = mass + (1 - weight), chance = rest != 0 ? mass / rest : 0;
        stop[level] = chance * passed;
        passed *= 1 - chance;
    }
}

/* Draw where each row's path stops, and the token there. */
void polydraft_end(const End *e) {
    for (int64_t row = 0; row < e->rows; row++) {
        double stop[FEW + 1], total = 0, running = 0;
        fill_stops(e, row, stop);
        for (int64_t level = 0; level <= e->levels; level++) total += stop[level];
        e->accepted[row] = e->token[row] = NO_TOKEN;
        if (!(total > 0)) continue;
        const double *uniform = e->uniforms + row * e->uniform_stride, mark = LESS(uniform[0], BELOW_ONE) * total;
        int64_t level = 0;
        while (level < e->levels && (running += stop[level]) <= mark) level++;
        e->accepted[row] = level;
        if (level == e->levels) continue;
        const float *target = e->target[level] + row * e->vocabulary;
        const int64_t at = level * e->rows + row;
        if (!e->going[at]) {
            polydraft_draw(target, 0, 1, e->vocabulary, uniform + 1, 0, 1, e->memory, e->token + row);
            continue;
        }
        const double *p = e->lumped[level] + row * e->columns, *r = e->distribution[level] + row * e->columns;
        const double share = e->weight[at] / e->mass[at];
        if (e->known) {
            /* Tokens that the draft does not know are never picked, so all of a p is left for them. */
            for (int64_t token = 0; token < e->vocabulary; token++) e->memory[token] = (double)target[token] * share;
            for (int64_t x = 0; x < e->draft_columns; x++) e->memory[e->known[x]] = MORE(p[x] * share - r[x], 0);
        } else for (int64_t x = 0; x < e->columns; x++) e->memory[x] = MORE(p[x] * share - r[x], 0);
        e->token[row] = drawn(e->memory, e->vocabulary, uniform[1]);
    }
}
