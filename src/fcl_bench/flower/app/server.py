"""The ServerApp: the engine's loop with a method's server half, over the nodes of a Flower run."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import flwr.serverapp
import numpy as np
import torch
from flwr.app import Context
from flwr.serverapp import Grid

from fcl_bench.cli.overrides import value_text
from fcl_bench.config import Settings
from fcl_bench.data.splits.base import Stream
from fcl_bench.engine.exchange import schema_of
from fcl_bench.engine.loop import Federation
from fcl_bench.engine.metrics import accuracy_matrix, pooled_accuracy
from fcl_bench.environment import choosing_kernels, computing
from fcl_bench.errors import UserError
from fcl_bench.flower.app import records
from fcl_bench.flower.app.body import Body, as_inputs
from fcl_bench.flower.app.plan import Tasks, halves, settings_of, shared, stream_of
from fcl_bench.flower.app.transport import REMEDY, NodesTransport

log = logging.getLogger("flwr")

#: Seconds that a round waits for its replies where nothing else is said.
_DEADLINE = 600.0


@dataclass(frozen=True)
class Learnt:
    """What a run has learnt after a task.

    Attributes:
        accuracy: A_1 to A_t in percent, on the test samples of all tasks so far; NaN without any.
        matrix: (t, t) in percent: accuracy on each task's test samples (column) after each task (row).
        model: the tensors that prediction needs, on the CPU.
        classes: the label of each column of the scores.
        federation: the engine's loop, whose `server` classifies, and whose `state.ledger` counts bytes and seconds.
    """

    accuracy: list[float]
    matrix: np.ndarray
    model: dict[str, torch.Tensor]
    classes: list[int]
    federation: Federation

    @classmethod
    def of(cls, federation: Federation) -> Learnt:
        stream, correct, done = federation.stream, federation.state.answers["correct"], federation.state.tasks_done
        return cls(
            pooled_accuracy(correct, stream.test_sizes)[:done].tolist(),
            accuracy_matrix(correct, stream.test_sizes)[:done, :done],
            {name: own.detach().cpu().clone() for name, own in federation.server.model().items()},
            stream.class_order[: stream.tasks[done - 1].columns_seen].tolist(),
            federation,
        )

    def __str__(self) -> str:
        done, totals = len(self.accuracy), self.federation.state.ledger.task_totals(len(self.accuracy) - 1)
        tested = f"{self.accuracy[-1]:.2f} % of the test samples of {len(self.classes)} classes"
        sent = f"{totals['up_bytes'] / 2**20:.3g} MiB up, {totals['client_seconds']:.3g} s at the clients"
        return f"task {done} of {len(self.federation.stream.tasks)}: {tested}; {sent}"


def ServerApp(
    method: str,
    *,
    tasks: Tasks | Callable[[Context], Tasks],
    classes: int | None = None,
    test: Callable[[Context], tuple[Any, Any]] | None = None,
    network: Body | None = None,
    after_task: Callable[[Context, Learnt], object] | None = None,
    keys: Mapping[str, Any] | None = None,
    **knobs: Any,
) -> flwr.serverapp.ServerApp:
    """A ServerApp that trains a method task by task with the clients of a `ClientApp`, and tests it after each.

    Args:
        method: as after `method=`.
        tasks: the labels of each task's classes; or T, over which the labels 0 to `classes` - 1 are spread in order; or
            a function that gives either from Flower's context.
        test: gives the test samples, given Flower's context, in the form of a client's; None: nothing is tested.
        network: the clients' too; see `client.ClientApp`.
        after_task: called with Flower's context and what has been learnt.
        keys: further keys of the configuration, such as {"seed": 1, "wire.dtype": "float64"}.
        knobs: of the method: `M=2048`, `training={"rounds": 5}`. The key `fcl-bench` of the project's run
            configuration has more, as typed after `fcl-bench`, and wins.

    Raises (when it runs):
        UserError: with one line, for what cannot work.
    """
    given = {**{f"method.{name}": value for name, value in knobs.items()}, **(keys or {})}
    typed = [f"method={method}", *(f"{key}={value_text(key, value)}" for key, value in given.items())]
    app = flwr.serverapp.ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        settings = settings_of(typed, context.run_config)
        inputs, labels = (None, []) if test is None else test(context)
        chosen = tasks(context) if callable(tasks) else tasks
        stream = stream_of(chosen, classes, np.asarray(labels, dtype=np.int64))

        def learnt(federation: Federation) -> None:
            found = Learnt.of(federation)
            log.info("%s", found)
            if after_task is not None:
                after_task(context, found)

        try:
            federation = _federation(grid, settings, network, stream, inputs)
            with choosing_kernels(settings.scalars.cudnn), computing(federation.context.threads):
                federation.run(learnt)
        except UserError as error:
            # The engine's other runs go on from a checkpoint where a client is lost; this one has none.
            if "checkpoint" in error.remedy:
                raise UserError(error.what, REMEDY) from None
            raise

    return app


def _federation(grid: Grid, settings: Settings, network: Body | None, stream: Stream, test: Any) -> Federation:
    """The engine's loop over the nodes, once these have told who their clients are."""
    trains, scalars, transport = settings.method.trains_network, settings.scalars, settings.transport
    body = None if network is None else network.trainable(scalars.seed)
    if trains and body is None:
        raise UserError(
            f"method={settings.method.name} trains a network, and the app has none",
            "network=Body(...) in both apps, or method.trains=features where the method has it",
        )
    deadline = getattr(transport, "deadline", None) or _DEADLINE
    weights = records.NONE if body is None else body.identity["weights"]
    nodes = NodesTransport(grid, len(stream.tasks), transport.minimum, deadline, scalars.seed, weights)
    nodes.meet()
    if not (inputs := nodes.inputs or (0 if body is None else body.dimension)):
        raise UserError(
            "the loaders give images, and the app has no network for them", "network=Body(...) in both apps"
        )
    run = {**shared(settings), "inputs": inputs, "clients": nodes.clients}
    run |= {"recurring": stream.recurring, "order": stream.class_order.tolist()}
    run["seen"] = [task.columns_seen for task in stream.tasks]
    method, context = halves(run, body)
    method.check(context, [len(task.columns) for task in stream.tasks])
    if test is None:
        test = np.zeros((0, 3, 1, 1), dtype=np.uint8) if trains else np.zeros((0, inputs))
    nodes.run = json.dumps(run)
    federation = Federation(
        method,
        context,
        stream,
        nodes,
        as_inputs(test, body, trains, context),
        method.audits(context),
        drops=scalars.drops,
        minimum=transport.minimum,
    )
    nodes.answered = lambda sent: schema_of(federation.server, stream.tasks[sent.task], sent.stage)
    return federation
