"""Time: streams whose clients are out of step. A task of the loop is then a step of time, the same for all clients."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from fcl_bench.config import knob
from fcl_bench.data.partitions.base import Holdings, Partition
from fcl_bench.data.sources.base import Dataset, parts, rank_in_group
from fcl_bench.data.splits.base import Division, SampleSplit, Stream, checked_classes, columns_of, stream_of_samples
from fcl_bench.data.splits.class_incremental import ClassIncremental
from fcl_bench.errors import UserError
from fcl_bench.files import file_checksum, user_path
from fcl_bench.randomness import generator


@dataclass
class Asynchronous(SampleSplit):
    """Every client goes through the groups of classes in an order and at a speed of its own (FedSpace's setting).

    `cut` gives the groups, and the partition deals them out as in `split=class_incremental`. A client has a group for
    some time, in which its samples arrive at uniform moments. The slowest client needs all steps.
    """

    name: ClassVar[str] = "asynchronous"
    groups: int | None = knob(None, least=1, of="file=none")
    order: str = knob("independent", choices=("same", "shifted", "independent"))
    speed: str = knob("constant", choices=("constant", "uniform", "lognormal", "stragglers"))
    spread: float = knob(0.5, least=0, most=10, of="speed=uniform,lognormal")
    stragglers: float = knob(0.2, least=0, most=1, words="a share, 0 to 1", of="speed=stragglers")
    slowdown: float = knob(3.0, least=1, most=1e6, of="speed=stragglers")
    missing: float = knob(0.0, least=0, most=1, words="a share, 0 to 1")
    file: str | None = knob(None, identity=False)

    def __post_init__(self) -> None:
        if self.speed == "uniform" and self.spread >= 1:
            raise UserError(f"split.spread={self.spread:g} with split.speed=uniform", "a share below 1, such as 0.3")

    def contents(self) -> dict[str, str]:
        """The part of a run's identity that only some runs have."""
        return {"file": file_checksum(user_path("split.file", self.file))} if self.file else {}

    def divide(self, dataset: Dataset, tasks: int, seed: int) -> Division:
        return ClassIncremental().divide(dataset, tasks, seed)

    def deal(
        self, dataset: Dataset, partition: Partition, tasks: int, clients: int, seed: int
    ) -> tuple[Stream, list[Holdings]]:
        drawn = seed if self.order_seed is None else self.order_seed
        if self.file:
            order, (sample, client, step) = checked_classes(dataset), self._read(len(dataset.train), clients, tasks)
        else:
            groups = self.groups or tasks
            if groups > (classes := len(np.unique(dataset.train.labels))):
                raise UserError(f"split.groups={groups} is more than the {classes} classes", f"1 to {classes}")
            whole = self.cut(dataset, groups, seed)
            rng, moment = generator(drawn, "clocks"), generator(drawn, "arrivals").random(len(dataset.train))
            times, arrivals = self._times(groups, clients, tasks, rng), []
            of = partition.groups(dataset.train, whole.train_columns)
            there = rng.random(times[0].shape) >= self.missing
            for g in range(groups):
                there[rng.integers(clients), g] = True  # no group is without a client
            dealt = partition.deal([of[own] for own in whole.train], there.sum(axis=0).tolist(), seed)
            for g, (own, held) in enumerate(zip(whole.train, dealt, strict=True)):
                sample, client = own[held.indices], np.repeat(np.flatnonzero(there[:, g]), held.sizes())
                first, last = times[:, client, g]
                arrived = np.minimum(first + moment[sample] * (last - first), np.ceil(last) - 1)  # also if rounded up
                arrivals.append((sample, client, arrived.astype(np.int64)))
            order, (sample, client, step) = whole.class_order, np.concatenate(arrivals, axis=1)
        stream = _stream_of(dataset, order, sample, step, tasks, generator(drawn, "arrivals of tests"))
        sizes = np.bincount(step * clients + client, minlength=tasks * clients).reshape(tasks, clients)
        by_step = np.split(sample[np.lexsort((sample, client, step))], np.cumsum(sizes.sum(axis=1))[:-1])
        in_step = not self.file and (self.order, self.speed) == ("same", "constant")
        shards = [Holdings(own, np.cumsum([0, *size])) for own, size in zip(by_step, sizes, strict=True)]
        return replace(stream, in_step=in_step), shards

    def _times(self, groups: int, clients: int, steps: int, rng: np.random.Generator) -> np.ndarray:
        """When each client begins and ends each group (2, K, G), in steps."""
        place, lengths = np.tile(np.arange(groups), (clients, 1)), np.ones((clients, groups))
        if self.order == "shifted":
            place = (place - np.arange(clients)[:, None] * groups // clients) % groups
        elif self.order == "independent":
            place = rng.permuted(place, axis=1)
        if self.speed == "uniform":
            lengths = rng.uniform(1 - self.spread, 1 + self.spread, (clients, groups))
            # All clients end together, so one of a client's groups takes what the others leave, if that is enough.
            lengths[:, -1] = np.maximum(groups - lengths[:, :-1].sum(axis=1), 1 - self.spread)
            lengths = rng.permuted(lengths * groups / lengths.sum(axis=1, keepdims=True), axis=1)
        elif self.speed == "lognormal":
            lengths = np.exp(self.spread * rng.standard_normal((clients, groups)))
        elif self.speed == "stragglers":
            lengths[rng.permutation(clients) < round(self.stragglers * clients)] = self.slowdown
        ends = np.cumsum(lengths, axis=1)
        # Multiplied first: as many steps as groups of equal length begin at whole numbers.
        times = np.minimum(np.stack([ends - lengths, ends]) * steps / ends[:, -1].max(), steps)
        return np.take_along_axis(times, place[None], axis=2)

    def _read(self, *limits: int) -> np.ndarray:
        """Sample, client and step (3, n) of each row of the file, each below its limit."""
        import pandas as pd

        names = ["sample", "client", "step"]
        most = ", ".join(f"{name} 0 to {limit - 1}" for name, limit in zip(names, limits, strict=True))
        wanted, where = f"a CSV file with {most}, each sample once", f"split.file={self.file}"
        try:
            rows = pd.read_csv(user_path("split.file", str(self.file)), usecols=names, dtype=np.int64)[names].to_numpy()
        except (OSError, ValueError, OverflowError) as error:
            raise UserError(f"{where} cannot be read: {error}", wanted) from error
        if ((rows < 0) | (rows >= limits)).any() or len(np.unique(rows[:, 0])) < len(rows):
            raise UserError(f"{where} has rows that are out of range or a sample twice", wanted)
        return rows.T


def _stream_of(
    dataset: Dataset, order: np.ndarray, sample: np.ndarray, step: np.ndarray, steps: int, rng: np.random.Generator
) -> Stream:
    """The stream in which the training samples (n,) arrive in the steps (n,).

    A class's test samples are divided over its steps like its training samples, to rounding, but one at least is in the
    first of them: every class is tested from the step on in which anyone first has it.
    """
    arrivals = [np.full(len(side), -1) for side in (dataset.train, dataset.test)]
    arrivals[0][sample] = step
    column, of_test = columns_of(dataset.train.labels[sample], order), columns_of(dataset.test.labels, order)
    sizes = np.bincount(column, minlength=len(order))
    known = np.flatnonzero((of_test >= 0) & (sizes[of_test] > 0))
    c = of_test[known]
    place = rank_in_group(c, rng.random(len(c))) * sizes[c] // np.bincount(c)[c] + np.cumsum(sizes)[c] - sizes[c]
    arrivals[1][known] = step[np.lexsort((step, column))][place]
    return stream_of_samples(dataset, order, *(parts(own, steps) for own in arrivals))
