"""What is wrong in STSA's appendix: its lemma and rate against algebra and simulation, smaller slips against its text.

Features of a class are N(mu, Sigma) as in the paper's Lemma 3.5; T is tr Sigma^2 and S is (tr Sigma)^2.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from tests.conftest import shared
from tests.papers.reading import printed_by

SIGMA = np.array([1.0, 0.5, 0.25])  # a diagonal; every statement is free of the basis
MU = np.ones(3)
T, S = float((SIGMA**2).sum()), float(SIGMA.sum() ** 2)
N, K = 20, 5
DRAWS = 40_000


@pytest.fixture(scope="module")
def text() -> str:
    return shared("papers/stsa.txt").read_text()


@pytest.fixture(scope="module")
def features() -> np.ndarray:
    """(DRAWS, N, 3), N samples of the class in each draw."""
    return MU + np.random.default_rng(0).standard_normal((DRAWS, N, 3)) * np.sqrt(SIGMA)


def gram(x: np.ndarray) -> np.ndarray:
    return np.swapaxes(x, -1, -2) @ x


def estimate(x: np.ndarray, groups: int) -> np.ndarray:
    """Eq. 9 of one class whose samples (..., n, M) lie in so many groups of equal size."""
    n = x.shape[-2]
    sums = x.reshape(*x.shape[:-2], groups, n // groups, x.shape[-1]).sum(-2)
    total = sums.sum(-2)
    scatter, square = gram(sums) / (n // groups), total[..., None] * total[..., None, :]
    return (n - 1) / (groups - 1) * scatter - (n - groups) / (n * (groups - 1)) * square


def mean_square(matrices: np.ndarray) -> float:
    return float((matrices**2).sum((-1, -2)).mean())


def test_lemma_3_5_is_false(features, text):
    """M ~ Wishart(n - 1, Sigma), so E||M||^2 = (n - 1)(n T + S); printed is (n - 1)/n S."""
    assert r"= \frac{n-1}{n} \text{tr}(\Sigma)^2.$$" in text
    simulated = mean_square(gram(features - features.mean(1, keepdims=True)))
    exact, printed = (N - 1) * (N * T + S), (N - 1) / N * S
    assert (round(exact, 1), round(printed, 1)) == (556.9, 2.9)
    assert simulated == pytest.approx(exact, rel=0.01)


def test_lemma_3_5_does_not_follow_from_its_own_parts():
    """Eq. 42 + 43 - 44 + 45 as printed, as coefficients of S and T, against Eq. 46's (n - 1)/n and 0."""
    n = Fraction(N)
    s = n - 2 + 1 / n
    t = n + n * (n - 1) - 2 / n * (n + 2 * n * (n - 1)) + (n + 4 * n * (n - 1) + n**2 - 3 * n + 2) / n**2
    assert (s, t) == ((n - 1) ** 2 / n, Fraction(65341, 200))
    assert (s, t) != ((n - 1) / n, 0)


def test_the_fourth_moment_in_lemma_3_5_forgets_a_term(features, text):
    """E tr (x x')^2 = 2 T + S by Eq. 40; Eq. 41 has T + S."""
    assert r"(\sigma_{jk}^2 + \sigma_{jj} \sigma_{kk}). \quad (41)" in text
    x = (features - MU).reshape(-1, 3)
    assert float(((x**2).sum(1) ** 2).mean()) == pytest.approx(2 * T + S, rel=0.01)
    assert (T + S, 2 * T + S) == (4.375, 5.6875)


def test_the_exact_error_of_stsa_es_estimate(features):
    """(n - 1)(n - K)/(K - 1) (T + S) of a class that all K groups hold; none at K = n."""
    exact = (N - 1) * (N - K) / (K - 1) * (T + S)
    assert round(exact, 1) == 311.7
    assert mean_square(estimate(features, K) - gram(features)) == pytest.approx(exact, rel=0.02)
    np.testing.assert_allclose(estimate(features[:10], N), gram(features[:10]), atol=1e-9)


def test_eq_32_forgets_that_a_mean_adds_up(features, text):
    """E||sum phi||^2 = n^2 ||mu||^2 + n tr Sigma; Eq. 32 has n (||mu||^2 + tr Sigma), and a sum below a product."""
    assert r"n_i^{(j)} \left(\mu_i^{(j)\top} \mu_i^{(j)} + \text{tr}(\Sigma^{(j)}) \right)" in text
    norm, trace = float(MU @ MU), float(SIGMA.sum())
    exact, printed = N**2 * norm + N * trace, N * (norm + trace)
    assert (exact, printed) == (1235, 95)
    assert float((features.sum(1) ** 2).sum(1).mean()) == pytest.approx(exact, rel=0.01)
    half = 0.5  # C_mu = C_Sigma = 1/2 bounds such features; the step to C_Sigma C_mu t n does not hold
    assert half + half > half * half


def plug_in_error(n: int, groups: int, draws: int = 30, M: int = 8, classes: int = 4) -> float:
    """The mean of ||X (W_t - W*)||_F / n, one task, gamma 1, equal classes of N(mu_c, I)."""
    means = np.random.default_rng(1).standard_normal((classes, M))
    rng, found = np.random.default_rng(2), []
    for _ in range(draws):
        x = means[:, None] + rng.standard_normal((classes, n // classes, M))
        G, C = gram(x).sum(0) + np.eye(M), x.sum(1).T
        change = np.linalg.solve(estimate(x, groups).sum(0) + np.eye(M), C) - np.linalg.solve(G, C)
        found.append(np.linalg.norm(x.reshape(-1, M) @ change) / n)
    return float(np.mean(found))


def test_theorem_3_3s_rate_is_false(text):
    """Printed O(t / n) at any fixed K and gamma: n times the error would be bounded. It grows as the root of n."""
    assert "Theorem 3.3 shows that the plug-in error decreases as the average per-stage sample size" in text
    sizes = np.array([400, 1600, 6400, 25600])
    errors = np.array([plug_in_error(n, 10) for n in sizes])
    assert [f"{error:.4f}" for error in errors] == ["0.0099", "0.0051", "0.0027", "0.0014"]
    rate = np.sqrt(sizes) * errors
    assert rate.max() < 1.25 * rate.min()
    assert (np.diff(np.log(sizes * errors)) > 0.9 * np.log(2)).all()


def test_more_groups_help_more_than_theorem_3_3_says():
    """From K 16 to 64, of 640 samples per class: 2.1 by the exact error of Eq. 9; (K + 1)/(K - 1) falls by 1.1 only."""
    ratio = plug_in_error(2560, 16) / plug_in_error(2560, 64)
    exact = np.sqrt((640 - 16) / 15 / ((640 - 64) / 63))
    assert (round(exact, 1), round((17 / 15) / (65 / 63), 1)) == (2.1, 1.1)
    assert ratio == pytest.approx(exact, rel=0.1)


def test_eq_57_means_the_other_gram_matrix(text):
    """n > M vectors: X X' (n, n) has n - M eigenvalues 0, and only X'X (M, M) grows with n."""
    assert r"\lambda_{\min}(\mathbf{X}\mathbf{X}^\top) \geq n" in text
    x = np.random.default_rng(0).standard_normal((40, 8))
    assert abs(np.linalg.eigvalsh(x @ x.T)[0]) < 1e-10
    assert np.linalg.eigvalsh(x.T @ x)[0] > 10


def test_w_ups_shape_does_not_fit_eq_63(text):
    assert r"W_{\text{down}} \in \mathbb{R}^{d \times r}" in text
    assert r"W_{\text{up}} \in \mathbb{R}^{d \times r}" in text
    d, r = 768, 64
    units = np.zeros((1, d)) @ np.zeros((d, r))
    with pytest.raises(ValueError, match="matmul"):
        units @ np.zeros((d, r))
    assert (units @ np.zeros((r, d))).shape == (1, d)


def test_eighty_times_is_two_hundred_by_table_5(text):
    """More than 10 hours against less than 3 minutes; PILoRA's 120 times are its table's."""
    assert "over 80 times faster than LANDER (Tran et al., 2024) and 120 times faster than PLoRA" in text
    table = printed_by("stsa").query("table == 'Table 5' and metric.str.contains('time', case=False)")
    bounds = [(row.value, row.unit) for row in table.itertuples()]
    assert bounds == [("> 10", "h"), ("< 3", "min"), ("< 3", "min"), ("> 20", "h"), ("< 10", "min"), ("< 10", "min")]
    assert (10 * 60 / 3, 20 * 60 / 10) == (200, 120)
