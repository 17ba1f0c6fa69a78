"""Run by an interpreter that has flwr-datasets: cases as JSON on stdin, their partitions as JSON on stdout.

A case is {"partitioner": class name, "knobs": its arguments, "labels": [...], "seeds": [...], "seeded": whether the
class takes a seed}; each answer is, per seed and client, its labels. No import of the project: this runs elsewhere.
"""

import json
import sys
import warnings

import datasets
import numpy as np
from flwr_datasets import partitioner as partitioners


def partition(case: dict, seed: int) -> list:
    # FederatedDataset shuffles before it partitions, which IidPartitioner relies on.
    labels = np.random.default_rng(seed).permutation(case["labels"]).tolist()
    seeded = {"seed": seed} if case["seeded"] else {}
    made = getattr(partitioners, case["partitioner"])(**case["knobs"], **seeded)
    made.dataset = datasets.Dataset.from_dict({"label": labels})
    return [list(made.load_partition(client)["label"]) for client in range(made.num_partitions)]


if __name__ == "__main__":
    datasets.disable_progress_bars()
    warnings.simplefilter("error", RuntimeWarning)  # a division by zero is an error here, not a partition
    print(json.dumps([[partition(case, seed) for seed in case["seeds"]] for case in json.load(sys.stdin)]))
