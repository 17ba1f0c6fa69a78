"""Who holds what, as a sequence of index arrays."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fcl_bench.data.partitions.base import Holdings
from fcl_bench.execution import folder as run_folder
from fcl_bench.execution.folder import partition_arrays


@given(st.lists(st.lists(st.integers(0, 30), max_size=5), max_size=8), st.integers(0, 2**31 - 1))
def test_holdings_are_the_sequence_that_they_are_made_of(parts, seed):
    arrays = [np.array(part, dtype=np.int64) for part in parts]
    holdings = Holdings.of(arrays)
    assert [part.tolist() for part in holdings] == parts
    assert len(holdings) == len(parts)
    assert holdings.sizes().tolist() == list(map(len, parts))
    among = np.random.default_rng(seed).random(31) < 0.5
    assert holdings.chosen(among).tolist() == [int(among[part].sum()) for part in arrays]
    assert Holdings.of(holdings) is holdings
    if parts:
        assert holdings[-1].tolist() == parts[-1]
    for beyond in (len(parts), -len(parts) - 1):
        with pytest.raises(IndexError):
            holdings[beyond]


def test_ten_thousand_clients_are_two_arrays():
    """One's samples are a view, made when asked for."""
    holdings = Holdings.of(np.split(np.arange(500), np.arange(1, 10_000).clip(max=500)))
    assert len(holdings) == 10_000
    assert holdings[3].base is holdings.indices
    assert holdings.indices.nbytes + holdings.ends.nbytes == 8 * (500 + 10_001)


def test_a_large_partition_is_two_arrays_a_task(monkeypatch):
    """The same samples in either form of partition.npz."""
    stream = SimpleNamespace(class_order=np.arange(3), validation=(), test=(np.array([0]), np.array([1, 2])))
    shards = [Holdings.of([[4, 1], [], [2]]), Holdings.of([[], [3], [0, 5]])]
    labelled = np.array([True, True, False, True, True, True])
    small = partition_arrays(stream, shards, labelled)
    monkeypatch.setattr(run_folder, "SEPARATE", 5)
    large = partition_arrays(stream, shards, labelled)
    assert set(large) == {"class_order", "unlabelled"} | {
        f"{name}_t{task}" for task in (0, 1) for name in ("test", "train", "train_ends")
    }
    for task in (0, 1):
        samples, ends = large[f"train_t{task}"], large[f"train_ends_t{task}"]
        for client in range(3):
            own = samples[ends[client] : ends[client + 1]]
            np.testing.assert_array_equal(own, small[f"train_t{task}_c{client}"])
