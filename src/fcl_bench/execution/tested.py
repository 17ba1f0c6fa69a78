"""Loading the test samples that count in a run's accuracies again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fcl_bench.config import HELD_OUT, target_class
from fcl_bench.data.images.stored import ArrayImages, Images
from fcl_bench.data.sources.base import Dataset
from fcl_bench.errors import UserError
from fcl_bench.files import json_hash
from fcl_bench.typed import typed_instance


class Chosen:
    """Some of a sequence of images, decoded on access."""

    fingerprint = ""  # nothing that is made of them is kept

    def __init__(self, images: Images, indices: np.ndarray) -> None:
        self._images, self._indices = images, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Image.Image:
        return self._images[int(self._indices[index])]

    def describe(self, index: int) -> str:
        return self._images.describe(int(self._indices[index]))


def tested_samples(
    folder: Path, record: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray]:
    """Inputs, labels, tasks and indices of the n test samples that a run was tested on, by ascending index.

    Args:
        folder, record, config: of the run.

    Raises:
        UserError: the data are not there, or others than the run had.
    """
    node = {name: value for name, value in config["data"].items() if name not in HELD_OUT}
    dataset = typed_instance(target_class("data", node.pop("_target_", None)), node, "data").load()
    if _fingerprint(dataset, record) != record["data_fingerprint"]:
        raise UserError(f"data={record['data']} is not what run {record['run_id']} was made on", "the same files")
    replaced = record["validation"] is not None and record["validation"]["replaces_test"]
    tested = dataset.train if replaced else dataset.test
    with np.load(folder / "partition.npz") as partition:
        side = "validation" if replaced else "test"
        tests = [partition[f"{side}_t{task}"] for task in range(record["tasks"])]
    indices = np.concatenate(tests)
    tasks = np.repeat(np.arange(len(tests)), [len(own) for own in tests])
    order = np.argsort(indices, kind="stable")
    indices, tasks = indices[order], tasks[order]
    return _chosen(tested.inputs, indices), tested.labels[indices], tasks, indices


def _fingerprint(dataset: Dataset, record: Mapping[str, Any]) -> str:
    """Return it as the run has it, with the hashes that the nodes told of samples that stay at their sites."""
    if not dataset.elsewhere:
        return dataset.fingerprint
    hashes = {client: node["data"] for node in record["transport"]["nodes"] for client in node["clients"]}
    return json_hash([dataset.fingerprint, json_hash([hashes[client] for client in sorted(hashes)])])


def _chosen(inputs: Images | np.ndarray, indices: np.ndarray) -> Any:
    if isinstance(inputs, np.ndarray):
        return inputs[indices]
    return inputs.pixels[indices] if isinstance(inputs, ArrayImages) else Chosen(inputs, indices)
