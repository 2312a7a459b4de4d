"""Rows of one batch with parameters of their own: each follows its own distribution, bit for bit as if it were alone."""

import numpy as np
import pytest
import torch

from polydraft.certify.reference import greedy_text, next_distributions
from polydraft.draft import TreeDrafter
from polydraft.engine import Decoder
from polydraft.errors import UsageError
from polydraft.sampling import RowParams, SamplingParams, Warper
from polydraft.trees import DynamicShape

from .checks import text_p_values
from .setups import (
    DRAFT,
    EVERY_DRAFTER,
    FREE,
    GRAM_PROMPT,
    HEAD,
    PENALTIES,
    PROMPT,
    RAGGED_PROMPTS,
    TARGET,
    VOCABULARY,
    make_decoder,
    random_head,
    tree_for,
)
from .translated import translated_draft

pytestmark = pytest.mark.usefixtures("short_blocks")


def no_repeats(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A processor that looks at the text: the last token may not come again."""
    return scores.scatter(1, input_ids[:, -1:], -torch.inf)


COMPANY = {
    "plain": SamplingParams(),
    "greedy": SamplingParams(temperature=0),
    "cool, top-k": SamplingParams(temperature=0.7, top_k=5),
    "top-p": SamplingParams(top_p=0.8),
    "warm, min-p": SamplingParams(temperature=1.4, min_p=0.05),
    "penalties": PENALTIES,
    "bias": SamplingParams(logit_bias={3: 2.0, 7: 1.0, PROMPT[0]: -1.5, 9: float("-inf")}),
    "processor": SamplingParams(processors=(no_repeats,)),
    "late end": SamplingParams(min_tokens=7, stop_token_ids=(3, 8, 21)),
    "greedy, penalties": SamplingParams(temperature=0, repetition_penalty=1.4),
}
PARAMS = list(COMPANY.values())


def dynamic(draft) -> Decoder:
    return Decoder(TARGET, TreeDrafter(draft, DynamicShape(nodes=16, depth=4), costs=FREE))


DECODERS = {
    **{
        name: (lambda name=name: make_decoder(drafter=name, scheme="auto", walk="auto", eos_token_ids=[13]))
        for name in EVERY_DRAFTER
    },
    **{
        f"{scheme}, {walk}": (lambda scheme=scheme, walk=walk: make_decoder(scheme=scheme, walk=walk, tree=tree_for(scheme)))
        for scheme, walk in [
            ("rrs-wor", "node"),
            ("race", "block"),
            ("kseq", "node"),
            ("naive", "node"),
        ]
    },
    "adaptive model": lambda: dynamic(DRAFT),
    "adaptive head": lambda: dynamic(HEAD),
    "translated": lambda: make_decoder(draft=translated_draft(), scheme="auto", walk="auto", eos_token_ids=[13]),
    "sharp drafts": lambda: make_decoder(draft_temperature=0.5, scheme="auto", walk="auto"),
    "greedy drafts": lambda: make_decoder(draft_temperature=0.0, scheme="auto", walk="auto"),
}


QUICK = {"model"}
"""Others are tried by `test_admission` in the default suite, where sequences come and go as well."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in DECODERS])
def test_texts_are_those_of_a_row_alone(name: str) -> None:
    decoder = DECODERS[name]()
    prompts = [[*RAGGED_PROMPTS[row % 3], *GRAM_PROMPT[: 3 * row]] for row in range(len(PARAMS))]
    seeds = list(range(40, 40 + len(PARAMS)))
    limits = [12 + row for row in range(len(PARAMS))]
    together = decoder.generate(prompts, sampling=PARAMS, max_new_tokens=limits, seed=seeds)
    for prompt, params, seed, limit, result in zip(prompts, PARAMS, seeds, limits, together, strict=True):
        alone = decoder.generate(prompt, sampling=params, max_new_tokens=limit, seed=[seed])
        assert alone.token_ids == result.token_ids
        assert alone.stop_reason == result.stop_reason
        if params.temperature == 0:
            expected = greedy_text(TARGET, prompt, limit, params)
            assert result.token_ids == expected[: len(result.token_ids)]


SLOW = ("adaptive model", "head", "lookup+model", "rrs-wor, node")
"""Their texts are those of a row alone, above, whose distribution is tested for every drafter."""


@pytest.mark.parametrize("name", ["model", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_every_row_follows_its_own_distribution(name: str) -> None:
    decoder, copies = DECODERS[name](), 250
    decoder = decoder.replace(eos_token_ids=())
    drawn = [params for params in PARAMS if params.temperature > 0 and not params.processors]
    rows = [*drawn, SamplingParams(temperature=0)] * copies
    results = decoder.generate([list(GRAM_PROMPT)] * len(rows), sampling=rows, max_new_tokens=4, seed=len(name))
    lowest = 1.0
    for number, params in enumerate(drawn):
        tokens_NL = np.array([result.token_ids for result in results[number :: len(drawn) + 1]])
        p_values = text_p_values(
            tokens_NL,
            lambda new_NL, params=params: next_distributions(TARGET, list(GRAM_PROMPT), new_NL, params),
            lambda new_NL: next_distributions(DRAFT, list(GRAM_PROMPT), new_NL, SamplingParams()),
        )
        lowest = min(lowest, *p_values)
    # Six kinds of rows, thirteen tests each, five decoders: false alarm below 1e-4 together.
    assert lowest > 1e-4 / (13 * len(drawn) * 5)
    greedy = greedy_text(TARGET, list(GRAM_PROMPT), 4, SamplingParams(temperature=0))
    assert all(result.token_ids == greedy for result in results[len(drawn) :: len(drawn) + 1])
    assert results[0].stats.tokens_per_pass > 1.2


@pytest.mark.parametrize("known", [1, 2, 3])
def test_a_draft_may_know_fewer_tokens_than_a_level_has_children(known: int) -> None:
    likely = TARGET.logits_after(PROMPT).topk(known).indices.sort().values.tolist()
    decoder, rows = dynamic(random_head(tokens=likely)), [SamplingParams(temperature=0), SamplingParams()] * 400
    results = decoder.generate([PROMPT] * len(rows), sampling=rows, max_new_tokens=3, seed=known)
    tokens_NL = np.array([result.token_ids for result in results[1::2]])
    distributions = [lambda new_NL: next_distributions(TARGET, PROMPT, new_NL, SamplingParams())] * 2
    assert min(text_p_values(tokens_NL, *distributions)) > 1e-6
    greedy = greedy_text(TARGET, PROMPT, 3, SamplingParams(temperature=0))
    assert all(result.token_ids == greedy for result in results[::2])
    assert results[0].stats.drafted_tokens > 100


@pytest.mark.parametrize("of_draft", [False, True], ids=["target", "draft"])
def test_distributions_do_not_depend_on_company(of_draft: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    vocabulary = HEAD.vocabulary if of_draft else None
    width = VOCABULARY if vocabulary is None else len(vocabulary.tokens_D)
    logits_BGV = 3 * torch.randn(len(PARAMS), 4, width, generator=generator)
    logits_BGV[:, 1, 5:9] = logits_BGV[:, 1, 5:6]  # equals, at the edges of truncation too
    paths_BGP = torch.randint(-1, VOCABULARY, (len(PARAMS), 4, 3), generator=generator)
    prompts = [[row + 1, 2, 3, row + 1] for row in range(len(PARAMS))]
    device = torch.device("cpu")
    together = Warper(PARAMS, VOCABULARY, prompts, device, of_draft, vocabulary)
    emitted = [[4, 4, row] for row in range(len(PARAMS))]
    together.advance(emitted)
    probs_BGV, best_BG = together.probs(logits_BGV, paths_BGP), together.likeliest(logits_BGV, paths_BGP, 0)
    for row, params in enumerate(PARAMS):
        rows = slice(row, row + 1)
        alone = Warper(params, VOCABULARY, prompts[rows], device, of_draft, vocabulary)
        alone.advance(emitted[rows])
        assert alone.likeliest(logits_BGV[rows], paths_BGP[rows], 0).equal(best_BG[rows])
        if params.temperature > 0:
            assert alone.probs(logits_BGV[rows], paths_BGP[rows]).equal(probs_BGV[rows])


def test_penalties_in_a_partial_vocabulary_are_those_of_the_whole_one() -> None:
    generator = torch.Generator().manual_seed(6)
    vocabulary, device = HEAD.vocabulary, torch.device("cpu")
    logits_BGD = torch.randn(1, 3, len(vocabulary.tokens_D), generator=generator)
    full_BGV = vocabulary.spread(logits_BGD, fill=-torch.inf)
    paths_BGP = torch.randint(-1, VOCABULARY, (1, 3, 4), generator=generator)
    for params in PARAMS:
        short = Warper(params, VOCABULARY, [[1, 2, 3]], device, of_draft=True, vocabulary=vocabulary)
        whole = Warper(params, VOCABULARY, [[1, 2, 3]], device, of_draft=True)
        for warper in (short, whole):
            warper.advance([[5, 6, 6]])
        expected_BGV = whole.probs(full_BGV, paths_BGP)
        assert torch.allclose(vocabulary.spread(short.probs(logits_BGD, paths_BGP)), expected_BGV, atol=1e-6)


def test_captured_rounds_are_told_apart_by_what_they_compute() -> None:
    # Numbers are read from tensors; whatever is left out of a round or added to it must make another capture.
    def kind(*params: SamplingParams) -> object:
        return Warper(params, VOCABULARY, [[1, 2]] * len(params), torch.device("cpu")).kind

    plain, greedy = SamplingParams(), SamplingParams(temperature=0)
    assert kind(SamplingParams(temperature=0.6)) == kind(SamplingParams(temperature=0.7))
    assert kind(SamplingParams(logit_bias={3: 1.0})) != kind(SamplingParams(logit_bias={3: float("-inf")}))
    different = [(plain, plain), (greedy, greedy), (plain, greedy), *((params, plain) for params in PARAMS[2:])]
    kinds = [kind(*pair) for pair in different]
    assert len(set(kinds)) == len(kinds)


def test_equal_rows_are_one_kind_and_mixed_ones_are_not() -> None:
    assert not RowParams.of(SamplingParams(), 3).mixed and not RowParams.of(SamplingParams(temperature=0), 3).mixed
    assert RowParams.of([SamplingParams(), SamplingParams(temperature=0)], 2).mixed
    assert RowParams.of(SamplingParams(temperature=0), 2).all_greedy


@pytest.mark.parametrize(("options", "message"), [
    ({"sampling": [SamplingParams()]}, "1 sampling parameters for 2 prompts; give one for all, or one for each prompt"),
    ({"max_new_tokens": [3, 4, 5]}, "3 values of max_new_tokens for 2 prompts"),
    ({"max_new_tokens": [3, 0]}, "max_new_tokens=[3, 0] is out of range"),
    ({"sampling": [SamplingParams(), None]}, "of type NoneType; allowed: SamplingParams"),
    ({"sampling": [SamplingParams(), SamplingParams(top_k=99)]}, "top_k=99 is larger than the vocabulary"),
])  # fmt: skip
def test_wrong_numbers_of_values_are_refused(options: dict, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        make_decoder().generate([[1, 2], [3, 4]], **options)
    assert message in str(caught.value)
