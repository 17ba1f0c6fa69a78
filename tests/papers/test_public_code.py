"""What printed columns tell of the public code behind them, and what that code computes (docs/errata/others.md)."""

from __future__ import annotations

import numpy as np
import pytest

from tests.papers.reading import printed_by


def test_afls_columns_beside_what_pfllib_and_fl_bench_compute():
    """FedNTD's is not FedAvg's, as PFLlib's default is; FedGen's is but for one row, as of FL-bench's, never taught."""
    frame = printed_by("afl").query("table == 'Table 1'")
    table = frame.assign(value=frame["value"].astype(float)).pivot(index="column", columns="row", values="value")
    less = table.sub(table["FedAvg"], axis=0).round(2)
    assert less["FedNTD"].abs().max() == 1.77
    odd = "CIFAR-100 / s = 10"
    assert less["FedGen"].drop(odd).abs().max() == 0.79
    assert less.loc[odd, "FedGen"] == 5.17
    assert table.loc[odd, "FedGen"] > table.loc[odd, "AFL"]


def feddyn(alpha: float, squared: bool, start: float, rounds: int) -> float:
    """w after so many rounds on f_k = a_k (w - b_k)^2 / 2, a = (1, 3), b = (0, 4), with exact local solves.

    The penalty is alpha / 2 (w - w0)^2, or alpha / 2 |w - w0|: a soft threshold.
    """
    a, b, g, h, w0 = np.array([1.0, 3.0]), np.array([0.0, 4.0]), np.zeros(2), 0.0, start
    for _ in range(rounds):
        free = b + g / a
        if squared:
            w = (a * b + g + alpha * w0) / (a + alpha)
        else:
            step = free - w0
            w = w0 + np.sign(step) * np.maximum(np.abs(step) - alpha / (2 * a), 0)
        g = g - alpha * (w - w0)
        h -= alpha * (w - w0).mean()
        w0 = w.mean() - h / alpha
    return float(w0)


@pytest.mark.parametrize("alpha", [1.0, 4.0])
@pytest.mark.parametrize("start", [-2.0, 3.0, 6.0])
def test_feddyn_comes_to_the_optimum_from_anywhere_by_the_square(alpha, start):
    assert feddyn(alpha, True, start, 200) == pytest.approx(3, abs=1e-9)


def test_feddyn_without_the_square_diverges_or_ends_elsewhere():
    """At PFLlib's own alpha, 1, it diverges from either side; at 4, started at the optimum, it ends at 2."""
    for start in (-2.0, 6.0):
        assert abs(feddyn(1.0, False, start, 200)) > 1e20
    assert feddyn(4.0, False, 3.0, 200) == pytest.approx(2, abs=1e-6)
