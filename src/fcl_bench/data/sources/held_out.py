"""A test set cut from a data set that has none: a fifth of each class, the same on every machine.

The rule depends on the images' bytes alone. In each class the distinct images are sorted by their hashes (BLAKE2b, 128
bits, of the encoded file), and the first ones are test images, until these are a fifth of the class: n/5 rounded to the
nearest number, at least one. Equal images of a class stay together. Neither a seed nor the order of the files matters,
so a parquet file and a folder with the same image files give the same cut.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from fcl_bench.errors import UserError
from fcl_bench.files import csv_cell, replacing

#: One of this many samples of a class is a test sample.
_SHARE = 5
#: The header of an index file.
COLUMNS = ["class", "image", "side"]


def held_out(labels: np.ndarray, digests: list[str]) -> np.ndarray:
    """Which samples are test samples (n,) bool, given their classes (n,) and the hashes of their images."""
    names = np.asarray(digests)
    test = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        members = members[np.argsort(names[members], kind="stable")]
        wanted = max(1, (2 * len(members) + _SHARE) // (2 * _SHARE))
        last = names[members[wanted - 1]]
        test[members[names[members] <= last]] = True
    return test


def write_index(path: Path, classes: list[str], labels: np.ndarray, digests: list[str], test: np.ndarray) -> None:
    """Write which image is on which side, one row per image, sorted by class and hash; the write is atomic."""
    sides = np.where(test, "test", "train")
    rows = sorted(zip((csv_cell(classes[label]) for label in labels), digests, map(str, sides), strict=True))
    with replacing(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(rows)


def read_index(path: Path, classes: list[str], labels: np.ndarray, digests: list[str]) -> np.ndarray:
    """Which samples the index file calls test samples (n,). A `UserError` unless it lists exactly these images."""
    remedy = f"the right images, or remove {path.name}: fcl-bench-data prepare writes it anew"
    try:
        with path.open(newline="") as file:
            header, *rows = list(csv.reader(file))
        if header != COLUMNS or any(len(row) != 3 or row[2] not in ("train", "test") for row in rows):
            raise ValueError
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"{path} is no index of train and test images", remedy) from error
    sides = {(name, digest): side == "test" for name, digest, side in rows}
    keys = [(csv_cell(classes[label]), digest) for label, digest in zip(labels, digests, strict=True)]
    unknown = sum(key not in sides for key in keys)
    gone = len(sides.keys() - set(keys))
    if unknown or gone or len(rows) != len(keys):
        raise UserError(
            f"{path} lists {len(rows)} images; of the {len(keys)} here {unknown} are not among them, {gone} are gone",
            remedy,
        )
    return np.array([sides[key] for key in keys], dtype=bool)
