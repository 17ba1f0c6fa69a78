"""A plain loop: federated averaging as in a tutorial, where batches are rows of a tensor."""

from __future__ import annotations

import copy
from pathlib import Path

import torch

from benchmarks.peers.settings import Averaging, Row
from benchmarks.peers.work import Work, flat


def prepared(row: Row, checkout: Path) -> Work:
    """A deep copy of the model for each client and round, an optimiser, and an average of state dicts."""
    assert isinstance(row, Averaging)
    model = row.model()
    parts = row.parts(row.images)

    def run() -> None:
        for round_ in range(row.rounds):
            trained = []
            for client, (images, labels) in enumerate(parts):
                local = copy.deepcopy(model).train()
                optimiser = torch.optim.SGD(local.parameters(), lr=row.lr)
                for epoch in row.batches(client, round_):
                    for chosen in epoch:
                        optimiser.zero_grad()
                        torch.nn.functional.cross_entropy(local(images[chosen]), labels[chosen]).backward()
                        optimiser.step()
                trained.append(local.state_dict())
            shares = [len(labels) / len(row.labels) for _, labels in parts]
            averaged = {
                name: sum(share * state[name] for share, state in zip(shares, trained, strict=True))
                for name in model.state_dict()
            }
            model.load_state_dict(averaged)

    return Work(run, lambda: flat(model.parameters()))
