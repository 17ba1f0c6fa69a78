"""Made-up rows of a track, whose numbers a reader can check in the head."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fcl_bench.leaderboard.store import MEASURED, Store
from fcl_bench.leaderboard.track import Track

SETTINGS = [{"clients": "5", "beta": "0.1"}, {"clients": "5", "beta": "1"}]


def track(version: str = "mine-1", seeds: tuple[int, ...] = (0, 1, 2)) -> Track:
    return Track("mine", version, "Two tasks", SETTINGS, list(seeds), ["data.path=/home/me/features.npz"])


def row(method: str, final: float, seed: int, kind: str = "defaults", beta: str = "0.1", **others) -> dict:
    numbers = dict.fromkeys(MEASURED, 1.0) | {"A_T": final, "A_avg": final + 10, "client_storage_mib": None}
    who = {"method": method, "kind": kind, "request": f"of-{method}", "clients": "5", "beta": beta, "seed": seed}
    what = {"rounds": 2, "first_samples": 100, "accuracy": [90.0, final], "gates": [], "gate_texts": ""}
    return {**who, **numbers, **what, "total_seconds": 2.5, "run_id": f"{method}{seed}", "git_commit": "abc", **others}


def right(final: float, samples: int = 200, first: int = 0) -> np.ndarray:
    """The answers of a run with this A_T: those from `first` on are right, as many as it needs."""
    answers = np.zeros(samples, bool)
    answers[first : first + round(final * samples / 100)] = True
    return answers


def filled(folder: Path, *rows: dict, methods: tuple[str, ...] = ("afl", "fedavg", "stsa")) -> Store:
    store = Store(folder, "mine")
    store.describe(track(), methods)
    for one in rows:
        store.put(one)
    return store
