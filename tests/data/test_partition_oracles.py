"""Partitions agree with plain re-statements of the papers' text, and with nothing else that threads could touch."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcl_bench.data.partitions.base import Iid, Partition, Shards, draw_labelled
from fcl_bench.data.partitions.dirichlet import Dirichlet, DirichletAllClasses, DirichletEqualSizes
from fcl_bench.data.partitions.power_law import DirichletPowerLaw
from fcl_bench.randomness import generator
from tests.data import partition_oracle as oracle
from tests.data.partition_cases import counts, same_mean, uneven_labels

PLAIN = {
    "iid": (lambda _: Iid(), oracle.iid),
    "shards": (lambda _: Shards(shards=3), lambda *arguments: oracle.shards(*arguments, per_client=3)),
    "dirichlet": (lambda beta: Dirichlet(beta, min_size=0), oracle.dirichlet),
    "dirichlet_equal_sizes": (DirichletEqualSizes, oracle.equal_sizes),
    "dirichlet_power_law": (DirichletPowerLaw, oracle.power_law),
}
RULES: list[Partition] = [*(rule(0.3) for rule, _ in PLAIN.values()), DirichletAllClasses(0.3)]


@pytest.mark.parametrize("name", PLAIN)
@settings(max_examples=40, deadline=None)
@given(
    labels=uneven_labels(most=25),
    clients=st.integers(1, 30),
    beta=st.sampled_from([0.005, 0.1, 0.5, 1.0, 10.0]) | st.floats(1e-3, 1e3),
    seed=st.integers(0, 2**32),
)
def test_every_sample_goes_where_the_plain_statement_puts_it(name, labels, clients, beta, seed):
    rule, plain = PLAIN[name]
    owner = rule(beta).assign(labels, clients, np.random.default_rng(seed))
    assert owner.dtype == np.int64
    assert owner.tolist() == plain(labels, clients, beta, np.random.default_rng(seed))


@pytest.mark.slow_cases("0.2", "1.0")
@pytest.mark.parametrize("beta", [0.2, 1.0])
def test_all_classes_has_the_distribution_of_the_plain_statement(beta):
    """What each client holds of each class; the same from the least to the most; how often it is a single sample."""
    labels = np.repeat([0, 1], [12, 30])

    def statistics(assign, seeds: range) -> np.ndarray:
        tables = np.stack([counts(labels, assign(labels, 8, np.random.default_rng(seed)), 8) for seed in seeds])
        return np.concatenate([tables, np.sort(tables, axis=2), tables == 1], axis=1)

    plain = statistics(
        lambda labels, clients, rng: oracle.all_classes(labels, clients, beta, rng), range(10_000, 11_000)
    )
    assert same_mean(statistics(DirichletAllClasses(beta).assign, range(1000)), plain).all()
    # The comparison can fail: twice beta is another distribution, with a smaller largest share of both classes.
    another = same_mean(statistics(DirichletAllClasses(2 * beta).assign, range(1000)), plain)
    assert not another[2:4, -1].any()


def _tasks(rule: Partition, seed: int, threads: int, order: list[int]) -> list[bytes]:
    """Partition and label draw of eight tasks, as `plan` makes them, by so many threads that take them in `order`."""
    labels = np.arange(600) % 12

    def task(t: int) -> bytes:
        parts = rule.holdings(labels, 7, generator(seed, "partition", t))
        kept = [draw_labelled(labels[part], 0.3, generator(seed, "labels", t, k)) for k, part in enumerate(parts)]
        return b"".join(array.tobytes() for array in (*parts, *kept))

    with ThreadPoolExecutor(threads) as pool:
        found = dict(zip(order, pool.map(task, order), strict=True))
    return [found[t] for t in range(len(order))]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_the_number_of_threads_and_the_order_of_tasks_change_nothing(rule):
    alone = _tasks(rule, 3, 1, list(range(8)))
    np.random.seed(99)  # noqa: NPY002  whoever used the global state would show
    assert _tasks(rule, 3, 4, list(range(8))) == alone
    assert _tasks(rule, 3, 2, [5, 2, 7, 0, 1, 6, 4, 3]) == alone
    assert _tasks(rule, 4, 1, list(range(8))) != alone
    assert len(set(alone)) == 8


@pytest.mark.slow
def test_the_threads_of_the_numerical_libraries_change_nothing():
    """Another process with other thread counts and another hash seed draws the same."""
    program = (
        "from tests.data import test_partition_oracles as here\n"
        "import hashlib\n"
        "for rule in here.RULES:\n"
        "    print(hashlib.sha256(b''.join(here._tasks(rule, 0, 2, list(range(8))))).hexdigest())\n"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads, "PYTHONHASHSEED": threads},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for threads in ("1", "3")
    }
    assert len(told) == 1
    assert len(set(told.pop().split())) == len(RULES)
