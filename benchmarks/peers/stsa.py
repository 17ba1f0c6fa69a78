"""STSA's public code (Yuqin-G/STSA): `STSA.replace_fc1` (STSA) and `STSA.replace_fc_ours3` (STSA-E) of a task.

Not theirs: features are ready (`extract_vector` hands them through), loaders read in this process (theirs start 8
workers for each client), `cuda()` stays on the CPU, the projection is ours, and the random groups of STSA-E are those
that our clients draw. Stubs: wandb, utils.inc_net (networks), utils.data (data sets).
"""

from __future__ import annotations

import importlib
from pathlib import Path

import torch

from benchmarks.peers.borrowed import SameOrder, reading_here, stub, use, without_gpu
from benchmarks.peers.settings import Row, Statistics
from benchmarks.peers.work import Work, flat

#: `--local_bs` of its command line.
BATCH = 128


class Samples(torch.utils.data.Dataset):
    """All clients' samples as its data sets give them: index, sample, label."""

    def __init__(self, features: torch.Tensor, labels: torch.Tensor) -> None:
        self.features, self.labels = features, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        return index, self.features[index], self.labels[index]


class Ready(torch.nn.Module):
    """In place of its network: a backbone that is the identity, and the classifier that it fills."""

    def __init__(self, M: int, classes: int) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(M, classes, bias=False)

    def extract_vector(self, features: torch.Tensor) -> torch.Tensor:
        return features


def prepared(row: Row, checkout: Path) -> Work:
    """A learner as its `setup_RP` and `partition_data` leave it, before a task's statistics."""
    assert isinstance(row, Statistics)
    use(checkout)
    stub("wandb", "utils.inc_net", "utils.data")
    without_gpu()
    theirs = importlib.import_module("methods.STSA")
    theirs.DataLoader = reading_here(torch.utils.data.DataLoader)
    learner = theirs.STSA.__new__(theirs.STSA)
    learner.args = {
        "M": row.M,
        "nb_classes": row.classes,
        "num_users": row.clients,
        "frac": 1.0,
        "local_bs": BATCH,
        "ridge": row.ridge,
        "dummy": row.groups,
    }
    learner.user_groups = dict(enumerate(row.shards))
    learner.W_rand = row.projection
    learner.P, learner.G = torch.zeros(row.M, row.classes), torch.zeros(row.M, row.M)
    learner._network = Ready(row.M, row.classes)
    SameOrder(row, lambda split: split.idxs[0] // row.samples)
    if row.method == "stsa_e":
        groups = iter([row.groups_of(client) for client in range(row.clients)])
        torch.randperm = lambda *_, **__: next(groups)  # type: ignore[assignment]
    learn = learner.replace_fc1 if row.method == "stsa" else learner.replace_fc_ours3
    samples = Samples(row.features, row.labels)
    return Work(
        lambda: learn(None, learner._network, learner.args, samples), lambda: flat([learner._network.fc.weight.T])
    )
