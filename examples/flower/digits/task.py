"""The network, and who holds which samples: the part of the project that knows the data."""

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from flwr.app import Context
from torch import nn

from fcl_bench.flower import Body


def network() -> nn.Module:
    """Images (b, 3, 8, 8) to features (b, 64)."""
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    )


BODY = Body(network, size=8)


def tasks(context: Context) -> list[list[int]]:
    """The digits of each task: 0 and 1, then 2 and 3, and so on with five tasks."""
    return [part.tolist() for part in np.array_split(np.arange(10), int(context.run_config["tasks"]))]


@cache
def digits() -> list[np.ndarray]:
    """Images (n, 8, 8) in uint8 and labels (n,): of training, and of test, which is every fifth sample."""
    # scikit-learn's file, without an import of it: a SuperNode starts a process for every message.
    package = find_spec("sklearn").submodule_search_locations[0]
    table = np.loadtxt(Path(package, "datasets", "data", "digits.csv.gz"), delimiter=",", dtype=np.uint8)
    images, labels = 15 * table[:, :64].reshape(-1, 8, 8), table[:, 64].astype(int)
    test = np.arange(len(table)) % 5 == 0
    return [images[~test], labels[~test], images[test], labels[test]]


def load(context: Context, task: int) -> tuple[np.ndarray, np.ndarray]:
    """A client's samples of a task: every K-th one of the task's digits."""
    images, labels, _, _ = digits()
    own = np.flatnonzero(np.isin(labels, tasks(context)[task]))
    own = own[int(context.node_config["partition-id"]) :: int(context.node_config["num-partitions"])]
    return images[own], labels[own]


def load_test(context: Context) -> tuple[np.ndarray, np.ndarray]:
    """The test samples of all tasks."""
    return digits()[2], digits()[3]
