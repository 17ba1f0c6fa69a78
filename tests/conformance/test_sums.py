"""What a server adds up may come in any order, and be of samples that are dealt among clients in any way."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fcl_bench.protocol.context import WireFormat
from fcl_bench.protocol.fields import SUM, Uploads
from fcl_bench.protocol.method import Method
from tests.conformance.cases import EVERY, context_for, method_of, tasks_for
from tests.methods.glfc_harness import quickly, short_descent  # noqa: F401  # a fixture
from tests.methods.training_harness import ImageTasks, learn_images
from tests.small_methods import NAMES, trains_by_gradient

FLOAT64 = WireFormat(torch.float64)
#: Where the order counts: of batches, of merges that drop directions, and of bases, whose signs follow from it.
IN_ORDER = {"centralised", "fedran", "fedprotip"}
#: Where single uploads say nothing that depends on who has which samples, although they are no sums.
EXACT = {"afl", "afcl", "centralised_ridge"}


def summed(name: str) -> bool:
    if name in NAMES and trains_by_gradient(name):
        return False
    method = method_of(name)
    declared = Uploads.of(method, context_for(method)).declared
    return all(field.combine == SUM for schema in declared.values() for field in schema.values())


def assert_close(method: Method, *ways: tuple[ImageTasks, list[int] | None]) -> None:
    """The models after both ways are the same but for rounding."""
    context = dataclasses.replace(context_for(method, FLOAT64), recurring=True)
    one, other = (learn_images(method, context, tasks, order).model() for tasks, order in ways)
    assert one.keys() == other.keys()
    for key, value in one.items():
        torch.testing.assert_close(other[key], value, rtol=1e-5, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.slow_cases("coda_prompt", "cprompt", "lga", "lorm", "target")
@pytest.mark.parametrize("name", [name for name in EVERY if name not in IN_ORDER])
@quickly
def test_the_order_of_turns_changes_nothing_but_rounding(name):
    method = method_of(name)
    if name in NAMES and trains_by_gradient(name):
        method = dataclasses.replace(method, training=dataclasses.replace(method.training, rounds=1))
    assert_close(method, (tasks_for(method), None), (tasks_for(method), [2, 1, 0]))


@pytest.mark.parametrize("name", [name for name in EVERY if name in EXACT or summed(name)])
def test_the_sums_of_all_clients_are_those_of_one(name):
    method = method_of(name)
    tasks = tasks_for(method)
    pooled = [[tuple(torch.cat(parts) for parts in zip(*clients, strict=True))] for clients in tasks]
    assert_close(method, (tasks, None), (pooled, None))


def test_the_methods_whose_fields_are_sums_are_among_them():
    assert {name for name in EVERY if summed(name)} >= {"stsa", "air", "ds_al", "fedncm", "fedlda", "ranpac"}
