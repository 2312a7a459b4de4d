"""Drawing and verification in C, beyond what `backends/test_forms` compares with the references."""

import dataclasses

import pytest
import torch

from polydraft.backends.native import build
from polydraft.backends.native.drawing import largest_weights
from polydraft.operations import all_operations
from polydraft.sampling import PartialVocabulary
from polydraft.verify import Fault
from polydraft.verify.block import BlockWalk, verify_block
from polydraft.verify.hybrid import Hybrid
from verify.drawn_trees import distribution_of, drawn_trees

VOCABULARY, BUCKETS = 60, 12
KNOWN = PartialVocabulary(torch.arange(3, VOCABULARY, 2), VOCABULARY)


@pytest.fixture(autouse=True)
def library():
    found = build.kernels()
    if found is None:
        pytest.skip("no C compiler here")
    return found


def native():
    all_operations()
    return next(form for form in verify_block.forms if form.backend == "native")


def test_a_row_gets_what_it_gets_alone():
    scheme, walk = Hybrid(buckets=BUCKETS), BlockWalk()
    draft, target_BNV, uniforms_BU = drawn_trees(7, scheme, "3x2x1", KNOWN, 6, VOCABULARY)
    together = native().run(scheme, draft, distribution_of(target_BNV), uniforms_BU, walk.least_weight)
    for row in range(6):
        one = slice(row, row + 1)
        alone = dataclasses.replace(
            draft,
            tokens_BN=draft.tokens_BN[one],
            depths_BN=draft.depths_BN[one],
            ancestors_BNN=draft.ancestors_BNN[one],
            child_table_BNK=draft.child_table_BNK[one],
            distributions=tuple(distribution[one] for distribution in draft.distributions),
            distribution_rows_BN=draft.distribution_rows_BN[one],
        )
        found = native().run(scheme, alone, distribution_of(target_BNV[one]), uniforms_BU[one], walk.least_weight)
        assert torch.equal(found.path_BD[0], together.path_BD[row])
        assert (
            found.tokens_BD[0, : found.accepted_B[0] + 1].tolist()
            == together.tokens_BD[row, : found.accepted_B[0] + 1].tolist()
        )


@pytest.mark.parametrize(("who", "fault"), [("target", Fault.TARGET), ("draft", Fault.DRAFT)])
def test_distributions_that_are_not_numbers_are_reported(who, fault):
    scheme, walk = Hybrid(buckets=BUCKETS), BlockWalk()
    draft, target_BNV, uniforms_BU = drawn_trees(8, scheme, "2x1", None, 2, VOCABULARY)
    (target_BNV[1, 0] if who == "target" else draft.distributions[0][1]).fill_(torch.nan)
    found = native().run(scheme, draft, distribution_of(target_BNV), uniforms_BU, walk.least_weight)
    assert found.fault_B.tolist() == [Fault.NONE, fault]


def test_what_it_does_not_know_is_left_to_the_reference():
    class Own(Hybrid):
        def select(self, *args):
            return super().select(*args)

    draft, target_BNV, uniforms_BU = drawn_trees(8, Hybrid(buckets=BUCKETS), "2x1", None, 1, VOCABULARY)
    for scheme in (Own(buckets=BUCKETS), Hybrid(buckets=None), Hybrid(buckets=VOCABULARY + 1)):
        assert native().supports(scheme, draft, distribution_of(target_BNV), uniforms_BU, 0.0) is False


def test_largest_weights_in_order():
    generator = torch.Generator().manual_seed(1)
    for size, count in ((1, 1), (5, 5), (64, 3), (65, 64), (1000, 16), (16384, 33)):
        weights_RV = torch.randint(50 if size < 100 else 10**6, (4, size), generator=generator).float()
        value_RK, token_RK = largest_weights(weights_RV, count)
        sorted_RV, order_RV = weights_RV.sort(dim=1, descending=True, stable=True)
        assert token_RK.equal(order_RV[:, :count]) and value_RK.equal(sorted_RV[:, :count])
    weights_RV[2, 7] = torch.nan
    assert largest_weights(weights_RV, 3) is None
