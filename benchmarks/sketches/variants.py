"""The table of variants tried; each is the base with some of its knobs changed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fcl_bench.methods.closed_form.algebra.ridge import AUTO, GCV, SHARE

#: More directions than there are.
ALL = 10**6
#: As a ridge: what `auto` gives after the first task, for all tasks.
FIRST = "first"


@dataclass(frozen=True)
class Variant:
    """One way to sketch; the defaults are the base: Gaussian remainder, 8-bit factors, 16-bit sums.

    Args:
        rank, input_rank: directions of random features (r) and of backbone features (k).
        remainder: what the dropped energy is taken for: gaussian, isotropic, or exact (the full Gram matrix).
        mix: isotropic share of the remainder; `mix_samples` m makes it m / (m + n) for a client with n samples.
        order: of the Hermite series.
        bits: per number of a factor (32: float32); `fine` leading columns have 8 whatever the others have.
        sums_bits: per number of the class sums S; `predicted`: of what the Gaussian does not predict of them.
        ranks: equal; total (largest eigenvalues of all clients first, the total that equal ranks have); relative (of
            each client's eigenvalues over its energy); capped (three quarters of that total, none above the rank).
        diagonal: the remainder's exact diagonal is sent: "hidden" (M numbers) or "input" (d numbers, for Sigma).
        centre: local class means, or "global" ones, which take a round more.
        subspace: q of the server's leading directions that are broadcast; clients send their part in them.
        own_basis: q leading directions of the client's own Gaussian model, which the server knows from the upload; the
            client sends its part in them.
        clusters: Gaussians per class and client, by k-means.
        own_counts: weigh classes in each client's remainder by its counts, not by the task's.
        own_means: the client's class means in place of the task's.
        own_sigma: share of the client's own covariance in Sigma.
        linear: s random vectors, for uploads that only add up: Nystroem from the sum of A'A Omega.
        linear_inputs: the same for the backbone's features (d or more: all of Z'Z); 0: as many as `linear`.
        difference: sketch A'A less the client's own Gaussian model of it, and not A'A.
        ridge: lambda, or auto (`share` of the mean eigenvalue, after each task), or first (auto's of the first task,
            kept), or gcv.
    """

    name: str = "base"
    rank: int = 32
    input_rank: int = 32
    remainder: str = "gaussian"
    mix: float = 0.3
    mix_samples: float = 0.0
    order: int = 2
    bits: int = 8
    fine: int = 0
    sums_bits: int = 16
    predicted: bool = False
    ranks: str = "equal"
    diagonal: str = ""
    centre: str = "local"
    subspace: int = 0
    own_basis: int = 0
    clusters: int = 1
    own_counts: bool = False
    own_means: bool = False
    own_sigma: float = 0.0
    linear: int = 0
    linear_inputs: int = 0
    difference: bool = False
    ridge: float | str = AUTO
    share: float = SHARE


def variants(rank: int = 32, k: int = 32) -> list[Variant]:
    """All that is tried, with base ranks `rank` and `k`."""
    base = Variant("base", rank=rank, input_rank=k)
    plain = {"bits": 32, "sums_bits": 32}
    sums = {"predicted": True, "sums_bits": 4}
    factors = {"bits": 4, "fine": rank // 4, "rank": 2 * rank}
    changes: dict[str, dict] = {
        "base": {},
        "not rounded": plain,
        "not rounded, ridge 1e-3": {"ridge": 1e-3, **plain},
        "full Gram": {"remainder": "exact"},
        "full Gram, ridge 1e-3": {"remainder": "exact", "ridge": 1e-3},
        "isotropic": {"remainder": "isotropic"},
        "base r/2": {"rank": rank // 2},
        "base r*2": {"rank": rank * 2},
        "base k/2": {"input_rank": k // 2},
        "base k*2": {"input_rank": k * 2},
        "a ranks by energy, same total": {"ranks": "total"},
        "a ranks by energy share, same total": {"ranks": "relative"},
        "a ranks by energy, 3/4 of the total, same most": {"ranks": "capped"},
        "b diagonal, M numbers": {"diagonal": "hidden"},
        "b diagonal, d numbers": {"diagonal": "input"},
        "b isotropic, diagonal, M numbers": {"remainder": "isotropic", "diagonal": "hidden"},
        "c global class means": {"centre": "global"},
        "d server's q = r directions": {"subspace": rank},
        "d server's q = 4 r directions": {"subspace": 4 * rank},
        "e two clusters per class": {"clusters": 2},
        "e own class means": {"own_means": True},
        "f ridge 1e-3": {"ridge": 1e-3},
        "f ridge 100": {"ridge": 100.0},
        "f ridge 1e4": {"ridge": 1e4},
        "f auto, 0.3 %": {"share": 0.003},
        "f auto, 3 %": {"share": 0.03},
        "f auto of the first task, kept": {"ridge": FIRST},
        "f gcv": {"ridge": GCV},
        "h linear, s = r/4": {"linear": rank // 4, **plain},
        "h linear, s = r": {"linear": rank, **plain},
        "h linear, s = 4 r": {"linear": 4 * rank, **plain},
        "h linear, s = r/4, all of Z'Z": {"linear": rank // 4, "linear_inputs": ALL, "input_rank": ALL, **plain},
        "h linear, s = r, all of Z'Z": {"linear": rank, "linear_inputs": ALL, "input_rank": ALL, **plain},
        "h linear, s = r, isotropic": {"linear": rank, "remainder": "isotropic", **plain},
        "i bits 4": {"bits": 4},
        "i bits 4, r*2": {"bits": 4, "rank": rank * 2},
        "i bits 4 but r/4 at 8, r*2": factors,
        "i bits 3, r*2": {"bits": 3, "rank": rank * 2},
        "i sums 8 bits": {"sums_bits": 8},
        "i sums predicted, 8 bits": {"predicted": True, "sums_bits": 8},
        "i sums predicted, 4 bits": sums,
        "i mix 300 / (300 + n)": {"mix_samples": 300.0},
        "i mix 0.1": {"mix": 0.1},
        "i mix 0.5": {"mix": 0.5},
        "i order 1": {"order": 1},
        "i order 3": {"order": 3},
        "i order 8": {"order": 8},
        "i own counts": {"own_counts": True},
        "i own counts, sigma half own": {"own_counts": True, "own_sigma": 0.5},
        "i difference to own model": {"difference": True},
        "i own model's q = r directions": {"own_basis": rank},
        "i own model's q = 4 r directions": {"own_basis": 4 * rank},
        "j d numbers, sums predicted in 4 bits": {"diagonal": "input", **sums},
        "j the same, r*2 in 4 bits but r/4 at 8": {"diagonal": "input", **sums, **factors},
        "j the same, server's q = 4 r directions": {"diagonal": "input", **sums, **factors, "subspace": 4 * rank},
    }
    return [replace(base, name=name, **change) for name, change in changes.items()]
