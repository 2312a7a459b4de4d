import numpy as np
import pytest
from scipy import stats

from polydraft.certify.chi_square import chi_square_p_value, critical, detectable_distance, noncentral_survival, survival


@pytest.mark.parametrize("freedom", [1, 3, 26, 31, 1023])
def test_tails_are_those_of_scipy(freedom: int) -> None:
    for statistic in (0.0, 0.5, freedom, 2.0 * freedom, 4.0 * freedom + 30):
        np.testing.assert_allclose(survival(statistic, freedom), stats.chi2.sf(statistic, freedom), rtol=1e-9)
    for chance in (0.5, 1e-4, 1e-9):
        np.testing.assert_allclose(critical(freedom, chance), stats.chi2.isf(chance, freedom), rtol=1e-9)
    for noncentrality in (0.1, 20.0, 300.0):
        expected = stats.ncx2.sf(2.0 * freedom, freedom, noncentrality)
        np.testing.assert_allclose(noncentral_survival(2.0 * freedom, freedom, noncentrality), expected, rtol=1e-7)


# Samples needed for a power of .99 at a false alarm of 1e-4: the theory note's table.
@pytest.mark.parametrize(("freedom", "samples", "distance"), [(15, 6_400, 0.05), (31, 49_000, 0.02), (63, 249_000, 0.01)])
def test_what_is_detected_agrees_with_the_table(freedom: int, samples: int, distance: float) -> None:
    assert detectable_distance(samples, freedom, 1e-4) == pytest.approx(distance, rel=0.01)


def test_what_is_said_to_be_detected_is_detected() -> None:
    distribution = np.array([0.15, 0.05, 0.24, 0.56])
    distance = detectable_distance(2_000, 3, 1e-4)
    random, refused = np.random.default_rng(0), 0
    for _ in range(400):  # an error in proportion to the distribution, which is the hardest to see
        shift = distance * np.array([0.15 / 0.2, 0.05 / 0.2, -0.24 / 0.8, -0.56 / 0.8])
        refused += chi_square_p_value(random.multinomial(2_000, distribution + shift), distribution) < 1e-4
    assert refused >= 385


def test_impossible_events_are_refused_and_rare_ones_pooled() -> None:
    assert chi_square_p_value(np.array([10, 1]), np.array([1.0, 0.0])) == 0.0
    assert chi_square_p_value(np.array([100, 0, 1]), np.array([0.99, 0.005, 0.005])) > 0.5
    assert chi_square_p_value(np.array([3]), np.array([1.0])) == 1.0
