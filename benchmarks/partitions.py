"""One table of how samples are spread over clients under every split and partition, and of the preparation's time.

    python -m benchmarks partitions                              # CIFAR-100 in ../shared/data/cifar100
    python -m benchmarks partitions data=features data.path=FILE.npz

Every combination of SPLITS, --clients and partitions (those with a beta at each of --betas) is a row; one that a
partition refuses is a row with its error. Preparation is reading the data, cutting it into tasks and assigning all of
them; exit code 1 if one that succeeds takes longer than --limit. Seconds are of CPU time, all threads together, so
that other work on the machine does not count; importing the data set's library is part of reading.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
from hydra import compose, initialize_config_dir
from report import write

from fcl_bench.composition import config_dir
from fcl_bench.config import Settings, load_settings
from fcl_bench.data.sources.base import Dataset
from fcl_bench.data.splits.base import Stream
from fcl_bench.errors import UserError

CIFAR100 = ("data=cifar100", "data.path=../shared/data/cifar100")
#: How the data is cut over time, as on the command line.
SPLITS = (
    ("tasks=5",),
    ("tasks=10",),
    ("tasks=20",),
    ("tasks=11", "split.first=50"),
    ("split=si_blurry", "tasks=5"),
    ("split=si_blurry", "tasks=10"),
)
PLAIN = (("partition=iid",), ("partition=shards", "partition.shards=5"), ("partition=shards", "partition.shards=10"))
SKEWED = (
    ("partition=dirichlet",),
    ("partition=dirichlet", "partition.min_size=0"),
    ("partition=published",),
    ("partition=dirichlet_all_classes",),
    ("partition=dirichlet_equal_sizes",),
)


def settings_of(*overrides: str) -> Settings:
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return load_settings(compose("config", overrides=list(overrides)))


def shards_of(stream: Stream, settings: Settings, clients: int, seed: int) -> list[list[np.ndarray]]:
    """Per task and client, the labels of its samples, assigned as in a run."""
    shards = []
    for task, indices in enumerate(stream.train):
        labels = stream.train_columns[indices]
        parts = settings.partition.holdings(labels, clients, settings.partition.generator(seed, task))
        shards.append([labels[part] for part in parts])
    return shards


def statistics(shards: list[list[np.ndarray]]) -> dict[str, float | str]:
    """Statistics over all pairs of task and client; but for samples and `empty`, over those with samples.

    `top class`: mean share of a client's samples that its most frequent class has. `distance`: mean total variation
    distance between the class shares of a client and those of the whole task, 0 (the same) to 1 (nothing in common).
    """
    sizes, held, top, distance = [], [], [], []
    for task in shards:
        names, columns = np.unique(np.concatenate(task), return_inverse=True)
        clients = np.repeat(np.arange(len(task)), [len(labels) for labels in task])
        counts = np.zeros((len(task), len(names)), dtype=np.int64)
        np.add.at(counts, (clients, columns), 1)
        size = counts.sum(axis=1)
        sizes += size.tolist()
        some = counts[size > 0] / size[size > 0, None]
        held += (some > 0).sum(axis=1).tolist()
        top += some.max(axis=1).tolist()
        distance += (np.abs(some - counts.sum(axis=0) / counts.sum()).sum(axis=1) / 2).tolist()
    return {
        "samples (min, median, max)": _spread(sizes),
        "empty %": round(100 * float(np.mean(np.asarray(sizes) == 0)), 1),
        "classes (min, median, max)": _spread(held),
        "top class": round(float(np.mean(top)), 3),
        "distance": round(float(np.mean(distance)), 3),
    }


def _spread(values: list[int]) -> str:
    return " ".join(f"{value:g}" for value in (min(values), np.median(values), max(values)))


def rows(
    dataset: Dataset, reading: float, base: list[str], clients: list[int], betas: list[float], seed: int
) -> list[dict[str, object]]:
    """A row for each combination; `reading` seconds of reading the data count in each one's total."""
    partitions = [*PLAIN, *((*overrides, f"beta={beta:g}") for overrides in SKEWED for beta in betas)]
    chosen = {overrides: settings_of(*base, *overrides) for overrides in partitions}
    table = []
    for split in SPLITS:
        settings = settings_of(*base, *split)
        begin = time.process_time()
        stream = settings.split.cut(dataset, settings.scalars.tasks, seed)
        cutting = time.process_time() - begin
        for number in clients:
            for overrides, by_rule in chosen.items():
                row: dict[str, object] = {
                    "split": " ".join(split).removeprefix("split="),
                    "clients": number,
                    "partition": " ".join(word for word in overrides if not word.startswith("beta="))
                    .removeprefix("partition=")
                    .replace("partition.", ""),
                    "beta": "" if by_rule.beta is None else f"{by_rule.beta:g}",
                }
                begin = time.process_time()
                try:
                    shards = shards_of(stream, by_rule, number, seed)
                    assigning = time.process_time() - begin
                    row |= statistics(shards)
                except UserError as error:
                    assigning = time.process_time() - begin
                    row["refused"] = error.what
                row |= {
                    "seconds": round(cutting + assigning, 3),
                    "with reading": round(reading + cutting + assigning, 3),
                }
                table.append(row)
    return table


def markdown(table: pd.DataFrame) -> str:
    lines = [
        list(table.columns),
        ["---"] * len(table.columns),
        *table.astype(object).fillna("").astype(str).values.tolist(),
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="*", default=list(CIFAR100), metavar="KEY=VALUE", help="of fcl-bench: the data")
    parser.add_argument("--clients", type=int, nargs="+", default=[5, 50, 1000])
    parser.add_argument("--betas", type=float, nargs="+", default=[0.005, 0.1, 1.0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=5.0, help="seconds that one preparation may take")
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmarks"))
    options = parser.parse_args(arguments)
    begin = time.process_time()
    dataset = settings_of(*options.data).data.load()
    reading = time.process_time() - begin
    table = pd.DataFrame(rows(dataset, reading, options.data, options.clients, options.betas, options.seed))
    text = markdown(table)
    rows_of = table.astype(object).where(table.notna(), None).to_dict("records")
    write(options.out / "partitions.json", rows_of, text.rstrip("\n"))
    print(text, end="")
    done = table[table["distance"].notna()]
    slowest = done.loc[done["with reading"].idxmax()]
    print(f"reading {dataset.name}: {reading:.2f} s; slowest preparation {slowest['with reading']:.2f} s:", end=" ")
    print(" ".join(str(slowest[key]) for key in ("split", "clients", "partition", "beta")).strip())
    print(f"written: {options.out}/partitions.json, partitions.md")
    return int(slowest["with reading"] > options.limit)


if __name__ == "__main__":
    sys.exit(main())
