"""AFL's public code (ZHUANGHP/Analytic-federated-learning): `local_update`, `aggregation` and `clean_regularization`.

Not theirs: features are ready (its backbone is the identity), loaders read in this process (theirs start 8 workers for
each client), `cuda()` stays on the CPU, `np.mat` is NumPy 2's `asmatrix`, and no accuracy is measured. No stubs.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.peers.borrowed import use, without_gpu
from benchmarks.peers.settings import Row, Statistics
from benchmarks.peers.work import Work, flat

#: `--batch-size` of its command line.
BATCH = 512


def prepared(row: Row, checkout: Path) -> Work:
    """The clients' samples; the calls are those of its `main_worker`."""
    assert isinstance(row, Statistics)
    use(checkout)
    without_gpu()
    vars(np).setdefault("mat", np.asmatrix)
    theirs = importlib.import_module("afl")
    args = SimpleNamespace(feat_size=row.inputs, num_classes=row.classes, gpu=0, rg=row.ridge, num_clients=row.clients)
    parts = [TensorDataset(*own) for own in row.parts(row.features)]
    backbone, model, learnt = torch.nn.Identity(), theirs.init_local(args), []

    def run() -> None:
        sent = []
        for part in parts:
            loader = DataLoader(part, BATCH, drop_last=False, shuffle=True)
            sent.append(theirs.local_update(loader, backbone, model, args))
        W, _, C = theirs.aggregation(*(list(column) for column in zip(*sent, strict=True)), args)
        learnt.append(theirs.clean_regularization(W, C, args))

    return Work(run, lambda: flat(learnt))
