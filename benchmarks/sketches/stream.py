"""The data of one seed, dealt to clients and tasks as a run of the benchmark deals it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fcl_bench.data.partitions.base import Holdings
from fcl_bench.data.partitions.dirichlet import Dirichlet
from fcl_bench.data.sources.base import Dataset
from fcl_bench.data.splits.class_incremental import ClassIncremental
from fcl_bench.randomness import generator

Tensor = torch.Tensor


@dataclass
class Stream:
    """The tasks of one seed: training samples per task and client, test samples per task."""

    Z: Tensor
    labels: Tensor
    Z_test: Tensor
    test_labels: Tensor
    tasks: list[tuple[tuple[int, ...], Holdings, np.ndarray]]

    @classmethod
    def of(cls, data: Dataset, tasks: int, clients: int, beta: float, seed: int) -> Stream:
        """Deal the stream as a run with the same seed does."""
        stream, partition = ClassIncremental().cut(data, tasks, seed), Dirichlet(beta=beta)
        dealt = []
        for t, (task, train, test) in enumerate(zip(stream.tasks, stream.train, stream.test, strict=True)):
            parts = partition.holdings(stream.train_columns[train], clients, generator(seed, "partition", t))
            dealt.append((task.columns, Holdings.of(train[part] for part in parts), test))
        inputs = [torch.from_numpy(np.asarray(side.inputs)).double() for side in (data.train, data.test)]
        columns = [torch.from_numpy(side) for side in (stream.train_columns, stream.test_columns)]
        return cls(inputs[0], columns[0], inputs[1], columns[1], dealt)
