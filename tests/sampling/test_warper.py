"""The warper computes what Hugging Face's own processors compute, at every node of a tree."""

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from polydraft.errors import UsageError
from polydraft.sampling import NO_TOKEN, RowParams, SamplingParams, Warper, truncation

VOCABULARY = 60
CPU = torch.device("cpu")
PROMPTS = [[3, 7, 7, 11, 50, 2], [1, 4, 9, 9, 9, 30]]
EMITTED = [[7, 12, 5], [4, 31, 31]]


def random_logits(*shape, seed=0, scale=3.0):
    return scale * torch.randn(*shape, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def hf_processors(params):
    """The list that `generate` would build, in its order."""
    processors = LogitsProcessorList()
    if params.logit_bias:
        processors.append(SequenceBiasLogitsProcessor({(token,): float(bias) for token, bias in params.logit_bias.items()}))
    if params.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    processors.extend(params.processors)
    if params.temperature != 1:
        processors.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        processors.append(MinPLogitsWarper(params.min_p))
    return processors


def hf_probs(params, texts, logits_RV):
    return torch.softmax(hf_processors(params)(torch.tensor(texts), logits_RV.clone()), dim=-1)


CASES = {
    "plain": {},
    "hot": {"temperature": 1.7},
    "cold": {"temperature": 0.4},
    "top-k": {"top_k": 5},
    "top-k larger than the vocabulary": {"top_k": 1000},
    "top-p": {"top_p": 0.8},
    "tiny top-p": {"top_p": 0.01},
    "min-p": {"min_p": 0.1},
    "repetition": {"repetition_penalty": 1.4},
    "repetition wanted": {"repetition_penalty": 0.7},
    "bias": {"logit_bias": {3: 2.0, 7: -1.5, 59: 4.0}},
    "n-grams": {"processors": (NoRepeatNGramLogitsProcessor(2),)},
    "all": {
        "temperature": 0.8,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
        "logit_bias": {3: 2.0, 7: -1.5},
        "processors": (NoRepeatNGramLogitsProcessor(2),),
    },
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_probs_equal_those_of_generate(options):
    params = SamplingParams(**options)
    warp = Warper(params, VOCABULARY, PROMPTS, CPU)
    warp.advance(EMITTED)
    texts = [prompt + emitted for prompt, emitted in zip(PROMPTS, EMITTED, strict=True)]
    for seed in range(5):
        logits_BV = random_logits(2, seed=seed)
        got = warp.probs(logits_BV[:, None], torch.empty(2, 1, 0, dtype=torch.long))[:, 0]
        expected = hf_probs(params, texts, logits_BV)
        assert torch.equal(got > 0, expected > 0), "the same tokens survive"
        assert torch.allclose(got, expected, atol=1e-6)


HISTORY_CASES = {
    "repetition": {"repetition_penalty": 1.4},
    "presence": {"presence_penalty": 0.7},
    "frequency": {"frequency_penalty": 0.3},
    "n-grams": {"processors": (NoRepeatNGramLogitsProcessor(2),)},
    "together": {
        "temperature": 0.6,
        "top_p": 0.9,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.2,
        "processors": (NoRepeatNGramLogitsProcessor(3),),
    },
}


@pytest.mark.parametrize("options", HISTORY_CASES.values(), ids=HISTORY_CASES)
def test_a_node_sees_its_own_ancestors(options):
    """A path below the certain text has the effect of the same tokens in the certain text, and of no others."""
    params = SamplingParams(**options)
    paths = [[[], [8], [8, 7], [20, 20]], [[], [9], [31, 9], [0, 0]]]
    padded = torch.tensor([[path + [NO_TOKEN] * (2 - len(path)) for path in row] for row in paths])
    warp = Warper(params, VOCABULARY, PROMPTS, CPU)
    warp.advance(EMITTED)
    logits_BGV = random_logits(2, 4)
    got = warp.probs(logits_BGV, padded)
    for row in range(2):
        for node, path in enumerate(paths[row]):
            certain = Warper(params, VOCABULARY, PROMPTS[row : row + 1], CPU)
            certain.advance([EMITTED[row] + path])
            expected = certain.probs(logits_BGV[row, node][None, None], torch.empty(1, 1, 0, dtype=torch.long))
            assert torch.allclose(got[row, node], expected[0, 0], atol=1e-7), (row, node)
    assert torch.equal(got, warp.probs(logits_BGV, padded)), "looking at paths leaves no trace"


def test_presence_and_frequency_count_the_output_only():
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    warp = Warper(params, VOCABULARY, [[3, 3, 7]], CPU)
    warp.advance([[7, 9, 9]])
    logits = random_logits(1, 1)
    expected = logits[0, 0].clone()
    expected[7] -= 0.5 + 0.25
    expected[9] -= 0.5 + 0.25 * 3
    expected[20] -= 0.5 + 0.25
    got = warp.probs(logits, torch.tensor([[[9, 20]]]))[0, 0]
    assert torch.allclose(got, torch.softmax(expected, -1), atol=1e-7)


def test_one_step_of_advance_equals_many():
    params = SamplingParams(repetition_penalty=1.5, frequency_penalty=0.4, processors=(NoRepeatNGramLogitsProcessor(2),))
    at_once, stepwise = Warper(params, VOCABULARY, PROMPTS, CPU), Warper(params, VOCABULARY, PROMPTS, CPU)
    at_once.advance(EMITTED)
    for step in range(3):
        stepwise.advance([[EMITTED[0][step]], []])
        stepwise.advance([[], [EMITTED[1][step]]])
    logits, none = random_logits(2, 1), torch.empty(2, 1, 0, dtype=torch.long)
    assert torch.equal(at_once.probs(logits, none), stepwise.probs(logits, none))


class GraphCache(LogitsProcessor):
    """Forbids the token after the last one, and writes down what it was shown."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids.tolist())
        scores[:, (input_ids[:, -1] + 1) % VOCABULARY] = -torch.inf  # in place, as careless processors do
        return scores


def test_any_processor_is_called_once_a_node_with_the_nodes_text():
    graphs = GraphCache()
    warp = Warper(SamplingParams(processors=(graphs,)), VOCABULARY, [[5, 6]], CPU)
    warp.advance([[9]])
    logits = random_logits(1, 3)
    before = logits.clone()
    probs = warp.probs(logits, torch.tensor([[[NO_TOKEN, NO_TOKEN], [40, NO_TOKEN], [40, 17]]]))
    assert graphs.seen == [[[5, 6, 9]], [[5, 6, 9, 40]], [[5, 6, 9, 40, 17]]]
    assert [(row == 0).nonzero()[:, 0].tolist() for row in probs[0]] == [[10], [41], [18]]
    assert torch.equal(logits, before)


@pytest.mark.parametrize("options", [*CASES.values(), {"temperature": 0}, {"presence_penalty": 0.5}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logits_and_paths_are_never_modified(options, dtype):
    warp = Warper(SamplingParams(**options), VOCABULARY, PROMPTS, CPU)
    logits, paths = random_logits(2, 3).to(dtype), torch.randint(VOCABULARY, (2, 3, 2))
    logits_before, paths_before = logits.clone(), paths.clone()
    probs = warp.probs(logits, paths)
    probs.zero_()  # nor do they share memory with the result
    assert torch.equal(logits, logits_before) and torch.equal(paths, paths_before)


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_greedy_is_one_hot_on_the_best_penalised_logit(options):
    params = SamplingParams(**{**options, "temperature": 0})
    warp = Warper(params, VOCABULARY, PROMPTS, CPU)
    logits_BV = random_logits(2)
    got = warp.probs(logits_BV[:, None], torch.empty(2, 1, 0, dtype=torch.long))[:, 0]
    kept = SamplingParams(**{key: options[key] for key in ("repetition_penalty", "logit_bias", "processors") if key in options})
    expected = hf_probs(kept, PROMPTS, logits_BV).argmax(-1)
    assert torch.equal(got, torch.nn.functional.one_hot(expected, VOCABULARY).float())


BROKEN = {
    "nan": lambda logits: logits.index_fill_(-1, torch.tensor([4]), torch.nan),
    "all -inf": lambda logits: logits.fill_(-torch.inf),
    "inf": lambda logits: logits.index_fill_(-1, torch.tensor([4]), torch.inf),
    "all nan": lambda logits: logits.fill_(torch.nan),
}


@pytest.mark.parametrize("breakage", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0}, {"temperature": 0.5}, {"top_k": 1}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}],
    ids=str,
)
@pytest.mark.parametrize("candidates", [3, 2048])
def test_broken_logits_give_rows_that_say_so(monkeypatch, options, breakage, candidates):
    """The walk looks at entry 0 alone, so all of a broken row must be NaN, and its neighbour stay sound."""
    monkeypatch.setattr(truncation, "_TOP_P_CANDIDATES", candidates)
    warp = Warper(SamplingParams(**options), VOCABULARY, PROMPTS, CPU)
    logits = random_logits(2, 1)
    breakage(logits[0])
    probs = warp.probs(logits, torch.empty(2, 1, 0, dtype=torch.long))
    assert probs[0].isnan().all()
    assert probs[1].isfinite().all() and abs(probs[1].sum() - 1) < 1e-6


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("scale", [0.1, 2.0, 8.0])
def test_the_nucleus_among_candidates_equals_a_full_sort(monkeypatch, top_p, scale):
    probs = torch.softmax(random_logits(2, 3, scale=scale), -1)
    full = truncation._nucleus(probs, top_p)
    for candidates in (1, 4, 16):
        monkeypatch.setattr(truncation, "_TOP_P_CANDIDATES", candidates)
        assert torch.equal(truncation._nucleus(probs, top_p), full)
    for distribution, kept in zip(probs.flatten(0, 1), full.flatten(0, 1), strict=True):
        mass = distribution[kept].double().sum()
        assert mass >= top_p - 1e-6 and mass - distribution[kept].min() < top_p + 1e-6, "the smallest set that reaches it"


def test_bias_outside_the_vocabulary_is_refused():
    with pytest.raises(UsageError, match=r"token 60; allowed: 0 to 59"):
        Warper(SamplingParams(logit_bias={60: 1.0}), VOCABULARY, PROMPTS, CPU)


def test_half_precision_logits_give_float32_distributions():
    warp = Warper(SamplingParams(), VOCABULARY, PROMPTS, CPU)
    assert warp.probs(random_logits(2, 1).half(), torch.empty(2, 1, 0, dtype=torch.long)).dtype == torch.float32


def test_rows_that_sleep_and_trade_places_keep_their_texts_and_get_their_parameters():
    first = SamplingParams(temperature=0.5, repetition_penalty=1.5, logit_bias={3: 2.0})
    second = SamplingParams(temperature=2.0, top_k=5, presence_penalty=0.7, frequency_penalty=0.3)
    logits_BGV, none = random_logits(2, 1), torch.empty(2, 1, 0, dtype=torch.long)

    def same(warp, params, texts):
        rows = len(params)
        alone = Warper(params, VOCABULARY, [PROMPTS[text] for text in texts], CPU)
        alone.advance([EMITTED[text] for text in texts])
        return torch.equal(warp.probs(logits_BGV[:rows], none[:rows]), alone.probs(logits_BGV[:rows], none[:rows]))

    warp = Warper([first, second], VOCABULARY, PROMPTS, CPU)
    warp.advance(EMITTED)
    warp.resize(1, 2)
    warp.use(RowParams((first,)))
    assert same(warp, [first], [0])
    warp.swap_rows(0, 1)
    warp.use(RowParams((first,)))  # as the row at work had before it was swapped
    assert same(warp, [first], [1])
    warp.use(RowParams((second,)))
    assert same(warp, [second], [1])
    warp.resize(2, 2)
    warp.use(RowParams((second, first)))
    assert same(warp, [second, first], [1, 0])
