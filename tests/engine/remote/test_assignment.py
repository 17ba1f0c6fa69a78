"""Which clients live in which process: each in one, neighbours in different ones, and evenly by their samples."""

from __future__ import annotations

import numpy as np
import pytest

from fcl_bench.engine.remote.ranks import balanced, clients_in


@pytest.mark.parametrize("processes", [1, 2, 3, 7])
@pytest.mark.parametrize("clients", [1, 5, 20])
def test_every_client_lives_once_and_neighbours_apart(processes, clients):
    homes = balanced(np.random.default_rng(0).integers(0, 100, (3, clients)), processes)
    lives = [client for process in range(processes) for client in clients_in(homes, process)]
    assert sorted(lives) == list(range(clients))
    for first in range(0, clients, processes):
        assert len(set(homes[first : first + processes])) == min(processes, clients - first)


def test_clients_of_one_size_are_dealt_in_turn():
    assert balanced(np.full((2, 7), 10), 3) == [0, 1, 2, 0, 1, 2, 0]
    assert balanced(np.zeros((2, 4), dtype=np.int64), 2) == [0, 1, 0, 1]


def test_a_small_client_joins_a_large_one():
    assert balanced(np.array([[9, 1, 9, 1]]), 2) == [0, 1, 1, 0]
    # In both tasks, though the sums of all tasks do not tell.
    assert balanced(np.array([[9, 1, 9, 1], [1, 9, 1, 9]]), 2) == [0, 1, 1, 0]


def busiest(samples: np.ndarray, homes: list[int], processes: int) -> int:
    """The sum over tasks of the busiest process's samples."""
    loads = [samples[:, clients_in(homes, process)].sum(axis=1) for process in range(processes)]
    return int(np.max(loads, axis=0).sum())


@pytest.mark.parametrize("processes", [2, 4, 8])
def test_the_others_wait_less_than_if_clients_were_dealt_in_turn(processes):
    draws = np.random.default_rng(0)
    lost = []
    for _ in range(20):
        samples = (draws.dirichlet([0.5] * 24, size=5) * 10_000).astype(np.int64)
        even = samples.sum() / processes
        ways = ([client % processes for client in range(24)], balanced(samples, processes))
        lost.append([busiest(samples, homes, processes) / even - 1 for homes in ways])
    in_turn, by_samples = np.mean(lost, axis=0)
    print(f"{processes} processes: busiest beyond an even share, in turn {in_turn:.1%}, by samples {by_samples:.1%}")
    assert by_samples < 0.75 * in_turn
