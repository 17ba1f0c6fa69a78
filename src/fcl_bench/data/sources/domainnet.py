"""DomainNet: 345 classes in six domains; the training images are a fixed random subset of each domain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fcl_bench.config import knob
from fcl_bench.data.sources.base import Dataset
from fcl_bench.data.sources.hub import label_names
from fcl_bench.data.sources.hub_images import HubImages, class_labels
from fcl_bench.data.sources.image_source import FileSide, Side, TableSide
from fcl_bench.errors import UserError
from fcl_bench.randomness import generator

#: The domains in alphabetical order, which is the hub copy's numbering.
DOMAINS = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
#: The column that holds the number of each image's domain.
_COLUMN = "domain"
#: Seed of the draw of training images, so that everyone has the same ones.
_SEED = 0


@dataclass
class DomainNet(HubImages):
    """DomainNet with 10,000 training images per domain (FedProTIP, Appendix E.1) and all test images.

    The images of domain d, in the order of the files, are permuted by a generator seeded with (0, d), and the first
    `per_domain` of the permutation are its training images. The run's seed does not matter.
    """

    per_domain: int | None = knob(10_000, least=1)

    def load(self) -> Dataset:
        if self.path is not None and self._lists("train"):
            return self._from_released_folder()
        sides = {side: self._labelled(side) for side in ("train", "test")}
        names = tuple(label_names(sides["train"].table, _COLUMN) or DOMAINS)
        for side, part in sides.items():
            if part.domains is not None and len(part.domains) and part.domains.max() >= len(names):
                raise UserError(
                    f"{self._key}: column {_COLUMN} of {side} holds the domain {part.domains.max()}",
                    f"0 to {len(names) - 1}",
                )
        return self._assembled(sides, self.origin(), names)

    def _assembled(self, sides: Mapping[str, Side], origin: str = "", domain_names: tuple[str, ...] = ()) -> Dataset:
        train = sides["train"]
        if self.per_domain is not None and train.domains is not None and len(train.domains):
            train = train.taken(_drawn(train.domains, self.per_domain))
        return super()._assembled({**sides, "train": train}, origin, domain_names)

    def _labelled(self, side: str) -> TableSide:
        needed = (self.label_column, _COLUMN)
        table = self._table(side, *needed)
        labels, domains = (class_labels(table, column, self._key, side) for column in needed)
        return TableSide(labels, table, self.image_column, domains=domains)

    def _class_folders(self) -> None:
        """None: class folders do not tell the domains."""

    def _wanted_layout(self) -> str:
        return f"{super()._wanted_layout()}, or the released <domain>/<class>/* with <domain>_train.txt and _test.txt"

    def _lists(self, side: str) -> list[Path]:
        """The list files of the released folder, in the order of the domains."""
        return sorted(self._folder().glob(f"*_{side}.txt"))

    def _from_released_folder(self) -> Dataset:
        names = tuple(file.name.removesuffix("_train.txt") for file in self._lists("train"))
        others = tuple(file.name.removesuffix("_test.txt") for file in self._lists("test"))
        if names != others:
            odd = min(set(names) ^ set(others))
            raise UserError(
                f"data.path={self.path}: {odd} has only one of its two lists", f"{odd}_train.txt and {odd}_test.txt"
            )
        sides = {side: self._listed(side) for side in ("train", "test")}
        return self._assembled(sides, "local files as released", names)

    def _listed(self, side: str) -> FileSide:
        """The files that the lists name, in the lists' order."""
        root = self._folder()
        files, labels, domains = list[Path](), list[int](), list[int]()
        for domain, text in enumerate(self._lists(side)):
            for number, line in enumerate(text.read_text().splitlines(), start=1):
                name, _, label = line.rpartition(" ")
                if not name or not label.isdigit():
                    raise UserError(f"data.path={root}: line {number} of {text.name} is {line!r}", "<path> <label>")
                files.append(root / name)
                labels.append(int(label))
                domains.append(domain)
        return FileSide(np.asarray(labels, dtype=np.int64), files, root, domains=np.asarray(domains, dtype=np.int64))


def _drawn(domains: np.ndarray, count: int) -> np.ndarray:
    """The indices of at most `count` samples drawn of each domain, ascending, given the domain of each."""
    drawn = []
    for domain in np.unique(domains):
        members = np.flatnonzero(domains == domain)
        order = generator(_SEED, "DomainNet subset", int(domain)).permutation(len(members))
        drawn.append(members[order[:count]])
    return np.sort(np.concatenate(drawn))
