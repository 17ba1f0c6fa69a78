"""A made-up board for the page's tests: its numbers are drawn from a seed and are nobody's results."""

from __future__ import annotations

import random
from typing import Any

FAMILIES = ("closed_form", "averaging", "distillation", "exemplars", "data_free", "projection", "transformers")
SETTINGS = [{"clients": str(clients), "beta": beta} for clients in (5, 20) for beta in ("0.1", "1")]
TASKS = 10


def made_up_board(methods: int = 45, settings: int = 4, seed: int = 0) -> dict[str, Any]:
    """A board of `methods` x `settings` x 2 kinds; about one method in eight is not run, the first two are ceilings."""
    draws = random.Random(seed)
    families = [FAMILIES[draws.randrange(len(FAMILIES))] for _ in range(methods)]
    rows = [
        _row(draws, method, families[method], setting, kind)
        for method in range(methods)
        for setting in range(settings)
        for kind in ("defaults", "tuned")
    ]
    for setting in range(settings):
        for kind in ("defaults", "tuned"):
            _compared([row for row in rows if (row["setting"], row["kind"]) == (setting, kind)], draws)
    return {
        "track": "features",
        "version": "features-1",
        "about": "MADE-UP numbers in the form of CIFAR-100 on frozen features, ten tasks: nobody's results.",
        "data": "features",
        "date": "2026-11-27",
        "command": "fcl-bench leaderboard run features data.path=FEATURES.npz",
        "shared": {
            **{"tasks": str(TASKS), "split": "class_incremental", "partition": "dirichlet", "label_rate": "1"},
            **{
                "wire.dtype": "float32",
                "backbone": "identity",
                "transport": "in_process",
                "device": "cpu",
                "threads": "1",
            },
        },
        "settings": SETTINGS[:settings],
        "seeds": [0, 1, 2],
        "revisions": ["fface99f0000"],
        "conclusion": "",
        "rows": rows,
    }


def _row(draws: random.Random, method: int, family: str, setting: int, kind: str) -> dict[str, Any]:
    ceiling = method < 2
    closed = family == "closed_form"
    title = f"Ceiling {method + 1}" if ceiling else _name(method)
    keys = " ".join(f"{key}={value}" for key, value in SETTINGS[setting].items())
    command = f"fcl-bench -m track=features method=made_up_{method} {keys}"
    row = {
        **{"method": f"made_up_{method}", "title": title, "family": family, "kind": kind, "ceiling": ceiling},
        **{"setting": setting, "command": command, "tuning": {}, "trials": None},
    }
    if method % 8 == 7:
        return row | {"status": "not run", "why": "It trains a network; this track has features only.", "gates": []}
    final = 66 + method if ceiling else draws.gauss(60, 3) if closed else draws.uniform(15, 58)
    final += kind == "tuned"
    curve = [final + (92 - final) * (1 - task / (TASKS - 1)) ** 2 + draws.gauss(0, 0.4) for task in range(TASKS)]
    curve[-1] = final
    rounds = TASKS if closed else TASKS * draws.choice((5, 10, 20))
    memory = draws.choice((200, 2000)) if family == "exemplars" and not ceiling else 0
    gates = (
        [] if draws.random() < 0.75 or closed or ceiling else [draws.choice(("rising", "near_chance", "first_task"))]
    )
    tuned = kind == "tuned"
    return row | {
        **{"status": "run", "why": "", "n": 3, "A_T": final, "A_T_std": draws.uniform(0.02, 0.9), "curve": curve},
        **{"A_avg": sum(curve) / TASKS, "A_avg_std": draws.uniform(0.02, 0.9), "forgetting": draws.uniform(2, 40)},
        "up_mib": None if ceiling else 10 ** draws.uniform(-0.3, 1.8) * (1 if closed else 3),
        **{"down_mib": draws.uniform(0, 90), "kept_mib": draws.choice((0.0, draws.uniform(0.1, 9)))},
        **{"samples_kept": memory, "rounds": rounds, "steps": 0 if closed else rounds * 400},
        **{"client_seconds": draws.uniform(1, 900), "server_seconds": draws.uniform(0.1, 40)},
        **{"revealed": draws.choice((0.0, 0.0, 1.3)), "mark": "", "behind": None, "low": None, "high": None},
        **{"gates": gates, "gate_texts": "Accuracy still rises in the last rounds: 1.8 points." if gates else ""},
        "tuning": {"method.training.lr": round(draws.uniform(0.01, 1), 3), "method.ridge": 0.1} if tuned else {},
        **{"trials": 8 if tuned else None, "commits": ["fface99f0000"]},
        "run_ids": [f"{draws.getrandbits(48):012x}" for _ in range(3)],
    }


def _name(number: int) -> str:
    """Names of various lengths, as methods have."""
    parts = ("Fed", "Lin", "Proto", "Ridge", "Sketch", "Replay", "Prompt", "EWC", "LwF", "Net")
    return parts[number % 10] + parts[number // 10 % 10] * (number % 3) + ("+" * (number % 2)) + str(number)


def _compared(rows: list[dict[str, Any]], draws: random.Random) -> None:
    """The best and what is within its interval are marked."""
    fair = [row for row in rows if row["status"] == "run" and not row["ceiling"]]
    best = max(row["A_T"] for row in fair)
    for row in fair:
        distance, half = best - row["A_T"], draws.uniform(0.2, 0.9)
        if distance > 0:
            row |= {"behind": distance, "low": distance - half, "high": distance + half}
        row["mark"] = "bold" if distance <= half and not row["gates"] else ""
