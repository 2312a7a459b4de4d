"""Random numbers of a row: those of its generator, in order, however many a round takes and whoever shares the batch."""

import torch

from polydraft.sampling.categorical import Noise


def test_the_numbers_of_a_seed_do_not_depend_on_how_many_a_round_takes() -> None:
    generators = [torch.Generator().manual_seed(seed) for seed in (5, 6)]
    noise, counts = Noise(generators, torch.device("cpu")), (3, 40, 300, 1, 17)
    found_BU = torch.cat([noise.uniforms(count) for count in counts], dim=1)
    for row_U, seed in zip(found_BU, (5, 6), strict=True):
        assert torch.equal(row_U, torch.rand(sum(counts), generator=torch.Generator().manual_seed(seed), dtype=torch.float64))
    noise.seat(0, generators[0])  # goes on
    noise.seat(1, torch.Generator().manual_seed(5))  # begins
    next_BU = noise.uniforms(3)
    assert torch.equal(next_BU[1], found_BU[0, :3]) and not torch.equal(next_BU[0], found_BU[0, :3])
