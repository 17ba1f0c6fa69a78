"""The engine over secure sums, for tests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fcl_bench.engine.in_process import InProcess
from fcl_bench.engine.loop import Federation
from fcl_bench.engine.transport import Transport
from fcl_bench.options.faults.choices import Faults, Faulty
from fcl_bench.options.secure.base import SecureSums
from fcl_bench.options.secure.party import Parties, simulated
from fcl_bench.options.secure.transport import SummedUploads, SummingTransport
from fcl_bench.protocol.fields import Uploads
from fcl_bench.protocol.method import Method
from tests.methods.harness import context_of
from tests.methods.training_harness import feature_tasks, federation_of, image_tasks, tiny_context
from tests.small_methods import architecture

#: Samples per task and client; one sample, none.
SIZES = [[12, 9, 8, 10], [10, 11, 9, 12], [1, 0, 11, 8]]


def federation(
    method: Method,
    secure: SecureSums | None,
    faults: Faults | None = None,
    sizes: list[list[int]] = SIZES,
    gram: str = "full",
) -> Federation:
    """The engine before its first task, over 2 classes per task.

    Args:
        method: what is run.
        secure: None: uploads travel as they are, in float64.
        faults: who fails.
        sizes: samples per task and client.
        gram: `wire.gram`.
    """

    def reached(method, context, *parts) -> Transport:
        masks = (
            []
            if secure is None
            else [Parties(secure, simulated(0, "run"), Uploads.of(method, context), gram == "packed")]
        )
        inner: Transport = InProcess.of(method, context, *parts, middleware=masks)
        inner = inner if faults is None else Faulty(inner, faults, 0)
        if secure is None:
            return inner
        return SummingTransport(inner, secure, 0, Uploads.of(method, context).open_stages())

    classes = [2] * len(sizes)
    if method.trains_network:
        context = tiny_context(architecture=architecture(method.name), wire="float64")
        tasks = image_tasks(np.random.default_rng(0), classes, sizes)
    else:
        context = context_of(6, gram=gram)
        tasks = feature_tasks(0, classes, sizes)
        # Features as behind a ReLU, which all methods take.
        tasks = [[(Z.abs(), labels) for Z, labels in task] for task in tasks]
    context = replace(context, sums=secure is not None)
    steps = [] if secure is None else [lambda accounting, validation: SummedUploads(accounting, context)]
    return federation_of(method, context, tasks, transport=reached, steps=steps)
