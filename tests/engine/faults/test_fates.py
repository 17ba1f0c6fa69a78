"""Who fails, by probability and by list."""

from __future__ import annotations

import re

import numpy as np
import pytest

from fcl_bench.errors import UserError
from fcl_bench.options.faults.choices import Fate, ListedFaults, RandomFaults


def share(fates: np.ndarray, fate: Fate) -> float:
    return sum(found is fate for found in fates) / len(fates)


def test_shares_are_the_probabilities():
    fates = RandomFaults(silent=0.2, late=0.3).fates(0, 20_000, 1, 4, 0)
    assert share(fates, Fate.SILENT) == pytest.approx(0.2, abs=0.01)
    assert share(fates, Fate.LATE) == pytest.approx(0.3, abs=0.01)
    assert share(fates, Fate.ANSWERS) == pytest.approx(0.5, abs=0.01)


def test_a_draw_depends_on_seed_task_round_and_attempt_alone():
    faults = RandomFaults(silent=0.5)
    fates = [faults.fates(*at, 0).tolist() for at in ((0, 60, 0, 0), (0, 60, 0, 0), (1, 60, 0, 0), (0, 60, 1, 0))]
    fates += [faults.fates(0, 60, 0, 1, 0).tolist(), faults.fates(0, 60, 0, 0, 1).tolist()]
    assert fates[0] == fates[1]
    assert len({tuple(fate.name for fate in found) for found in fates}) == 5


def test_who_has_left_stays_away_and_their_number_is_geometric():
    faults = RandomFaults(silent=0, gone=0.25)
    left = [{k for k, fate in enumerate(faults.fates(3, 8_000, t, 0, 0)) if fate is Fate.GONE} for t in range(4)]
    for t, clients in enumerate(left):
        assert len(clients) / 8_000 == pytest.approx(1 - 0.75 ** (t + 1), abs=0.02)
        assert left[t - 1] <= clients or t == 0


def test_a_list_names_clients_tasks_and_rounds():
    faults = ListedFaults(silent=["0@1"], late=["1@1.2", "2@0"], gone=["3@1"])
    names = {(t, r): [fate.value for fate in faults.fates(9, 4, t, r, 0)] for t in (0, 1, 2) for r in (0, 2)}
    assert names[0, 0] == names[0, 2] == ["answers", "answers", "late", "answers"]
    assert names[1, 0] == ["silent", "answers", "answers", "gone"]
    assert names[1, 2] == ["silent", "late", "answers", "gone"]
    assert names[2, 0] == ["answers", "answers", "answers", "gone"]


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: ListedFaults(silent=["1"]), "faults.silent has the entry '1'"),
        (lambda: ListedFaults(late=["-1@0"]), "faults.late has the entry '-1@0'"),
        (lambda: ListedFaults(gone=["1@0.1"]), "faults.gone has the entry '1@0.1'"),
        (lambda: ListedFaults(silent=["5@0"]).check(5, 2), "faults.silent names client 5, and there are 5"),
        (lambda: ListedFaults(gone=["4@2"]).check(5, 2), "faults.gone names task 2, and there are 2"),
        (lambda: RandomFaults(silent=0.6, late=0.6), "add up to more than 1"),
        (lambda: RandomFaults(min_clients=99).check(3, 2), "faults.min_clients=99 with clients=3 (0 to 3)"),
        (lambda: ListedFaults(silent=["0@0"], min_clients=4).check(3, 2), "faults.min_clients=4 with clients=3"),
        (lambda: ListedFaults().check(3, 2), "faults=listed lists no client that fails"),
    ],
)
def test_wrong_knobs_are_one_line(made, said):
    with pytest.raises(UserError, match=re.escape(said)):
        made()
