"""Walks over whole paths as they run, random numbers and all: distributions of texts and lengths of accepted paths."""

import math

import pytest

from covering import chosen, some_slow
from exactness.checks import FALSE_ALARM, largest_count, tuple_p_value
from polydraft.verify import SCHEMES, BlockWalk, Speculative, Walk

from .cases import batch_of
from .enumeration import enumerate_walk
from .sampling import sample_walk

ROWS = 20_000
PAIRS = [(scheme, walk) for walk in (BlockWalk,) for scheme in SCHEMES if walk.fits(SCHEMES.get(scheme))]
QUICK = chosen(PAIRS)


# By default each scheme by one walk.
@pytest.mark.parametrize(
    ("name", "kind"),
    some_slow(PAIRS, [pair for pair in PAIRS if pair not in QUICK]),
    ids=lambda value: getattr(value, "name", value),
)
def test_texts_follow_the_target_distribution(name: str, kind: type[Walk]) -> None:
    scheme, walk = SCHEMES.get(name)(), kind()
    batch = batch_of("x".join([str(largest_count(scheme, 2))] * 2), 3)
    texts_RD, verdict = sample_walk(walk, scheme, batch, ROWS, seed=PAIRS.index((name, kind)))
    distribution_S = batch.text_distributions()[0, :, 0]
    expected = dict(zip(map(tuple, batch.texts().tolist()), distribution_S.tolist(), strict=True))
    assert tuple_p_value(texts_RD, expected) > FALSE_ALARM / len(PAIRS)
    # Lengths are known too: picks that do not follow the distribution that they are said to follow show here at the latest.
    picked = isinstance(walk, BlockWalk)
    exact = enumerate_walk(walk, Speculative() if picked else scheme, batch.picked_chains(scheme) if picked else batch)
    accepted_R = verdict.accepted_B.double()
    # 4.5 standard deviations: false alarm below 1e-5.
    assert abs(accepted_R.mean() - exact.accepted()[0]) < 4.5 * accepted_R.std() / math.sqrt(ROWS)
