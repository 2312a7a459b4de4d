"""The smallest counter-example: fewest tokens, then fewest drafts, then roundest numbers that still go wrong."""

from collections.abc import Iterator

import torch
from torch import Tensor

from polydraft.certify.cases import round_cases
from polydraft.certify.check import CounterExample
from polydraft.certify.enumeration import TOLERANCE, Enumeration, enumerate_rule, largest_count
from polydraft.certify.node import sample_node, token_p_value
from polydraft.certify.own_rule import RuleError
from polydraft.schemes import Scheme

_PARTS = {2: (1, 2, 4, 5, 10, 20), 3: (1, 2, 4, 5), 4: (1, 2, 4)}
"""For each vocabulary, of which fraction probabilities are multiples: coarse first, as far as there are not too many pairs."""
_SAMPLED_PAIRS = 12
_SAMPLED = 4_000
_SURE = 1e-8
"""Of a sampled counter-example; a thousand are tried at most."""


def _small_first(scheme: Scheme) -> Iterator[tuple[int, int]]:
    """Yield vocabularies and numbers of drafts, small ones first."""
    for vocabulary in _PARTS:
        for count in range(1, largest_count(scheme, 3) + 1):
            yield vocabulary, count


def smallest_enumerated(scheme: Scheme) -> CounterExample | None:
    """Search round laws for one on which a rule's law is wrong; None if none is."""
    for vocabulary, count in _small_first(scheme):
        for parts in _PARTS[vocabulary]:
            try:
                target_CV, draft_CV = round_cases(vocabulary, parts)
                found = describe(enumerate_rule(scheme, target_CV, draft_CV, count), draft_CV, count)
            except RuleError as error:
                return of_error(error)
            if found is not None:
                return found
    return None


def rounded(scheme: Scheme, example: CounterExample) -> CounterExample:
    """Return a counter-example with as few digits as still go wrong; as it is where none do."""
    if not example.target_probs or not example.drafts:
        return example
    laws = torch.tensor([example.target_probs, example.draft_probs], dtype=torch.float64)
    for digits in range(1, 7):
        rounded_2V = laws.round(decimals=digits)
        rounded_2V.scatter_add_(1, laws.argmax(-1, keepdim=True), 1 - rounded_2V.sum(-1, keepdim=True))
        target_1V, draft_1V = rounded_2V.split_with_sizes([1, 1])
        if rounded_2V.min() >= 0:
            found = describe(enumerate_rule(scheme, target_1V, draft_1V, example.drafts), draft_1V, example.drafts)
            if found is not None:
                return found
    return example


def describe(enumeration: Enumeration, draft_CV: Tensor, count: int) -> CounterExample | None:
    """Return the worst case of an enumeration as a counter-example; None if all is well."""
    improper_R, error_C = enumeration.improper_R, enumeration.error_C
    if improper_R.max() >= TOLERANCE:
        case = int(enumeration.case_R[improper_R.argmax()])
        reason = _what_is_improper(enumeration.law_RV[improper_R.argmax()])
    elif error_C.max() >= TOLERANCE:
        case = int(error_C.argmax())
        reason = "the emitted token does not follow the target's law"
    else:
        return None
    rows = (enumeration.case_R == case).nonzero()[:, 0].tolist()
    return CounterExample(
        reason=reason,
        target_probs=enumeration.target_CV[case].tolist(),
        draft_probs=draft_CV[case].tolist(),
        drafts=count,
        law=enumeration.emitted_CV[case].tolist(),
        expected=enumeration.target_CV[case].tolist(),
        drawings=[
            {
                "children": enumeration.children_RK[row].tolist(),
                "chance": enumeration.chance_R[row].item(),
                "law": enumeration.law_RV[row].tolist(),
            }
            for row in rows
        ],
    )


def _what_is_improper(law_V: Tensor) -> str:
    if not law_V.isfinite().all():
        return "the law given some children is not a number"
    if law_V.min() < -TOLERANCE:
        return f"the law given some children is negative ({law_V.min().item():.3g})"
    return f"the law given some children does not sum to one ({law_V.sum().item():.6g})"


def of_error(error: RuleError) -> CounterExample:
    """Return the arguments on which a function failed."""
    return CounterExample(
        reason=str(error),
        target_probs=error.target_probs.tolist(),
        draft_probs=error.draft_probs.tolist(),
        drafts=len(error.children),
        drawings=[{"children": error.children}],
    )


def smallest_sampled(scheme: Scheme) -> CounterExample | None:
    """Search round laws for one on which a rule's tokens are wrong, by samples; None if none shows."""
    for vocabulary, count in _small_first(scheme):
        for parts in _PARTS[vocabulary]:
            target_CV, draft_CV = round_cases(vocabulary, parts)
            chosen_C = torch.linspace(0, len(target_CV) - 1, min(_SAMPLED_PAIRS, len(target_CV))).round().long()
            for case in chosen_C.tolist():
                found = _sampled(scheme, target_CV[case], draft_CV[case], count)
                if found is not None:
                    return found
    return None


def _sampled(scheme: Scheme, target_V: Tensor, draft_V: Tensor, count: int) -> CounterExample | None:
    try:
        children_RK, token_R = sample_node(scheme, target_V, draft_V, count, seed=1, samples=_SAMPLED)
    except RuleError as error:
        return of_error(error)
    if token_p_value(token_R, target_V) > _SURE:
        return None
    counts_X = torch.bincount(token_R.clamp(min=0), minlength=len(target_V))
    return CounterExample(
        reason=f"of {_SAMPLED} sampled tokens, too many are not as the target's law says",
        target_probs=target_V.tolist(),
        draft_probs=draft_V.tolist(),
        drafts=count,
        law=(counts_X / _SAMPLED).tolist(),
        expected=target_V.tolist(),
        details={"samples": _SAMPLED, "children drawn first": children_RK[0].tolist()},
    )
