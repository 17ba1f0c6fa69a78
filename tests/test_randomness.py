"""Derived generators."""

from fcl_bench.randomness import derived_seed, generator


def test_generators_repeat_and_differ_by_seed_purpose_and_index():
    draws = {
        key: generator(*key).integers(2**62)
        for key in [(0, "a"), (1, "a"), (0, "b"), (0, "a", 0), (0, "a", 1), (0, "a", 1, 0), (0, "a", 0, 1)]
    }
    assert len(set(draws.values())) == len(draws)
    assert all(generator(*key).integers(2**62) == value for key, value in draws.items())


def test_derived_seeds_fit_the_wire():
    seeds = [derived_seed(seed, "projection") for seed in range(2000)]
    assert len(set(seeds)) == 2000
    assert all(0 <= seed < 2**63 for seed in seeds)
