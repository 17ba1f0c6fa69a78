"""What the papers' communication tables count, from the methods' own `accounting`: no run is needed.

FedRAN's Table 4 is lost in the copy of the paper but for its ratios; its megabytes stand here as the project's
specification lists them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pandas as pd
import torch

from fcl_bench.data.splits.base import even_sizes
from fcl_bench.papers.byte_conventions import accounting, rounds_mib
from fcl_bench.papers.matching import overrides, settings_of, words_without_key
from fcl_bench.protocol.problem import Problem
from fcl_bench.protocol.wire import WIRE_DTYPES, WireFormat

CONVENTIONS = ("fedran_mib", "stsa_mib")
RELATIVE = "communication relative to FedRAN"
#: Metrics of printed numbers that are sizes under a paper's convention.
SIZES = (*CONVENTIONS, RELATIVE)
#: FedRAN's Table 4: column, data, rank of FedRAN, FedRAN's megabytes and STSA-E's.
_TABLE_4 = (
    ("CIFAR-100", "cifar100", 2048, "134.27", "194.59"),
    ("ImageNet-R", "imagenet_r", 2048, "140.52", "389.18"),
    ("VTAB", "vtab", 512, "35.13", "97.29"),
)
#: Rounds of training that TARGET is charged for, and the data on which its ResNet-18 has the 3 x 3 stem.
_TARGET_ROUNDS, _TARGET_CIFAR_STEM = 100, ("cifar100",)


def lost_megabytes() -> pd.DataFrame:
    """Table 4's megabytes of FedRAN and STSA-E, as `printed()` would have them."""
    rows = []
    for column, data, rank, fedran, stsa_e in _TABLE_4:
        for row, method, value, knobs in (
            ("FedRAN", "fedran", fedran, f"method.M=8192 method.rank={rank} method.ridge=0.001"),
            ("STSA", "stsa_e", stsa_e, "method.M=5000 method.dummy_clients=50"),
        ):
            tasks = "" if data == "imagenet_r" else "5"
            cell = {
                "table": "Table 4",
                "row": row,
                "column": f"{column} / cost",
                "method": method,
                "metric": "fedran_mib",
            }
            cell |= {"value": value, "spread": "", "unit": "MB", "data": data, "backbone": "resnet18", "tasks": tasks}
            rows.append(
                {**cell, "clients": "5", "beta": "", "setting": knobs, "paper": "fedran", "number": float(value)}
            )
    return pd.DataFrame(rows).assign(spread_number=np.nan)


def nominal(cell: pd.Series) -> float | None:
    """The number that a printed cell of a communication table should be; None where it is of no such table."""
    if cell["metric"] == RELATIVE:
        own = _target_mib(cell["data"]) if cell["row"] == "TARGET" else nominal(_counted_as_fedran(cell))
        # The paper divides by its rounded megabytes: TARGET's 31.90 would be 31.91.
        return None if own is None else own / _fedran_on(cell["data"])
    if cell["metric"] not in CONVENTIONS or not cell["method"] or words_without_key(cell["setting"]):
        return None
    # FedRAN's count has all classes of the data in every task, however they are spread over tasks.
    return _accounting(cell, lambda sizes: [sum(sizes)] if cell["metric"] == "fedran_mib" else sizes, cell["metric"])


def as_sent(cell: pd.Series) -> float | None:
    """One accounting for all (MiB): one task's upload in float32 with the task's own classes, at the nominal rank."""
    if cell["metric"] not in SIZES or not cell["method"] or words_without_key(cell["setting"]):
        return None
    return _accounting(cell, lambda sizes: [max(sizes)], "stsa_mib", of_tasks=True)


def _accounting(
    cell: pd.Series, tasks: Callable[[list[int]], list[int]], convention: str, of_tasks: bool = False
) -> float | None:
    """The method's own accounting; None where the cell does not say enough for it.

    Args:
        cell: of a method of ours, with a setting that keys of ours say.
        tasks: c_t of the stream -> c_t to be counted.
        convention: one of `CONVENTIONS`.
        of_tasks: whether it has to be known how the classes are spread over tasks.
    """
    settings = settings_of(overrides(cell))
    classes = (settings.resolved["data"].get("about") or {}).get("classes")
    # With random features no size depends on the backbone's; without, its width would have to be known.
    if classes is None or getattr(settings.method, "M", None) is None:
        return None
    sizes = [classes]
    if of_tasks or convention == "stsa_mib":
        if not cell["tasks"] or settings.split.name != "class_incremental" or getattr(settings.split, "first", None):
            return None
        sizes = even_sizes(classes, settings.scalars.tasks)
    wire = WireFormat(WIRE_DTYPES["float32"])
    problem = Problem(1, settings.scalars.seed, torch.float64, torch.device("cpu"), wire)
    return accounting(settings.method, problem, tasks(sizes))[convention]


def _fedran_on(data: str) -> float:
    """FedRAN's megabytes, as printed."""
    [printed] = [float(fedran) for _, name, _, fedran, _ in _TABLE_4 if name == data]
    return printed


def _counted_as_fedran(cell: pd.Series) -> pd.Series:
    return pd.concat([cell.drop("metric"), pd.Series({"metric": "fedran_mib"})])


@functools.cache
def _target_mib(data: str) -> float:
    """TARGET's upload for a task: 100 rounds of a ResNet-18's float32 state with its batch-norm buffers."""
    import timm

    classes = settings_of((f"data={data}",)).resolved["data"]["about"]["classes"]
    with torch.device("meta"):  # sizes only
        network = timm.create_model("resnet18", num_classes=classes)
        if data in _TARGET_CIFAR_STEM:
            network.conv1 = torch.nn.Conv2d(3, 64, 3, bias=False)
    return rounds_mib(
        (tensor for tensor in network.state_dict().values() if tensor.is_floating_point()), _TARGET_ROUNDS
    )
