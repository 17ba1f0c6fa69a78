"""What the papers' communication tables count, by `Method.paper_bytes`: no run is needed."""

from __future__ import annotations

import itertools
import re

import pandas as pd
import torch

from fcl_bench.config import Settings
from fcl_bench.data.splits.base import even_sizes
from fcl_bench.methods.data_free.lander import LANDER
from fcl_bench.methods.projection.fedprotip import FedProTIP
from fcl_bench.methods.projection.fot import FOT
from fcl_bench.papers.matching import overrides, settings_of, words_without_key
from fcl_bench.papers.printed import lost_megabytes
from fcl_bench.protocol.context import WIRE_DTYPES, Context, WireFormat
from fcl_bench.results.measures import by_task

MIB = 2**20
CONVENTIONS = ("fedran_mib", "stsa_mib")
RELATIVE = "communication relative to FedRAN"
#: FedProTIP's Table 19, whose MB are MiB: the sketches of its bases.
SKETCHES = "upload per client and task: sketches"
#: Metrics of printed numbers that are sizes under a paper's convention.
SIZES = (*CONVENTIONS, RELATIVE, SKETCHES)

#: Of FedProTIP's ResNet-18: 512 channels in 2 x 2 cells.
_FEATURES = 2048
#: The channels of a ResNet-18's four stages. A network is counted here, not built, which needs no import of timm.
_WIDTHS = (64, 128, 256, 512)


def nominal(cell: pd.Series) -> float | None:
    """Return the number that a printed cell of a communication table should have; None for other tables.

    Args:
        cell: a row of `printed()`.

    Returns:
        MiB under the cell's convention; of the metric `RELATIVE` their ratio to FedRAN's.
    """
    if cell["metric"] == SKETCHES:
        return _sketches_mib(cell)
    if cell["paper"] == "fedprotip" and (sent := by_task(cell["metric"])):  # Table 9
        if sent.last == "model_mib":
            return _model_mib(cell, sent.task)
        return _activations_mib(cell) if (cell["method"], sent.last) == ("fot", "bases_mib") else None
    if cell["metric"] == RELATIVE:
        own = _target_mib(cell["data"]) if cell["row"] == "TARGET" else _counted(cell, "fedran_mib")
        # The paper divides by its rounded megabytes: TARGET's 31.90 would be 31.91.
        fedran = lost_megabytes().query("method == 'fedran'").set_index("data")["number"]
        return None if own is None else own / float(fedran[cell["data"]])
    if cell["metric"] == "stsa_mib" and cell["method"] == "lander":
        return _lander_mib(cell)
    return _counted(cell, cell["metric"]) if cell["metric"] in CONVENTIONS else None


def as_sent(cell: pd.Series) -> float | None:
    """Return MiB by one accounting for all: a task's upload in float32 with its own classes, at the nominal rank.

    None where the cell is of no communication table, or does not say how many classes a task has.
    """
    return _counted(cell, "stsa_mib", one_task=True) if cell["metric"] in SIZES else None


def _counted(cell: pd.Series, convention: str, one_task: bool = False) -> float | None:
    """Return MiB of the cell's method under one of `CONVENTIONS`; None if the cell does not say enough for it.

    Args:
        cell: a row of `printed()`.
        convention: one of `CONVENTIONS`.
        one_task: count the largest task alone, not all of them.
    """
    if not cell["method"] or words_without_key(cell["setting"]):
        return None
    settings = _settings(cell)
    classes = (settings.resolved["data"].get("about") or {}).get("classes")
    # With random features no size depends on the backbone's; without, its width would have to be known.
    if classes is None or getattr(settings.method, "M", None) is None:
        return None
    # FedRAN counts all classes of the data in every task, however they are distributed over tasks.
    sizes = [classes]
    if convention == "stsa_mib":
        if not cell["tasks"] or settings.split.name != "class_incremental" or getattr(settings.split, "first", None):
            return None
        sizes = even_sizes(classes, settings.scalars.tasks)
    wire = WireFormat(WIRE_DTYPES["float32"])
    context = Context(1, settings.scalars.seed, torch.float64, torch.device("cpu"), wire)
    return settings.method.paper_bytes(context, [max(sizes)] if one_task else sizes)[convention]


def _settings(cell: pd.Series) -> Settings:
    """Return the settings of the cell as far as sizes depend on them: no network, and not how one was adapted."""
    return settings_of(tuple(word for word in overrides(cell) if not re.match(r"(backbone|adapt)[.=]", word)))


def _model_mib(cell: pd.Series, task: int) -> float:
    """Return MiB: FedProTIP's network with the class weights of the tasks up to this one (from 1), sent once.

    It counts only weights, no batch-norm statistics, and a layer from the 2,048 features to 512, which only it has.
    """
    classes = sum(even_sizes(_classes(cell["data"]), int(cell["tasks"]))[:task])
    body, _ = resnet18(small_images=True)
    mapping = (_FEATURES + 1) * 512
    return 4 * (body + mapping + (_FEATURES + 1) * classes) / MIB


def _activations_mib(cell: pd.Series) -> float:
    """Return MiB of m_s columns of the inputs of every convolution (no classifier) that trains after the first task."""
    method = _settings(cell).method
    assert isinstance(method, FOT)
    assert method.columns is not None
    sides = [side for stage, _, side in convolutions(small_images=True) if stage > method.frozen_stages]
    return 4 * method.columns * sum(sides) / MIB


def _sketches_mib(cell: pd.Series) -> float:
    """Return MiB of s_l columns, at most d_l, of every one of the network's 21 layers, frozen or not."""
    method = _settings(cell).method
    assert isinstance(method, FedProTIP)
    sides = [*(side for _, _, side in convolutions(small_images=True)), _FEATURES]
    return 4 * sum(side * method.sketch_width(side) for side in sides) / MIB


def _target_mib(data: str) -> float:
    """Return MiB of TARGET's upload for a task: 100 rounds of a ResNet-18, on CIFAR-100 with the small images' stem."""
    weights, statistics = resnet18(small_images=data == "cifar100")
    return rounds_mib(weights + statistics + (_WIDTHS[-1] + 1) * _classes(data), rounds=100)


def _lander_mib(cell: pd.Series) -> float:
    """Return LANDER's MiB in STSA's Table 5, for a ResNet-18 with the stem for small images."""
    settings = _settings(cell)
    method, width = settings.method, _WIDTHS[-1]
    assert isinstance(method, LANDER)
    body = sum(resnet18(small_images=True)) + (width + 1) * method.anchor_size
    sizes = even_sizes(_classes(cell["data"]), settings.scalars.tasks)
    return method.exchanged_mib(body, width + 1, 32, list(itertools.accumulate(sizes)))


def _classes(data: str) -> int:
    return int(settings_of((f"data={data}",)).resolved["data"]["about"]["classes"])


def rounds_mib(values: int, rounds: int) -> float:
    """What a gradient method uploads per task (MiB): the whole model state with buffers, in float32, in every round."""
    return rounds * 4 * values / MIB


def convolutions(small_images: bool) -> list[tuple[int, int, int]]:
    """Return stage (0: the stem), channels and d_l, the numbers in one patch, per convolution of a ResNet-18."""
    layers = [(0, _WIDTHS[0], 3 * (3 if small_images else 7) ** 2)]
    inputs = _WIDTHS[0]
    for stage, width in enumerate(_WIDTHS, 1):
        layers += [(stage, width, 9 * inputs), *[(stage, width, 9 * width)] * 3]
        if width != inputs:
            layers.append((stage, width, inputs))  # of the shortcut, 1 x 1
        inputs = width
    return layers


def resnet18(small_images: bool) -> tuple[int, int]:
    """Return the numbers of weights and of batch-norm statistics of a ResNet-18 without a classifier."""
    layers = convolutions(small_images)
    channels = sum(channels for _, channels, _ in layers)
    return sum(channels * patch for _, channels, patch in layers) + 2 * channels, 2 * channels
