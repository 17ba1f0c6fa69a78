"""IID, Dirichlet and shard partitions against flwr-datasets, the field's partitioner library.

It pins libraries of ours to old majors, so it is no dependency: the test (a minute) runs where it is installed, or
where FLWR_PYTHON names an interpreter that has it:

    FLWR_PYTHON=OTHER_VENV/bin/python .venv/bin/python -m pytest tests/data/test_partition_flwr.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fcl_bench.data.partitions.base import Iid, Partition, Shards
from fcl_bench.data.partitions.dirichlet import Dirichlet, DirichletAllClasses
from tests.data.partition_cases import counts, same_mean

PYTHON = os.environ.get("FLWR_PYTHON") or (sys.executable if find_spec("flwr_datasets") else None)
pytestmark = pytest.mark.skipif(PYTHON is None, reason="flwr-datasets is not installed, nor is FLWR_PYTHON set")

DRAWS, CLIENTS = 80, 5
TEN = np.repeat(np.arange(10), 40)
ONE = np.zeros(200, dtype=int)
TWO = np.repeat([0, 1], 1500)
ODD = np.repeat(np.arange(3), 37)


def _case(
    partitioner: str, labels: np.ndarray, draws: int = DRAWS, seeded: bool = True, **knobs: Any
) -> dict[str, Any]:
    seeds = list(range(draws))
    if partitioner != "IidPartitioner":
        knobs["partition_by"] = "label"
    knobs["num_partitions"] = CLIENTS
    return {"partitioner": partitioner, "labels": labels.tolist(), "seeds": seeds, "seeded": seeded, "knobs": knobs}


def _dirichlet(labels: np.ndarray, alpha: float, balancing: bool) -> dict[str, Any]:
    return _case("DirichletPartitioner", labels, alpha=alpha, min_partition_size=0, self_balancing=balancing)


CASES = {
    "iid": _case("IidPartitioner", TEN, seeded=False),
    "balanced 0.1": _dirichlet(TEN, 0.1, True),
    "balanced 1": _dirichlet(TEN, 1.0, True),
    "not balanced, one class": _dirichlet(ONE, 0.5, False),
    "not balanced, two classes": _dirichlet(TWO, 2.0, False),
    "not balanced, ten classes": _dirichlet(TEN, 0.5, False),
    "shards": _case("ShardPartitioner", TEN, num_shards_per_partition=2),
    "shards across classes": _case("ShardPartitioner", ODD, draws=3, num_shards_per_partition=4),
}


@pytest.fixture(scope="module")
def theirs() -> dict[str, np.ndarray]:
    """Per case (draws, C, K) samples of each class at each client."""
    assert PYTHON is not None
    script = Path(__file__).with_name("flwr_partitions.py")
    done = subprocess.run([PYTHON, str(script)], input=json.dumps(list(CASES.values())), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    tables = {}
    for (name, case), draws in zip(CASES.items(), json.loads(done.stdout), strict=True):
        classes = max(case["labels"]) + 1
        one = [[np.bincount(np.array(part, dtype=int), minlength=classes) for part in draw] for draw in draws]
        tables[name] = np.array(one).transpose(0, 2, 1)
    return tables


def ours(rule: Partition, labels: np.ndarray, draws: int = DRAWS) -> np.ndarray:
    rngs = (np.random.default_rng(5000 + seed) for seed in range(draws))
    return np.stack([counts(labels, rule.assign(labels, CLIENTS, rng), CLIENTS) for rng in rngs])


def statistics(tables: np.ndarray) -> np.ndarray:
    """Per draw: over clients the mean largest class share and number of classes, the spread of the sizes, the share of
    all pairs of clients that hold a class together, and the ordered sizes."""
    sizes = tables.sum(axis=1)
    largest = tables.max(axis=1).sum(axis=1) / sizes.sum(axis=1)
    held = tables > 0
    common = np.einsum("dck,dcl->d", held.astype(float), held.astype(float)) / held.shape[1]
    shares = np.sort(sizes, axis=1) / sizes.sum(axis=1, keepdims=True)
    return np.column_stack([largest, held.sum(axis=1).mean(axis=1), sizes.std(axis=1), common, shares])


@pytest.mark.parametrize(
    ("case", "rule", "labels"),
    [
        ("iid", Iid(), TEN),
        ("balanced 0.1", Dirichlet(0.1, min_size=0), TEN),
        ("balanced 1", Dirichlet(1.0, min_size=0), TEN),
        # Without balancing, theirs is our cap where it cannot bind, and our other form where no share is near zero.
        ("not balanced, one class", Dirichlet(0.5, min_size=0), ONE),
        ("not balanced, two classes", DirichletAllClasses(2.0), TWO),
        ("shards", Shards(shards=2), TEN),
    ],
)
def test_class_shares_have_the_same_distribution(theirs, case, rule, labels):
    assert same_mean(statistics(ours(rule, labels)), statistics(theirs[case])).all()


def test_the_comparison_tells_partitions_apart(theirs):
    """Another beta, another rule, another number of shards: each shows."""
    for case, rule in [
        ("iid", Dirichlet(10.0, min_size=0)),
        ("balanced 1", Dirichlet(0.5, min_size=0)),
        ("balanced 0.1", Dirichlet(0.2, min_size=0)),
        ("shards", Shards(shards=3)),
    ]:
        assert not same_mean(statistics(ours(rule, TEN)), statistics(theirs[case])).all()


def test_the_cap_makes_sizes_more_even_than_without(theirs):
    """As docs/reference/partitions.md says: ours always has the cap, theirs with `self_balancing`."""
    spread = ours(Dirichlet(0.5, min_size=0), TEN).sum(axis=1).std(axis=1).mean()
    assert spread < 0.8 * theirs["not balanced, ten classes"].sum(axis=1).std(axis=1).mean()


def test_shards_that_do_not_divide_the_data_lose_samples_there_and_not_here(theirs):
    """Another: 111 samples in 20 shards are 20 of 5 there; here 9 of 5 and 11 of 6."""
    assert (theirs["shards across classes"].sum(axis=(1, 2)) == 100).all()
    tables = ours(Shards(shards=4), ODD, draws=20)
    assert (tables.sum(axis=(1, 2)) == 111).all()
