"""DomainNet: 345 classes in six domains; for training, a fixed draw of so many images from each domain."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fcl_bench.config import knob
from fcl_bench.data.images.stored import FileImages
from fcl_bench.data.sources.base import Dataset, Split
from fcl_bench.data.sources.hub_images import HubImages
from fcl_bench.data.sources.hub_tables import TableSide, class_labels, label_names, undecoded
from fcl_bench.data.sources.image_source import image_split
from fcl_bench.errors import UserError
from fcl_bench.randomness import generator

#: In alphabetical order, as the hub copy numbers them.
DOMAINS = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")


@dataclass
class DomainNet(HubImages):
    """DomainNet with 10,000 training images a domain (FedProTIP, Appendix E.1) and every test image.

    The training images of domain d are the first `per_domain` of a permutation of the domain's images, in the order of
    the files, that is drawn from (subset_seed, d): the run's seed has no part in it.

    Args:
        path: a local folder to read instead: the hub's parquet files, or the folder as released (<domain>_train.txt and
            <domain>_test.txt, whose lines hold an image's path and its label).
        domain_column: numbers each image's domain.
        per_domain: training images of each domain; null: all.
        subset_seed: of the draw.
        others: see `HubImages`; `per_class` and `test_per_class` count in each domain, after the draw.
    """

    domain_column: str = "domain"
    per_domain: int | None = knob(10_000, least=1)
    subset_seed: int = knob(0, least=0)

    def load(self) -> Dataset:
        if self.path is not None and self._lists("train"):
            return self._from_released_folder()
        sides = self.sides()
        names = tuple(label_names(sides["train"].table, self.domain_column) or DOMAINS)
        for side, part in sides.items():
            if part.domains is not None and len(part.domains) and part.domains.max() >= len(names):
                raise UserError(
                    f"{self._key}: column {self.domain_column} of {side} holds the domain {part.domains.max()}",
                    f"0 to {len(names) - 1}",
                )
        return self._assembled(sides, self.origin(), names)

    def sides(self) -> dict[str, TableSide]:
        sides = super().sides()
        return {"train": sides["train"].taken(self._drawn(sides["train"].domains)), "test": sides["test"]}

    def _labelled(self, side: str) -> TableSide:
        needed = (self.label_column, self.domain_column)
        table = undecoded(self._table(side), self.image_column, needed, self._key, side)
        domains = class_labels(table, self.domain_column, self._key, side)
        return TableSide(table, class_labels(table, self.label_column, self._key, side), domains=domains)

    def _drawn(self, domains: np.ndarray | None) -> np.ndarray | None:
        """The training samples of the draw, ascending; None: all."""
        if self.per_domain is None or domains is None:
            return None
        drawn = []
        for domain in np.unique(domains):
            members = np.flatnonzero(domains == domain)
            order = generator(self.subset_seed, "DomainNet subset", int(domain)).permutation(len(members))
            drawn.append(members[order[: self.per_domain]])
        return np.sort(np.concatenate(drawn)) if drawn else None

    def whole(self) -> bool:
        return super().whole() and self.per_domain == 10_000

    def _class_folders(self) -> None:
        """Class folders would not tell the domains."""

    def _wanted_layout(self) -> str:
        return f"{super()._wanted_layout()}, or the released <domain>/<class>/* with <domain>_train.txt and _test.txt"

    def _lists(self, side: str) -> list[Path]:
        """The lists of the folder as released, in order of the domains."""
        return sorted(self._folder().glob(f"*_{side}.txt"))

    def _from_released_folder(self) -> Dataset:
        names = tuple(file.name.removesuffix("_train.txt") for file in self._lists("train"))
        others = tuple(file.name.removesuffix("_test.txt") for file in self._lists("test"))
        if names != others:
            odd = min(set(names) ^ set(others))
            raise UserError(
                f"data.path={self.path}: {odd} has only one of its two lists", f"{odd}_train.txt and {odd}_test.txt"
            )
        listed = {side: self._listed(side) for side in ("train", "test")}
        _, labels, domains = listed["train"]
        drawn = self._drawn(domains)
        listed["train"] = self._taken(listed["train"], drawn)
        classes = self._first_classes(listed["train"][1])
        splits: list[Split] = []
        for side, (files, labels, domains) in listed.items():
            kept = self._kept(side, labels, classes, domains)
            files, labels, domains = self._taken((files, labels, domains), kept)
            splits.append(image_split(labels, FileImages(self._folder(), files), domains))
        return Dataset(self.name, *splits, domain_names=names, origin="local files as released")

    @staticmethod
    def _taken(
        listed: tuple[list[Path], np.ndarray, np.ndarray], kept: np.ndarray | None
    ) -> tuple[list[Path], np.ndarray, np.ndarray]:
        files, labels, domains = listed
        return listed if kept is None else ([files[row] for row in kept], labels[kept], domains[kept])

    def _listed(self, side: str) -> tuple[list[Path], np.ndarray, np.ndarray]:
        """Files, labels (n,) and domains (n,) in the order of the lists."""
        root = self._folder()
        files: list[Path] = []
        labels: list[int] = []
        domains: list[int] = []
        for domain, text in enumerate(self._lists(side)):
            for number, line in enumerate(text.read_text().splitlines(), start=1):
                name, _, label = line.rpartition(" ")
                if not name or not label.isdigit():
                    raise UserError(f"data.path={root}: line {number} of {text.name} is {line!r}", "<path> <label>")
                files.append(root / name)
                labels.append(int(label))
                domains.append(domain)
        return files, np.asarray(labels, dtype=np.int64), np.asarray(domains, dtype=np.int64)
