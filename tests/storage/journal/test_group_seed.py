"""Seeds of groups are equal for all that know the same group, and differ between groups, iterations and runs."""

from storage.journal.noise_keys import group_seed, noise_key


def test_a_seed_fits_31_bits_and_is_of_one_group():
    seeds = [
        group_seed(run, iteration, group) for run in (0, 7, 2**63 - 1) for iteration in range(4) for group in range(50)
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert max(seeds) > 2**30


def test_a_seed_is_stable():
    assert group_seed(7, 3, 5) == group_seed(7, 3, 5)
    assert group_seed(7, 3, 5) != noise_key(7, 3, 5) >> 33
