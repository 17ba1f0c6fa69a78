"""Uploads under the papers' own conventions, so that their tables can be checked to the printed digit.

The ledger counts what is really sent; this counts what a paper's table counts. Each `*_values` is the number of values
in one upload with label columns for `classes` classes; a convention then says which classes count, how many bytes a
value has, and whether tasks are summed.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence

import torch

from fcl_bench.methods.closed_form.afcl import AFCL
from fcl_bench.methods.closed_form.afl import AFL
from fcl_bench.methods.closed_form.air import AIR
from fcl_bench.methods.closed_form.centred_sketch import CentredSketch
from fcl_bench.methods.closed_form.fedran import FedRAN
from fcl_bench.methods.closed_form.stsa import STSA
from fcl_bench.methods.closed_form.stsa_e import STSAE
from fcl_bench.methods.data_free.lander import LANDER
from fcl_bench.protocol.context import Context
from fcl_bench.protocol.method import Method

MIB = 2**20


@functools.singledispatch
def accounting(method: Method, context: Context, classes_per_task: Sequence[int]) -> dict[str, float]:
    """Return one client's uploads as the papers count them, in MiB; empty for a method that is not in their tables.

    `fedran_mib` (FedRAN's Table 4): one task's upload in float64 with label columns for all classes of the stream.
    `stsa_mib` (STSA's Table 5): the uploads of all tasks in float32, each with the task's own classes. For LANDER, as
    in that table, it is what is exchanged after the first task, including downloads.

    Args:
        method: the method; its class determines what it sends.
        context: its number of features counts if M is None, its wire type for a rank under a budget of bytes; all
            classes where some come back.
        classes_per_task: c_t.
    """
    return {}


@accounting.register(AFL)
@accounting.register(AFCL)
@accounting.register(STSA)
def _(method: AFL | AFCL | STSA, context: Context, classes_per_task: Sequence[int]) -> dict[str, float]:
    M = method.dimension(context)
    return _both(lambda classes: stsa_values(M, classes), context, classes_per_task)


@accounting.register(AIR)
def _(method: AIR, context: Context, classes_per_task: Sequence[int]) -> dict[str, float]:
    M = method.dimension(context)
    return _both(lambda classes: stsa_values(M, classes) + classes, context, classes_per_task)


@accounting.register(STSAE)
def _(method: STSAE, context: Context, classes_per_task: Sequence[int]) -> dict[str, float]:
    M, groups = method.dimension(context), method.dummy_clients
    # FedRAN's table charges STSA-E for K_D + 1 groups.
    in_fedran = stsa_e_values(M, context.all_classes(classes_per_task), groups + 1)
    return _both(lambda classes: stsa_e_values(M, classes, groups), context, classes_per_task, in_fedran)


@accounting.register(FedRAN)
def _(method: FedRAN, context: Context, classes_per_task: Sequence[int]) -> dict[str, float]:
    M = method.dimension(context)
    ranks = {classes: method.feasible_rank(context, classes) for classes in classes_per_task}
    in_fedran = fedran_values(M, max(ranks.values()), context.all_classes(classes_per_task))
    return _both(lambda classes: fedran_values(M, ranks[classes], classes), context, classes_per_task, in_fedran)


@accounting.register(CentredSketch)
def _(method: CentredSketch, context: Context, classes_per_task: Sequence[int]) -> dict[str, float]:
    M, d = method.dimension(context), context.inputs
    twice = method.remainder == "gaussian" and method.M is not None

    def values(classes: int) -> int:
        # With the backbone's features, the Gaussian remainder sends the same except for the counts.
        of_inputs = centred_sketch_values(d, method.input_rank, classes, centre=False) if twice else 0
        of_inputs += d - 1 if twice and method.input_remainder == "diagonal" else 0
        return centred_sketch_values(M, method.rank, classes, method.centre) + of_inputs

    return _both(values, context, classes_per_task)


@accounting.register(LANDER)
def _(method: LANDER, context: Context, classes_per_task: Sequence[int]) -> dict[str, float]:
    network = method.build_network(context)
    body, row = sum(value.numel() for value in network.state().values()), network.dimension + 1
    most = context.all_classes(classes_per_task)
    seen = [min(classes, most) for classes in itertools.accumulate(classes_per_task)]
    return {"stsa_mib": lander_mib(method, body, row, method.start(context).size, seen)}


def _both(
    values: Callable[[int], int], context: Context, classes_per_task: Sequence[int], in_fedran: int | None = None
) -> dict[str, float]:
    """Return both conventions' MiB for uploads of `values(classes)` values; FedRAN's may have `in_fedran` values."""
    return {
        "fedran_mib": 8 * (in_fedran or values(context.all_classes(classes_per_task))) / MIB,
        "stsa_mib": sum(4 * values(classes) for classes in classes_per_task) / MIB,
    }


def fedran_values(M: int, rank: int, classes: int) -> int:
    """Return the count of FedRAN's V, sigma and B at the nominal rank (Eq. 11)."""
    return M * rank + rank + M * classes


def stsa_values(M: int, classes: int) -> int:
    """Return the count of STSA's G and C; of AFL's and AFCL's C_k and W_k too, with M the width of the features."""
    return M * M + M * classes


def stsa_e_values(M: int, classes: int, dummy_clients: int) -> int:
    """Return the count of STSA-E's class sums and counts of every dummy client."""
    return (M + 1) * classes * dummy_clients


def centred_sketch_values(M: int, rank: int, classes: int, centre: bool) -> int:
    """Return the count of the sketch's V, sigma, class sums, counts (only if it centres) and noise."""
    return M * (rank + classes) + rank + 1 + (classes if centre else 0)


def lander_mib(method: LANDER, body: int, row: int, side: int, seen: Sequence[int]) -> float:
    """Return what a client of LANDER exchanges after the first task, downloads and uploads (MiB).

    It is the model of all classes so far in every round, and once per task all kept images, with one byte per label.

    Args:
        body: values of the network without its head, including the mapping to anchors.
        row: values of the head per class.
        side: of the images, in pixels.
        seen: how many classes each task's model has.
    """
    images = method.synthesis.stored if method.replays else 0
    models = sum(2 * method.training.rounds * (body + row * classes) for classes in seen[1:])
    return (4 * models + (len(seen) - 1) * images * (3 * side**2 + 1)) / MIB


def rounds_mib(state: Iterable[torch.Tensor], rounds: int) -> float:
    """Return what a gradient method uploads per task (MiB): the whole model state with buffers, in every round."""
    return rounds * sum(tensor.numel() * tensor.element_size() for tensor in state) / MIB
