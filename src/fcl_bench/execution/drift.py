"""Feature drift: how far later updates move the features of data that were learnt before (FedRAN Eq. 2)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fcl_bench.protocol.audit import Audit, FullData
from fcl_bench.protocol.context import Task
from fcl_bench.protocol.method import Server
from fcl_bench.randomness import generator

#: Prefix of the reference features in a checkpoint.
_REFERENCE = "reference."


class FeatureDrift(Audit):
    """Drift_{k,tau}(s) = mean over x in R_{k,tau} of ||g_s(x) - g_tau(x)||_2 after every task s >= tau.

    R_{k,tau} is a fixed random choice among client k's samples of task tau; g_s is the global feature extractor after
    task s, and the reference the one right after task tau.

    Attributes:
        rows: task s, reference_task tau, client k, samples, drift, and the mean norm of the reference features.
    """

    def __init__(self, samples: int, seed: int, shards: Sequence[Sequence[np.ndarray]]) -> None:
        self._chosen = [
            [
                np.sort(generator(seed, "drift", task, client).permutation(indices)[:samples])
                for client, indices in enumerate(clients)
            ]
            for task, clients in enumerate(shards)
        ]
        self._reference: dict[int, torch.Tensor] = {}
        self.rows = []

    def report(self, task: Task, server: Server, everything: FullData) -> None:
        """Rows for the reference samples of this and all earlier tasks."""
        for tau in range(task.index + 1):
            clients = self._chosen[tau]
            features = server.embed(everything.train(np.concatenate(clients))).float().cpu()
            reference = self._reference.setdefault(tau, features)
            moved = torch.linalg.vector_norm(features - reference, dim=1)
            size = torch.linalg.vector_norm(reference, dim=1)
            counts = [len(indices) for indices in clients]
            for client, (drifts, norms) in enumerate(zip(moved.split(counts), size.split(counts), strict=True)):
                if len(drifts):
                    row = {"task": task.index, "reference_task": tau, "client": client, "samples": len(drifts)}
                    self.rows.append({**row, "drift": float(drifts.mean()), "norm": float(norms.mean())})

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The reference features, by name."""
        return {f"{_REFERENCE}{tau}": features for tau, features in self._reference.items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self._reference = {int(name.removeprefix(_REFERENCE)): features for name, features in state.items()}


def drift_matrix(rows: Iterable[Mapping[str, Any]], tasks: int) -> np.ndarray:
    """(T, T): row s, column tau, the mean over all reference samples of task tau; NaN above the diagonal."""
    total, count = np.zeros((tasks, tasks)), np.zeros((tasks, tasks))
    for row in rows:
        where = row["task"], row["reference_task"]
        total[where] += row["samples"] * row["drift"]
        count[where] += row["samples"]
    return np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)
