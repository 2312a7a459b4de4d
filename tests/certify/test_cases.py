import math

import pytest
import torch

from polydraft.certify.enumeration import degenerate_cases, random_cases, round_cases


@pytest.mark.parametrize("vocabulary", [2, 3, 4])
def test_all_cases_are_distributions(vocabulary: int) -> None:
    for cases in (random_cases(vocabulary, 50, seed=1), degenerate_cases(vocabulary), round_cases(vocabulary, 4)):
        for distribution_CV in cases:
            assert distribution_CV.shape[1] == vocabulary and distribution_CV.min() >= 0
            torch.testing.assert_close(distribution_CV.sum(-1), torch.ones(len(distribution_CV), dtype=torch.float64))


def test_round_cases_are_all_of_them() -> None:
    target_CV, draft_CV = round_cases(3, 4)
    distributions = math.comb(6, 2)
    assert len(target_CV) == distributions**2
    assert len(torch.cat([target_CV, draft_CV], dim=1).unique(dim=0)) == distributions**2
    torch.testing.assert_close(target_CV * 4, (target_CV * 4).round())
