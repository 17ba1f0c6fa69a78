"""Tiny copies of the hub's data sets, in the layout of each: same paths, columns and types, a few images a class.

Every image says what it is: its pixel is (its label, its domain or 0, a number of its own).
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from PIL import Image

from fcl_bench.data.sources.vtab import PARTS

DOMAINS = ["clipart", "infograph", "painting", "quickdraw", "real", "sketch"]


def png(*colour: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (3, 2), colour).save(buffer, "PNG")
    return buffer.getvalue()


def write_rows(path: Path, rows: list[dict[str, Any]], types: dict[str, Any], image: str = "image") -> None:
    """One parquet file; `rows` hold each column's value, the image as bytes."""
    import datasets

    columns = {name: [row[name] for row in rows] for name in rows[0]}
    columns[image] = [{"bytes": content, "path": None} for content in columns[image]]
    path.parent.mkdir(parents=True, exist_ok=True)
    features = datasets.Features({image: datasets.Image(), **types})
    datasets.Dataset.from_dict(columns, features=features).to_parquet(path)


def shards(folder: Path, split: str, count: int, rows: list[dict[str, Any]], types: dict[str, Any], image: str) -> None:
    for number in range(count):
        begin, end = len(rows) * number // count, len(rows) * (number + 1) // count
        write_rows(folder / f"{split}-{number:05d}-of-{count:05d}.parquet", rows[begin:end], types, image)


def labelled(labels: list[int], image: str, label: str, first: int = 0) -> list[dict[str, Any]]:
    return [{image: png(value, 0, first + number), label: value} for number, value in enumerate(labels)]


def cifar10(root: Path) -> None:
    import datasets

    types = {"label": datasets.ClassLabel(names=[f"class {number}" for number in range(10)])}
    folder = root / "uoft-cs/cifar10/plain_text"
    shards(folder, "train", 1, labelled([3, 1, 0, 1], "img", "label"), types, "img")
    shards(folder, "test", 1, labelled([0, 1, 3], "img", "label", 100), types, "img")


def cifar100(root: Path) -> None:
    import datasets

    types = {"fine_label": datasets.Value("int64"), "coarse_label": datasets.Value("int64")}
    folder = root / "uoft-cs/cifar100/cifar100"
    for split, labels, first in (("train", [7, 5, 7, 5], 0), ("test", [5, 7], 100)):
        rows = [{**row, "coarse_label": 19} for row in labelled(labels, "img", "fine_label", first)]
        shards(folder, split, 1, rows, types, "img")


def tiny_imagenet(root: Path) -> None:
    import datasets

    types = {"label": datasets.ClassLabel(names=[f"n{number:08d}" for number in range(200)])}
    folder = root / "zh-plus/tiny-imagenet/data"
    write_rows(folder / "train-00000-of-00001-1359597a978bc4fa.parquet", labelled([9, 8, 9], "image", "label"), types)
    write_rows(folder / "valid-00000-of-00001-70d52db3c749a935.parquet", labelled([8, 9], "image", "label", 100), types)


def imagenet_r(root: Path, per_class: int = 10) -> None:
    import datasets

    types = {"wnid": datasets.Value("string"), "class_name": datasets.Value("string")}
    names = ["n02", "n01", "n03"]
    rows = [
        {"image": png(int(name[1:]) - 1, 0, number), "wnid": name, "class_name": f"the {name}"}
        for number in range(per_class)
        for name in names
    ]
    shards(root / "axiong/imagenet-r/test", "test", 2, rows, types, "image")


def domainnet(root: Path, per_domain: int = 6) -> None:
    import datasets

    types = {"domain": datasets.ClassLabel(names=DOMAINS), "label": datasets.Value("int64")}
    folder = root / "wltjr1007/DomainNet/data"
    for split, count, files, first in (("train", per_domain, 2, 0), ("test", 4, 1, 100)):
        rows = [
            {"image": png(number % 2, domain, first + number), "domain": domain, "label": number % 2}
            for number in range(count)
            for domain in range(6)
        ]
        shards(folder, split, files, rows, types, "image")


def vtab(root: Path) -> None:
    """Twelve classes in each data set, whose labels run against their names except in Flowers."""
    import datasets

    for part in PARTS:
        names = [f"{part.name} {'abcdefghijkl'[11 - number]}" for number in range(12)]
        types = {"label": datasets.ClassLabel(names=names)}
        folder = root / part.repo / "data"
        for split, each, first in (("train", 2, 0), ("test", 1, 100)):
            rows = labelled([*range(12)] * each, "image", "label", first)
            shards(folder, split, 1, rows, types, "image")
        shards(folder, "validation", 1, labelled([0], "image", "label", 200), types, "image")


#: Every data set of the hub by the name of its YAML.
COPIES = {
    "cifar10": cifar10,
    "cifar100": cifar100,
    "tiny_imagenet": tiny_imagenet,
    "imagenet_r": imagenet_r,
    "domainnet": domainnet,
    "vtab": vtab,
}
