"""benchmarks/learnt.py: likelihood ratios against plain loops, and what an upload of one sample gives away."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.learnt import ALONE, SUMMED, Sender, candidates, likelihood_ratios, quality, read
from fcl_bench.errors import UserError


def test_each_number_is_judged_by_the_other_uploads_alone():
    rng = np.random.default_rng(0)
    member = rng.random((12, 5)) < 0.5
    member[:6], member[6:] = member[:6] | (np.arange(6)[:, None] < 3), member[6:] & (np.arange(6)[:, None] < 3)
    t = rng.standard_normal((12, 5)) + member
    found = likelihood_ratios(t, member)
    for q in range(12):
        for i in range(5):
            logs = []
            for inside in (True, False):
                others = [t[row, i] for row in range(12) if row != q and member[row, i] == inside]
                mean = sum(others) / len(others)
                variance = sum((other - mean) ** 2 for other in others) / len(others)
                logs.append(-((t[q, i] - mean) ** 2) / variance / 2 - math.log(variance) / 2)
            assert found[q, i] == pytest.approx(logs[0] - logs[1], rel=1e-6)


def test_the_auc_counts_pairs_and_ties_by_half():
    scores, member = np.array([[3.0, 1.0], [1.0, 0.0]]), np.array([[True, True], [False, False]])
    auc, found = quality(scores, member)
    assert (auc, found) == (pytest.approx(100 * (1 + 1 + 0.5 + 1) / 4), 100.0)


def test_a_class_sum_of_one_sample_is_read_off_and_one_of_three_is_not():
    Z = np.abs(np.random.default_rng(0).standard_normal((10, 40)))
    sender = Sender("fedncm", ALONE, 40, 1.0)
    assert [read(sender, Z[:n]) for n in (1, 3)] == [100, 0]
    upload = sender.upload(Z[:3], np.zeros(3, dtype=np.int64))
    np.testing.assert_allclose(candidates(sender, upload, 3)[0], Z[:3].mean(0), rtol=1e-6)
    assert read(Sender("fedncm", SUMMED, 40, 1.0), Z, clients=10) == 0


def test_what_there_is_not_is_refused():
    with pytest.raises(UserError, match="secure=sums: the server of method=fedran needs"):
        Sender("fedran", SUMMED, 40, 1.0)
