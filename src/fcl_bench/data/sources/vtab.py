"""VTAB as in the class-incremental papers: five data sets of ten classes each, one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fcl_bench.config import knob
from fcl_bench.data.sources.base import About, Dataset, existing_path
from fcl_bench.data.sources.hub import Repository, label_names
from fcl_bench.data.sources.hub_images import HubImages
from fcl_bench.data.sources.image_source import ImageSource, Side, TableSide, class_names, labelled_files
from fcl_bench.errors import UserError
from fcl_bench.files import user_path

#: Classes taken of each data set.
EACH = 10


@dataclass(frozen=True)
class Part:
    """One of the five data sets.

    Attributes:
        name: name of the data set and of its folder under `data.path`.
        repo, revision: its repository and revision on the hub; the columns are image and label.
        by_name: its classes are taken in alphabetical order of their names, otherwise in that of their labels.
    """

    name: str
    repo: str
    revision: str
    by_name: bool


#: In the order of the tasks, as in RevisitingCIL, the source of this cut.
PARTS = (
    Part("resisc45", "timm/resisc45", "fe12fc5f1b7606543b0355eda392f1ddc54625c6", by_name=True),
    Part("dtd", "tanganke/dtd", "d2afa97d9f335b1a6b3b09c637aef667f98f966e", by_name=True),
    Part("pets", "timm/oxford-iiit-pet", "10b688881011725fa2fa3d856a47536c9a7e6968", by_name=True),
    Part("eurosat", "timm/eurosat-rgb", "b4e28552cd5f3932b6abc37eb20d3e84901ad728", by_name=True),
    # Flowers has its own class numbers, and lists of its names follow these.
    Part("flowers102", "dpdl-benchmark/oxford_flowers102", "544b55c9af69a05742ead7571cd7ae23cfcd758b", by_name=False),
)


@dataclass
class Vtab(ImageSource):
    """Fifty classes, labels 0 to 49: the first ten of RESISC45, then of DTD, Pets, EuroSAT and Flowers-102.

    Each data set is a domain. Training and test images are all those of the hub's splits "train" and "test"; the papers
    train on fewer, which only their folder says (docs/reference/data.md).
    """

    name: str = knob("vtab", filled=True, words="a name for tables")
    about: About = knob(About, identity=False)

    def load(self) -> Dataset:
        names = tuple(part.name for part in PARTS)
        if self.path is not None and class_names(self._folder() / "train"):
            return self._from_released_folder(names)
        joined = {side: [] for side in ("train", "test")}  # type: dict[str, list[TableSide]]
        origins = []
        for number, part in enumerate(PARTS):
            source = self._source(part)
            for side, tens in _first_classes(part, source.sides()).items():
                domains = np.full(len(tens.labels), number, dtype=np.int64)
                joined[side].append(replace(tens, labels=tens.labels + EACH * number, domains=domains))
            origins.append(source.origin())
        return self._assembled({side: _joined(parts) for side, parts in joined.items()}, "; ".join(origins), names)

    def repositories(self) -> list[Repository]:
        return [wanted for part in PARTS for wanted in self._source(part).repositories()]

    def _source(self, part: Part) -> HubImages:
        path = None if self.path is None else str(user_path("data.path", self.path) / part.name)
        source = HubImages(self.name, part.repo, part.revision, "image", "label", path=path)
        source.place = f"data.path=FOLDER and FOLDER/{part.name}"
        return source

    def _folder(self) -> Path:
        folders = ", ".join(part.name for part in PARTS)
        return existing_path(
            self.path, self.name, f"a folder with train/<class>/* and test/<class>/*, or with the folders {folders}"
        )

    def _from_released_folder(self, names: tuple[str, ...]) -> Dataset:
        root = self._folder()
        there = {side: class_names(root / side) for side in ("train", "test")}
        for side, classes in there.items():
            if len(classes) != EACH * len(PARTS) or classes != there["train"]:
                raise UserError(
                    f"data.path={root} has {len(classes)} classes in {side}/",
                    f"{EACH * len(PARTS)} classes, the same in train/ and test/",
                )
        order = there["train"]
        if all(name.isdigit() for name in order):
            order = sorted(order, key=int)
        numbers = {name: number for number, name in enumerate(order)}
        sides = {side: labelled_files(root / side, numbers, root) for side in there}
        sides = {side: replace(whole, domains=whole.labels // EACH) for side, whole in sides.items()}
        return self._assembled(sides, "local files as released", names)


def _first_classes(part: Part, sides: Mapping[str, Side]) -> dict[str, TableSide]:
    """The samples of the part's first ten classes, which are numbered 0 to 9 in order."""
    train = sides["train"]
    assert isinstance(train, TableSide)
    labels = np.unique(train.labels)
    if len(labels) < EACH:
        raise UserError(f"data=vtab: {part.name} has {len(labels)} classes", f"{EACH} at least")
    names = label_names(train.table, "label") if part.by_name else None
    order = sorted(labels, key=lambda label: label if names is None else (names[label].casefold(), label))
    first = {int(label): number for number, label in enumerate(order[:EACH])}
    tens: dict[str, Any] = {}
    for side, whole in sides.items():
        chosen = whole.taken(np.flatnonzero(np.isin(whole.labels, list(first))))
        tens[side] = replace(chosen, labels=np.array([first[int(label)] for label in chosen.labels], dtype=np.int64))
    return tens


def _joined(parts: list[TableSide]) -> TableSide:
    import datasets

    tables: list[Any] = [part.table.select_columns(["image"]).select(part.rows) for part in parts]
    labels, domains = (
        np.concatenate([getattr(part, name) for part in parts]).astype(np.int64) for name in ("labels", "domains")
    )
    return TableSide(labels, datasets.concatenate_datasets(tables), "image", domains=domains)
