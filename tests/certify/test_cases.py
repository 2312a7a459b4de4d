import math

import pytest
import torch

from polydraft.certify.enumeration import degenerate_cases, random_cases, round_cases


@pytest.mark.parametrize("vocabulary", [2, 3, 4])
def test_all_cases_are_laws(vocabulary: int) -> None:
    for cases in (random_cases(vocabulary, 50, seed=1), degenerate_cases(vocabulary), round_cases(vocabulary, 4)):
        for law_CV in cases:
            assert law_CV.shape[1] == vocabulary and law_CV.min() >= 0
            torch.testing.assert_close(law_CV.sum(-1), torch.ones(len(law_CV), dtype=torch.float64))


def test_round_cases_are_all_of_them() -> None:
    target_CV, draft_CV = round_cases(3, 4)
    laws = math.comb(6, 2)
    assert len(target_CV) == laws**2
    assert len(torch.cat([target_CV, draft_CV], dim=1).unique(dim=0)) == laws**2
    torch.testing.assert_close(target_CV * 4, (target_CV * 4).round())
