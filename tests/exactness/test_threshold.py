"""The threshold of `hybrid` as a part of its name: what it means, and what is refused."""

import re

import pytest
import torch

from polydraft.errors import UsageError
from polydraft.verify import SCHEMES, Hybrid

from .checks import TOLERANCE, enumeration_error, random_cases


def test_a_threshold_can_be_part_of_the_name() -> None:
    kind = SCHEMES.get("hybrid:0.7")
    assert isinstance(kind(), Hybrid) and kind().threshold == 0.7 and SCHEMES.get("hybrid")().threshold == 0.5
    assert SCHEMES.get(kind.name) is kind and kind.name in SCHEMES and kind.name not in list(SCHEMES)
    assert SCHEMES.get("hybrid:inf")().threshold == float("inf")
    draft_RV = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    # q₁ n = 0.8 is enough for 0.7 and not for 0.9.
    assert kind().child_distribution(draft_RV, torch.empty(1, 0, dtype=torch.long), 2)[0].tolist() == [1, 0, 0, 0]
    first_RV = SCHEMES.get("hybrid:0.9")().child_distribution(draft_RV, torch.empty(1, 0, dtype=torch.long), 2)
    assert first_RV[0].tolist() == pytest.approx([0.4, 0.3, 0.2, 0.1])
    assert max(enumeration_error(kind(), *random_cases(4, cases=20, seed=1), 2)) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hybrid:-1", "scheme 'hybrid:-1' has no threshold; allowed: hybrid, or hybrid:X with X from 0 to inf"),
        ("hybrid:", "scheme 'hybrid:' has no threshold"),
        ("hybrid:nan", "has no threshold"),
        ("naive:3", "scheme 'naive' has no setting, but naive:3 is given; use naive"),
        ("hybird:0.7", "unknown scheme 'hybird'; did you mean 'hybrid'?"),
    ],
)
def test_wrong_settings_are_refused(name: str, message: str) -> None:
    assert name not in SCHEMES
    with pytest.raises(UsageError, match=re.escape(message)):
        SCHEMES.get(name)
