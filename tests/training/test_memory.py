"""What a client keeps of its old samples: herding by hand and against plain loops, budgets, lists."""

from __future__ import annotations

from fractions import Fraction
from types import MappingProxyType

import numpy as np
import pytest
import torch

from fcl_bench.data.images.batches import Samples
from fcl_bench.methods.exemplars.memory import (
    herd,
    lists_in,
    memory_size,
    random_order,
    recalled,
    remembered,
    with_memory,
)

# Herding --------------------------------------------------------------------------------------------------------------


def plain_herding(phi, count) -> list[int]:
    """Algorithm 4 of iCaRL word for word, in whatever numbers `phi` has."""
    dimensions = range(len(phi[0]))
    mean = [sum(x[k] for x in phi) / len(phi) for k in dimensions]
    order: list[int] = []
    for i in range(1, min(count, len(phi)) + 1):
        best = None
        for candidate, x in enumerate(phi):
            if candidate in order:
                continue
            gap = [mean[k] - (x[k] + sum(phi[j][k] for j in order)) / i for k in dimensions]
            distance = sum(value * value for value in gap)
            if best is None or distance < best[0]:
                best = distance, candidate
        order.append(best[1])
    return order


HAND = [(1.0, 0.0), (0.0, 1.0), (0.6, 0.8), (0.8, 0.6)]


def test_herding_by_hand():
    """The order of the specification. Candidates 2 and 3 are equally near the mean, (0.6, 0.6): the rounding of 0.6
    makes 3 the nearer one in float64, and in exact numbers the rule for ties begins with 2."""
    assert herd(torch.tensor(HAND, dtype=torch.float64), 3).tolist() == [3, 2, 0]
    assert plain_herding(HAND, 3) == [3, 2, 0]
    exact = [tuple(Fraction(str(value)) for value in row) for row in HAND]
    assert plain_herding(exact, 3) == [2, 3, 0]


def test_herding_by_hand_in_numbers_without_rounding():
    """mu = (1/2, 1/4). First 1, at 1/4, as 3 is. Then 0, 2 and 3 make (3/4, 1/4), (1/4, 1/4) and (1/2, 1/2), all at
    1/4, so 0. Then 2 makes (1/2, 1/6), at 1/12, and 3 makes (2/3, 1/3), which is farther."""
    phi = torch.tensor([(1.0, 0.0), (0.5, 0.5), (0.0, 0.0), (0.5, 0.5)], dtype=torch.float64)
    assert herd(phi, 4).tolist() == [1, 0, 2, 3]


def random_directions(seed: int, n: int, d: int = 5) -> torch.Tensor:
    phi = np.random.default_rng(seed).standard_normal((n, d)) + 1
    return torch.from_numpy(phi / np.linalg.norm(phi, axis=1, keepdims=True))


@pytest.mark.parametrize("seed", range(5))
def test_herding_is_the_papers_algorithm(seed):
    phi = random_directions(seed, 12)
    assert herd(phi, 12).tolist() == plain_herding(phi.tolist(), 12)


def test_nothing_is_chosen_twice_and_no_more_than_there_is():
    phi = random_directions(0, 9)
    assert sorted(herd(phi, 50).tolist()) == list(range(9))
    assert herd(phi, 0).tolist() == []
    assert herd(phi[:0], 3).tolist() == []


def test_a_shorter_list_is_the_beginning_of_a_longer_one():
    phi = random_directions(1, 15)
    longest = herd(phi, 15).tolist()
    assert all(herd(phi, m).tolist() == longest[:m] for m in range(16))
    shuffle = random_order(15, 15, seed=3).tolist()
    assert sorted(shuffle) == list(range(15))
    assert all(random_order(m, 15, seed=3).tolist() == shuffle[:m] for m in range(16))
    assert random_order(15, 15, seed=4).tolist() != shuffle


def test_ties_go_to_the_lower_index():
    assert herd(torch.ones(4, 3), 4).tolist() == [0, 1, 2, 3]
    phi = random_directions(2, 6)
    doubled = herd(torch.cat([phi, phi]), 12).tolist()
    assert all(doubled.index(i) < doubled.index(i + 6) for i in range(6))


def test_what_is_herded_is_nearer_the_mean_than_what_is_drawn():
    phi = random_directions(3, 200, 20)
    gaps = [float((phi[chosen].mean(0) - phi.mean(0)).norm()) for chosen in (herd(phi, 20), random_order(20, 200, 0))]
    assert gaps[0] < 0.3 * gaps[1]


# Lists ----------------------------------------------------------------------------------------------------------------


def images_of(labels: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (len(labels), 3, 2, 2), generator=generator, dtype=torch.uint8)
    return images, torch.tensor(labels, dtype=torch.int64)


def last_first(candidates, column, count):
    return torch.arange(len(candidates) - 1, -1, -1)[:count]


def test_every_class_has_the_same_share_and_lists_keep_their_beginning():
    images, labels = images_of([0] * 5 + [2] * 3 + [0])
    first = remembered({}, images, labels, 8, last_first)
    assert set(first) == {"images.0", "images.2"}
    assert torch.equal(first["images.0"], images[[8, 4, 3, 2]])
    assert torch.equal(first["images.2"], images[[7, 6, 5]])
    more, theirs = images_of([1] * 9, seed=1)
    second = remembered(first, more, theirs, 8, last_first)
    assert torch.equal(second["images.0"], first["images.0"][:2])
    assert torch.equal(second["images.2"], first["images.2"][:2])
    assert torch.equal(second["images.1"], more[[8, 7]])
    assert memory_size(second) == 6
    assert len(first["images.0"]) == 4


def test_of_a_class_that_comes_back_old_and_new_samples_compete():
    images, labels = images_of([4] * 3)
    state = remembered({}, images, labels, 2, last_first)
    more, theirs = images_of([4] * 2, seed=1)
    seen = []

    def look(candidates, column, count):
        seen.append((column, count, candidates))
        return last_first(candidates, column, count)

    state = remembered(state, more, theirs, 2, look)
    [(column, count, candidates)] = seen
    assert (column, count) == (4, 2)
    assert torch.equal(candidates, torch.cat([images[[2, 1]], more]))
    assert torch.equal(state["images.4"], more[[1, 0]])


def test_without_a_limit_everything_stays_in_order():
    images, labels = images_of([1, 0, 1])
    state = remembered(remembered({}, images, labels, None), *images_of([1], seed=1), None)
    assert torch.equal(state["images.1"], torch.cat([images[[0, 2]], images_of([1], seed=1)[0]]))
    assert len(state["images.0"]) == 1


@pytest.mark.parametrize("seed", range(6))
def test_the_budget_holds_after_every_task_whatever_comes(seed):
    rng = np.random.default_rng(seed)
    budget, state, had = int(rng.integers(1, 12)), {}, set()
    for task in range(6):
        labels = rng.integers(0, 8, int(rng.integers(0, 30))).tolist()
        had |= set(labels)
        state = remembered(MappingProxyType(state), *images_of(labels, task), budget, last_first)
        assert memory_size(state) <= budget
        assert set(lists_in(state)) == had
        assert all(len(kept) <= budget // len(had) for kept in state.values())


def test_other_things_that_a_client_keeps_stay():
    state = {"model.w": torch.ones(2), "labels.0": torch.ones(1)}
    after = remembered(state, *images_of([0]), 5, last_first)
    assert set(after) == {"model.w", "labels.0", "images.0"}
    assert (memory_size(state), memory_size(after)) == (0, 1)


def test_features_are_kept_in_float32():
    features = torch.randn(4, 3, dtype=torch.float64)
    state = remembered({}, features, torch.tensor([0, 0, 1, 1]), 10, last_first)
    assert set(state) == {"features.0", "features.1"}
    assert torch.equal(state["features.0"], features[[1, 0]].float())
    joined = with_memory(Samples(features, torch.tensor([2, 2, 3, 3])), recalled(state))
    assert torch.equal(joined.inputs, torch.cat([features.float(), features[[1, 0, 3, 2]].float()]))


def test_memory_comes_back_with_its_labels():
    images, labels = images_of([10, 2, 10, 2, 2])
    state = remembered({}, images, labels, 100, last_first)
    inputs, columns = recalled(state)
    assert columns.tolist() == [2, 2, 2, 10, 10]
    assert torch.equal(inputs, images[[4, 3, 1, 2, 0]])
    own = Samples(*images_of([5], seed=1))
    assert with_memory(own, None) is own
    assert with_memory(own, (inputs, columns)).labels.tolist() == [5, 2, 2, 2, 10, 10]
    assert recalled({}) is None
    # A share below one sample: the class is known, and nothing is kept of it.
    empty = remembered({}, images, labels, 1, last_first)
    assert set(lists_in(empty)) == {2, 10}
    assert recalled(empty) is None
