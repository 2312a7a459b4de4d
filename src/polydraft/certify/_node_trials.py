"""Checks of a rule at one node, by enumeration and by samples as in production, and searches for small counter-examples.

The smallest counter-example has the fewest tokens, then the fewest drafts, then the roundest numbers.
"""

import math
from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

from polydraft.certify._certificate import CounterExample, Trial
from polydraft.certify._subject import OwnRule, RuleError, Sizes, Subject
from polydraft.certify.chi_square import token_p_value, tuple_p_value
from polydraft.certify.enumeration import (
    FIXTURE_DRAFT_V,
    FIXTURE_TARGET_V,
    TOLERANCE,
    Enumeration,
    degenerate_cases,
    drawings,
    enumerate_rule,
    largest_count,
    random_cases,
    round_cases,
    sample_node,
)
from polydraft.sampling import NO_TOKEN
from polydraft.verify import Scheme

_EXTREMES = (0.0, 0.5, 1 - 2.0**-53)
"""Random numbers that expose rounding; the last is the largest that a generator returns."""
_BLACK_BOX_CASES = 8
_PARTS = {2: (1, 2, 4, 5, 10, 20), 3: (1, 2, 4, 5), 4: (1, 2, 4)}
"""By vocabulary, each n for which to try all probabilities in steps of 1/n: coarse first, as long as pairs are not too many."""
_SAMPLED_PAIRS = 12
_SAMPLED = 4_000
_SURE = 1e-8
"""Largest p-value of a sampled counter-example; at most a thousand cases are tried."""


def cases_of(vocabulary: int, count: int, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Return random and awkward distributions, and the fixture's if it has this vocabulary."""
    pairs = [random_cases(vocabulary, sizes.cases, seed=10 * vocabulary + count), degenerate_cases(vocabulary)]
    if vocabulary == len(FIXTURE_TARGET_V):
        pairs.append((FIXTURE_TARGET_V[None], FIXTURE_DRAFT_V[None]))
    target_CV, draft_CV = (torch.cat(side) for side in zip(*pairs, strict=True))
    return target_CV, draft_CV


def counts_of(subject: Subject, sizes: Sizes) -> list[int]:
    """Return the numbers of drafts to try a rule with."""
    return sorted({largest_count(subject.scheme, count) for count in sizes.counts})


def enumeration_trial(subject: Subject, sizes: Sizes) -> Trial:
    """Check that the emitted distribution, summed over all drawings, is the target's, for float64 and float32 probabilities."""
    worst, pairs, size, example = 0.0, 0, 0, None
    for vocabulary in sizes.vocabularies:
        for count in counts_of(subject, sizes):
            target_CV, draft_CV = cases_of(vocabulary, count, sizes)
            pairs += len(target_CV)
            for dtype, missing in ((torch.float64, 0), (torch.float32, 0), (torch.float64, 2)):
                if missing and isinstance(subject.scheme, OwnRule):
                    continue  # a user's function never sees missing children
                distributions = target_CV.to(dtype), draft_CV.to(dtype)
                enumeration = enumerate_rule(subject.scheme, *distributions, count, missing)
                size += len(enumeration.case_R)
                error = max(enumeration.error_C.max().item(), enumeration.improper_R.max().item())
                if error > worst:
                    worst, example = error, describe(enumeration, distributions[1], count)
    leaf, unverified = _leaf_error(subject, sizes)
    worst, example = max(worst, leaf), example if worst > TOLERANCE else unverified
    tokens, drafts = f"{sizes.vocabularies[0]} to {sizes.vocabularies[-1]} tokens", f"{max(counts_of(subject, sizes))} drafts"
    return Trial(
        name="enumeration",
        size=size,
        unit="drawings",
        measure="largest error",
        worst=worst,
        allowed=TOLERANCE,
        note=f"from {pairs:,} pairs of distributions, {tokens}, up to {drafts}",
        counter_example=example if worst > TOLERANCE else None,
    )


def _leaf_error(subject: Subject, sizes: Sizes) -> tuple[float, CounterExample | None]:
    """Return how far a rule's distribution without children is from the target's, whatever the draft's is."""
    if isinstance(subject.scheme, OwnRule):
        return 0.0, None
    target_CV, draft_CV = random_cases(5, sizes.cases, seed=6)
    draft_CV[::3] = 0
    distribution_CV = subject.scheme.distribution(target_CV, draft_CV, torch.full((len(target_CV), 2), NO_TOKEN))
    error_C = (distribution_CV - target_CV).abs().amax(-1).nan_to_num(nan=math.inf)
    case = int(error_C.argmax())
    return error_C.max().item(), CounterExample(
        reason="without children the distribution is not the target's",
        target_probs=target_CV[case].tolist(),
        draft_probs=draft_CV[case].tolist(),
        drafts=0,
        distribution=distribution_CV[case].tolist(),
        expected=target_CV[case].tolist(),
    )


def fixture_trials(subject: Subject, sizes: Sizes) -> list[Trial]:
    """Sample fixture F as in production, and test children against the draft, tokens against the target, and both together."""
    scheme, samples = subject.scheme, sizes.node_samples
    draws, tokens, joint = [], [], []
    for count in counts_of(subject, sizes):
        children_RK, token_R = sample_node(scheme, FIXTURE_TARGET_V, FIXTURE_DRAFT_V, count, seed=100 + count, samples=samples)
        _, children_SK, chance_S = drawings(scheme, FIXTURE_DRAFT_V[None], count)
        table = dict(zip(map(tuple, children_SK.tolist()), chance_S.tolist(), strict=True))
        draws.append(tuple_p_value(children_RK, table))
        tokens.append(token_p_value(token_R, FIXTURE_TARGET_V))
        if subject.has_distribution and count <= 2:
            target_SV, draft_SV = (
                distribution_V.expand(len(chance_S), -1) for distribution_V in (FIXTURE_TARGET_V, FIXTURE_DRAFT_V)
            )
            distribution_SV = scheme.distribution(target_SV, draft_SV, children_SK)
            cells = {
                (*children, token): chance * distribution
                for (children, chance), distribution_V in zip(table.items(), distribution_SV.tolist(), strict=True)
                for token, distribution in enumerate(distribution_V)
            }
            joint.append(tuple_p_value(torch.cat([children_RK, token_R[:, None]], dim=1), cells))
    trials = [
        Trial(name="draws", size=samples * len(draws), unit="sets of children", p_values=draws, note="of fixture F"),
        Trial(
            name="fixture",
            size=samples * len(tokens),
            unit="tokens",
            p_values=tokens,
            tested=(samples, len(FIXTURE_TARGET_V) - 1),
            note="of fixture F",
        ),
        Trial(name="joint", size=samples * len(joint), unit="tokens", p_values=joint, note="of fixture F with their children"),
    ]
    return [trial for trial in trials if trial.p_values]


def black_box_trial(subject: Subject, sizes: Sizes) -> Trial:
    """Sample more pairs of distributions, for a rule that does not state its distribution."""
    samples = sizes.node_samples // 4
    target_CV, draft_CV = random_cases(4, _BLACK_BOX_CASES, seed=17)
    p_values = []
    for case in range(_BLACK_BOX_CASES):
        for count in counts_of(subject, sizes):
            _, token_R = sample_node(subject.scheme, target_CV[case], draft_CV[case], count, seed=200 + case, samples=samples)
            p_values.append(token_p_value(token_R, target_CV[case]))
    size = samples * len(p_values)
    return Trial(
        name="cases", size=size, unit="tokens", p_values=p_values, note=f"of {_BLACK_BOX_CASES} random pairs of distributions"
    )


def support_trial(subject: Subject, sizes: Sizes) -> Trial:
    """Verify with extreme random numbers: tokens without target mass must never come out, nor arguments be changed in place."""
    cases = 4 * sizes.cases
    target_CV, draft_CV = (distribution_CV.float() for distribution_CV in random_cases(6, cases, seed=9))
    generator = torch.Generator().manual_seed(9)
    uniforms_CK = torch.rand(cases, max(counts_of(subject, sizes)), generator=generator, dtype=torch.float64)
    before = target_CV.clone(), draft_CV.clone()
    children_CK = subject.scheme.draw(draft_CV, uniforms_CK)
    wrong, example = 0, None
    for extreme in _EXTREMES:
        uniforms_CU = torch.full((cases, subject.scheme.verify_uniforms), extreme, dtype=torch.float64)
        token_C = subject.scheme.verify(target_CV, draft_CV, children_CK, uniforms_CU)
        impossible_C = (token_C < 0) | (target_CV.gather(1, token_C.clamp(min=0)[:, None])[:, 0] == 0)
        wrong += int(impossible_C.sum())
        if impossible_C.any() and example is None:
            case = int(impossible_C.nonzero()[0])
            example = CounterExample(
                reason=f"token {int(token_C[case])} was emitted, which has no target mass",
                target_probs=target_CV[case].tolist(),
                draft_probs=draft_CV[case].tolist(),
                drafts=children_CK.shape[1],
                drawings=[{"children": children_CK[case].tolist()}],
                details={"random numbers": extreme},
            )
    if not (torch.equal(target_CV, before[0]) and torch.equal(draft_CV, before[1])):
        wrong, example = wrong + 1, CounterExample(reason="a distribution was changed in place")
    return Trial(
        name="support",
        size=len(_EXTREMES) * cases,
        unit="verifications",
        measure="impossible tokens",
        worst=float(wrong),
        allowed=0.0,
        note="with the smallest, middle and largest random number",
        counter_example=example,
    )


def smallest_enumerated(scheme: Scheme) -> CounterExample | None:
    """Search distributions with round numbers for the smallest on which a rule's distribution is wrong."""
    return _smallest(
        scheme, lambda target_CV, draft_CV, count: describe(enumerate_rule(scheme, target_CV, draft_CV, count), draft_CV, count)
    )


def smallest_sampled(scheme: Scheme) -> CounterExample | None:
    """Search distributions with round numbers for the smallest on which a rule's sampled tokens are wrong."""

    def wrong(target_CV: Tensor, draft_CV: Tensor, count: int) -> CounterExample | None:
        chosen_C = torch.linspace(0, len(target_CV) - 1, min(_SAMPLED_PAIRS, len(target_CV))).round().long()
        found = (_sampled(scheme, target_CV[case], draft_CV[case], count) for case in chosen_C.tolist())
        return next(filter(None, found), None)

    return _smallest(scheme, wrong)


def _smallest(scheme: Scheme, wrong: Callable[[Tensor, Tensor, int], CounterExample | None]) -> CounterExample | None:
    """Return what is wrong with the smallest distributions for which there is something, a failing function included."""
    for vocabulary, all_parts in _PARTS.items():
        for count, parts in product(range(1, largest_count(scheme, 3) + 1), all_parts):
            try:
                if found := wrong(*round_cases(vocabulary, parts), count):
                    return found
            except RuleError as error:
                return of_error(error)
    return None


def rounded(scheme: Scheme, example: CounterExample) -> CounterExample:
    """Round a counter-example to as few digits as possible; return it unchanged if the rule is right for all roundings."""
    if not example.target_probs or not example.drafts:
        return example
    distributions = torch.tensor([example.target_probs, example.draft_probs], dtype=torch.float64)
    for digits in range(1, 7):
        rounded_2V = distributions.round(decimals=digits)
        rounded_2V.scatter_add_(1, distributions.argmax(-1, keepdim=True), 1 - rounded_2V.sum(-1, keepdim=True))
        target_1V, draft_1V = rounded_2V.split_with_sizes([1, 1])
        if rounded_2V.min() >= 0:
            found = describe(enumerate_rule(scheme, target_1V, draft_1V, example.drafts), draft_1V, example.drafts)
            if found is not None:
                return found
    return example


def _sampled(scheme: Scheme, target_V: Tensor, draft_V: Tensor, count: int) -> CounterExample | None:
    children_RK, token_R = sample_node(scheme, target_V, draft_V, count, seed=1, samples=_SAMPLED)
    if token_p_value(token_R, target_V) > _SURE:
        return None
    counts_X = torch.bincount(token_R.clamp(min=0), minlength=len(target_V))
    return CounterExample(
        reason=f"{_SAMPLED} sampled tokens do not follow the target's distribution",
        target_probs=target_V.tolist(),
        draft_probs=draft_V.tolist(),
        drafts=count,
        distribution=(counts_X / _SAMPLED).tolist(),
        expected=target_V.tolist(),
        details={"samples": _SAMPLED, "children drawn first": children_RK[0].tolist()},
    )


def describe(enumeration: Enumeration, draft_CV: Tensor, count: int) -> CounterExample | None:
    """Return the worst case of an enumeration as a counter-example; None if all are right."""
    improper_R, error_C = enumeration.improper_R, enumeration.error_C
    if improper_R.max() >= TOLERANCE:
        case = int(enumeration.case_R[improper_R.argmax()])
        reason = _what_is_improper(enumeration.distribution_RV[improper_R.argmax()])
    elif error_C.max() >= TOLERANCE:
        case = int(error_C.argmax())
        reason = "the emitted token does not follow the target's distribution"
    else:
        return None
    rows = (enumeration.case_R == case).nonzero()[:, 0].tolist()
    return CounterExample(
        reason=reason,
        target_probs=enumeration.target_CV[case].tolist(),
        draft_probs=draft_CV[case].tolist(),
        drafts=count,
        distribution=enumeration.emitted_CV[case].tolist(),
        expected=enumeration.target_CV[case].tolist(),
        drawings=[
            {
                "children": enumeration.children_RK[row].tolist(),
                "chance": enumeration.chance_R[row].item(),
                "distribution": enumeration.distribution_RV[row].tolist(),
            }
            for row in rows
        ],
    )


def _what_is_improper(distribution_V: Tensor) -> str:
    if not distribution_V.isfinite().all():
        return "the distribution given some children is not a number"
    if distribution_V.min() < -TOLERANCE:
        return f"the distribution given some children is negative ({distribution_V.min().item():.3g})"
    return f"the distribution given some children does not sum to one ({distribution_V.sum().item():.6g})"


def of_error(error: RuleError) -> CounterExample:
    """Return a counter-example with the arguments for which a user's function failed."""
    return CounterExample(
        reason=str(error),
        target_probs=error.target_probs.tolist(),
        draft_probs=error.draft_probs.tolist(),
        drafts=len(error.children),
        drawings=[{"children": error.children}],
    )
