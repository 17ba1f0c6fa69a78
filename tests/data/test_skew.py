"""Total variation of a partition and its percentile among other draws, against plain code."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fcl_bench.data.partitions import skew as module
from fcl_bench.data.partitions.base import Holdings, Iid, Shards
from fcl_bench.data.partitions.dirichlet import Dirichlet, DirichletAllClasses, DirichletEqualSizes, Published
from fcl_bench.data.partitions.skew import skew
from tests.small_runs import run_in

RULES = [Dirichlet(0.5), Dirichlet(0.2, min_size=0), DirichletAllClasses(0.3), DirichletEqualSizes(0.3), Published(0.5)]


def dealt(rule, sizes, clients, seed):
    """Classes of all samples, and the clients' samples of each task; `sizes` has one list per task."""
    columns, shards, begin = [], [], 0
    for task, of_task in enumerate(sizes):
        own = np.repeat(np.arange(len(of_task)) + 100 * task, of_task)
        columns.append(np.random.default_rng(task).permutation(own))
        found = rule.holdings(columns[-1], clients, rule.generator(seed, task))
        shards.append(Holdings(found.indices + begin, found.ends))
        begin += len(own)
    return np.concatenate(columns), shards


def plainly(columns, shards):
    """Half the sum of absolute differences, over all clients with samples; and of each task alone."""
    tasks = []
    for own in shards:
        labels = columns[own.indices].tolist()
        tasks.append([])
        for samples in own:
            mine = columns[samples].tolist()
            if mine:
                apart = [abs(mine.count(c) / len(mine) - labels.count(c) / len(labels)) for c in set(labels)]
                tasks[-1].append(sum(apart) / 2)
    return np.mean(np.concatenate(tasks)), [np.mean(each) for each in tasks]


def test_by_hand():
    """Two tasks: 3 of class 0 and 1 of class 1 against 2 of class 1; all of class 5 against nothing."""
    columns = np.array([0, 0, 1, 0, 1, 1, 5, 5])
    shards = [Holdings.of([np.arange(4), np.array([4, 5])]), Holdings.of([np.array([6, 7]), np.array([], dtype=int)])]
    found = skew(Iid(), columns, shards)
    assert found["total_variation"] == pytest.approx((0.25 + 0.5 + 0) / 3)
    assert found["by_task"] == pytest.approx([0.375, 0])


@pytest.mark.parametrize("rule", [*RULES, Iid(), Shards(2)], ids=lambda rule: rule.name)
def test_total_variation_is_that_of_plain_code(rule):
    columns, shards = dealt(rule, [[30, 20, 10], [15, 15]], 4, 1)
    found = skew(rule, columns, shards)
    mean, by_task = plainly(columns, shards)
    assert found["total_variation"] == pytest.approx(mean)
    assert found["by_task"] == pytest.approx(by_task)


@pytest.mark.slow_cases(
    "alike-dirichlet1", "alike-dirichlet_all_classes", "alike-dirichlet_equal_sizes", "alike-published"
)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("sizes", [[[30, 20, 10], [15, 15]], [[20, 20]] * 4], ids=["uneven", "alike"])
def test_other_draws_have_the_law_of_the_rules_own(rule, sizes):
    """The mean over 200 draws, and its spread, as those of whole partitions with other seeds."""
    own = np.array([plainly(*dealt(rule, sizes, 4, seed))[0] for seed in range(120)])
    others, why = module._others(rule, [np.array(of_task) for of_task in sizes], 4)
    assert why is None
    assert len(others) == (20 if isinstance(rule, DirichletEqualSizes) else 200)
    error = np.sqrt(own.var() / len(own) + others.var() / len(others))
    assert abs(own.mean() - others.mean()) < 4.5 * error
    assert 0.5 < others.std() / own.std() < 2


def test_the_percentile_is_the_share_of_less_skewed_draws(monkeypatch):
    rule = Dirichlet(0.5)
    columns, shards = dealt(rule, [[50] * 5] * 2, 4, 0)
    found, (others, _) = skew(rule, columns, shards), module._others(rule, 2 * [np.array([50] * 5)], 4)
    assert found["percentile"] == round(100 * sum(other < found["total_variation"] for other in others) / 200, 1)
    assert (found["draws"], found["why"]) == (200, None)
    # Of many shares fewer draws are made, then none; a draw in blocks is still of the same law.
    monkeypatch.setattr(module, "_BLOCK", 1)
    monkeypatch.setattr(module, "_MANY", 50 * 40)
    assert skew(rule, columns, shards)["draws"] == 50
    monkeypatch.setattr(module, "_MOST", 50 * 40 - 1)
    found = skew(rule, columns, shards)
    assert (found["percentile"], found["draws"]) == (None, 0)
    assert found["why"] == "50 draws of 40 shares each would take too long"


def test_where_there_is_no_percentile_it_is_said_why():
    for rule in (Iid(), Shards(2)):
        found = skew(rule, *dealt(rule, [[30, 20]], 4, 0))
        assert (found["percentile"], found["draws"]) == (None, 0)
        assert found["why"] == f"partition={rule.name} draws no Dirichlet shares task by task"
    # 25 rounds of draws meet this in a few of a thousand.
    rule = Dirichlet(0.1, min_size=18)
    columns, shards = dealt(Dirichlet(100), [[40, 40]], 4, 0)
    found = skew(rule, columns, shards)
    assert (found["percentile"], found["why"]) == (None, "nearly no draw gives each client partition.min_size samples")
    nothing = skew(rule, columns[:0], [Holdings.of([columns[:0]] * 4)])
    assert (nothing["total_variation"], nothing["why"]) == (None, "no samples are here")


@pytest.mark.slow
def test_the_record_the_screen_and_the_preview_say_it(tmp_path, command):
    typed = ("method=afl", "tasks=2", "clients=3", "beta=0.5", "data=digits")
    record = run_in(tmp_path / "runs", *typed).record
    found = record["partition_skew"]
    line = f"total variation {found['total_variation']:.3f} from the classes of each task; percentile"
    line = f"partition: {line} {found['percentile']:g} of 200 other draws\n"
    assert json.loads(json.dumps(found)) == found
    for more in ((), ("preview=true",)):
        code, out, _ = command(*typed, *more, f"out={tmp_path}")
        assert code == 0
        assert line in out
    code, out, _ = command(*typed[:3], "partition=iid", f"out={tmp_path}", "preview=true")
    assert "from the classes of each task; partition=iid draws no Dirichlet shares task by task\n" in out
