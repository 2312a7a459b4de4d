/* Stands for llama.cpp: the functions that are called, with parameters of a layout that nobody knows.
 *
 * Its next token is the sum of all tokens that it remembers, plus what its sampler adds, modulo 50.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#ifndef EXTRA
#define EXTRA 3
#endif
#define MAGIC 0x706f6c7964726166

typedef struct { int64_t words[7 + EXTRA], magic; } ModelParams;
typedef struct {
#ifdef SEED_FIRST
    uint32_t seed;
#endif
    uint32_t n_ctx, n_batch;
    int64_t words[12 + EXTRA], magic;
} ContextParams;
typedef struct {
    int32_t count;
    int32_t *tokens;
#ifdef OTHER_BATCH
    int64_t kind;
#endif
    float *embeddings;
    int32_t *positions, *num_sequences, **sequences;
    int8_t *outputs;
} Batch;
typedef struct { bool quiet; } ChainParams;
typedef struct { int32_t tokens[4096], length, first, size, threads, batch_threads; uint32_t n_ctx; int8_t output[4096]; } Context;

static int open_models, open_contexts, open_samplers;
int stub_open(void) { return 100 * open_models + 10 * open_contexts + open_samplers; }

void llama_backend_init(void) {}
void llama_log_set(void (*log)(int, const char *, void *), void *data) { log(2, "hello\n", data); }
const char *llama_print_system_info(void) { return "STUB = 1 | "; }
#ifdef GPU
bool llama_supports_gpu_offload(void) { return true; }
#else
bool llama_supports_gpu_offload(void) { return false; }
#endif
ModelParams llama_model_default_params(void) { return (ModelParams){.magic = MAGIC}; }
void *llama_model_load_from_file(const char *path, ModelParams params) {
    if (params.magic != MAGIC || path[0] == '-') return NULL;
    open_models++;
    return malloc(1);
}
void llama_model_free(void *model) { free(model), open_models--; }
ContextParams llama_context_default_params(void) { return (ContextParams){.n_ctx = 512, .n_batch = 16, .magic = MAGIC}; }
#ifndef OLD
Context *llama_init_from_model(void *model, ContextParams params) {
    if (params.magic != MAGIC || !model) return NULL;
    Context *context = calloc(1, sizeof *context);
    context->n_ctx = (params.n_ctx + 255) / 256 * 256;
    open_contexts++;
    return context;
}
#endif
void llama_free(Context *context) { free(context), open_contexts--; }
uint32_t llama_n_ctx(Context *context) { return context->n_ctx; }
uint32_t llama_n_batch(Context *context) { return 16; }
void llama_set_n_threads(Context *context, int32_t one, int32_t many) { context->threads = one, context->batch_threads = many; }
int32_t llama_n_threads(Context *context) { return context->threads; }
Context *llama_get_memory(Context *context) { return context; }
void llama_memory_clear(Context *context, bool data) { context->length = 0; }
bool llama_memory_seq_rm(Context *context, int32_t sequence, int32_t from, int32_t to) {
    context->length = from;
    return true;
}
Batch llama_batch_get_one(int32_t *tokens, int32_t count) { return (Batch){.count = count, .tokens = tokens}; }
Batch llama_batch_init(int32_t count, int32_t embeddings, int32_t sequences) {
    return (Batch){.tokens = malloc(4), .positions = malloc(4), .num_sequences = malloc(4), .sequences = malloc(8),
                   .outputs = malloc(1)};
}
void llama_batch_free(Batch batch) {
    free(batch.tokens), free(batch.positions), free(batch.num_sequences), free(batch.sequences), free(batch.outputs);
}
int32_t llama_decode(Context *context, Batch batch) {
    if (batch.count > 16 || context->length + batch.count > (int32_t)context->n_ctx) return 1;
    context->first = context->length, context->size = batch.count;
    for (int i = 0; i < batch.count; i++) {
        context->tokens[context->length++] = batch.tokens[i];
        context->output[i] = batch.outputs ? batch.outputs[i] : i + 1 == batch.count;
    }
    return 0;
}
void llama_synchronize(Context *context) {}
float *llama_get_logits_ith(Context *context, int32_t i) {
    static float logits;
    return context->output[i < 0 ? context->size + i : i] ? &logits : NULL;
}
ChainParams llama_sampler_chain_default_params(void) { return (ChainParams){true}; }
int64_t *llama_sampler_chain_init(ChainParams params) {
    open_samplers++;
    return params.quiet ? calloc(1, sizeof(int64_t)) : NULL;
}
static void *adding(int64_t number) {
    int64_t *sampler = malloc(sizeof *sampler);
    *sampler = number;
    return sampler;
}
void llama_sampler_chain_add(int64_t *chain, int64_t *sampler) { *chain += *sampler, free(sampler); }
void *llama_sampler_init_greedy(void) { return adding(0); }
void *llama_sampler_init_temp(float temperature) { return adding((int64_t)(10 * temperature)); }
void *llama_sampler_init_top_k(int32_t k) { return adding(k); }
void *llama_sampler_init_top_p(float p, size_t least) { return adding((int64_t)(100 * p) + (int64_t)least); }
void *llama_sampler_init_dist(uint32_t seed) { return adding(seed); }
int32_t llama_sampler_sample(int64_t *chain, Context *context, int32_t i) {
    int64_t sum = *chain;
    for (int j = 0; j < context->length; j++) sum += context->tokens[j];
    return (int32_t)(sum % 50);
}
void llama_sampler_free(int64_t *chain) { free(chain), open_samplers--; }
