"""What a server adds up may come in any order, and be of samples that are dealt among clients in any way."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fcl_bench.protocol.context import WireFormat
from fcl_bench.protocol.fields import SUM, Uploads
from fcl_bench.protocol.method import Method
from tests.conformance.cases import EVERY, MORE, context_for, method_of, tasks_for
from tests.methods.glfc_harness import quickly, short_descent  # noqa: F401  # a fixture
from tests.methods.training_harness import ImageTasks, learn_images
from tests.small_methods import NAMES, trains_by_gradient

FLOAT64 = WireFormat(torch.float64)
#: Where the order counts: of batches, of merges that drop directions, and of bases, whose signs follow from it.
IN_ORDER = {"centralised", "fedran", "fedprotip"}
#: Methods that say that the partition changes nothing, with the knobs that make another one of them.
FREE = [
    (name, knobs)
    for name, knobs in [*((name, {}) for name in EVERY), *MORE]
    if method_of(name, **knobs).ignores_partition
]


def summed(name: str) -> bool:
    if name in NAMES and trains_by_gradient(name):
        return False
    method = method_of(name)
    declared = Uploads.of(method, context_for(method)).declared
    return all(field.combine == SUM for schema in declared.values() for field in schema.values())


def assert_close(method: Method, *ways: tuple[ImageTasks, list[int] | None]) -> None:
    """The models after both ways are the same but for rounding, which FedFeCAM's inverse roots enlarge."""
    rtol, atol = (1e-3, 1e-4) if method.name == "fedfecam" else (1e-5, 1e-6)
    context = dataclasses.replace(context_for(method, FLOAT64), recurring=True)
    one, other = (learn_images(method, context, tasks, order).model() for tasks, order in ways)
    assert one.keys() == other.keys()
    for key, value in one.items():
        torch.testing.assert_close(other[key], value, rtol=rtol, atol=atol, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.slow_cases("coda_prompt", "cprompt", "lga", "lorm", "target")
@pytest.mark.parametrize("name", [name for name in EVERY if name not in IN_ORDER])
@quickly
def test_the_order_of_turns_changes_nothing_but_rounding(name):
    method = method_of(name)
    if name in NAMES and trains_by_gradient(name):
        method = dataclasses.replace(method, training=dataclasses.replace(method.training, rounds=1))
    assert_close(method, (tasks_for(method), None), (tasks_for(method), [2, 1, 0]))


def dealt(clients: list, into: int) -> list:
    """The same samples, dealt to so many clients in turn."""
    inputs, labels = (torch.cat(parts) for parts in zip(*clients, strict=True))
    return [(inputs[first::into], labels[first::into].contiguous()) for first in range(into)]


@pytest.mark.parametrize("into", [1, 5])
@pytest.mark.parametrize(("name", "knobs"), FREE)
def test_a_method_that_ignores_the_partition_learns_the_same_from_any(name, knobs, into):
    method = method_of(name, **knobs)
    tasks = tasks_for(method)
    assert_close(method, (tasks, None), ([dealt(clients, into) for clients in tasks], None))


def test_every_method_of_sums_alone_says_so_and_no_other_but_those_that_recover_them():
    recover = {"afl", "afcl", "centralised_ridge", "fedfecam"}
    assert {name for name, _ in FREE} == {name for name in NAMES if summed(name)} | recover


def test_afl_that_keeps_its_regularisers_depends_on_the_partition_and_says_so():
    method = method_of("afl", ri=False)
    assert not method.ignores_partition
    tasks = tasks_for(method)
    with pytest.raises(AssertionError, match="W"):
        assert_close(method, (tasks, None), ([dealt(clients, 1) for clients in tasks], None))
