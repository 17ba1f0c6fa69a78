"""What further rounds would bring the Gaussian sketch: softmax steps from what clients measure, and from drawn samples.

    .venv/bin/python -m benchmarks more_rounds 0,1,2,4,8 method.M=2048 dtype=float32 data=features \
        data.path=FEATURES.npz tasks=10

After the sketch's one round, each further round of a task is one step of `softmax_steps`. The server broadcasts W (M, C
classes so far), and each client answers with the gradient of its samples' loss there, of the same shape; the sum over
clients is that over all samples of the task, however they are dealt out. Classes of earlier tasks are drawn, as always.
Beside it, the same number of steps on drawn samples alone, which costs no bytes.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from fcl_bench.composition import composed
from fcl_bench.config import load_settings
from fcl_bench.engine.loop import Federation
from fcl_bench.engine.metrics import metrics
from fcl_bench.execution.inputs import prepare_inputs
from fcl_bench.execution.options import clients_of
from fcl_bench.execution.plan import make_plan
from fcl_bench.methods.closed_form.gaussian_sketch import GaussianSketchServer

#: Bytes of a number on a 16-bit wire.
_BYTES = 2


class _Rounds(GaussianSketchServer):
    """A server that hears in each softmax step the gradient of the task's own samples.

    Attributes:
        held: for each class, its samples (n, d), which the clients together hold.
    """

    held: dict[int, torch.Tensor]

    def drawn_samples(self, step: int) -> Iterator[tuple[torch.Tensor, int, float]]:
        own = set(self.columns.tolist())
        for Z, column, weight in super().drawn_samples(step):
            # What the server multiplies W by at first, step 0, it finds without a round.
            yield (self.held[column].to(Z), column, 1.0) if step and column in own else (Z, column, weight)


def line(rounds: int, measured: bool, overrides: list[str]) -> str:
    """One run, and its line of the table."""
    arguments = ["method=gaussian_sketch", f"method.softmax_steps={rounds}", *overrides]
    plan = make_plan(load_settings(composed(arguments)))
    stream, method = plan.dealt.stream, plan.settings.method
    with plan.settings.transport.connect() as link, tempfile.TemporaryDirectory() as scratch:
        inputs = prepare_inputs(plan, Path(scratch), link)
        if measured:
            learnt = np.concatenate(stream.train)
            columns = stream.train_columns[learnt]
            held = {int(c): inputs.train[torch.from_numpy(learnt[columns == c])] for c in np.unique(columns)}
            method.server_half = type("Rounds", (_Rounds,), {"held": held})
        transport = link.federate(clients_of(plan), inputs.train, Path(scratch))
        federation = Federation(method, plan.context, stream, transport, inputs.test, {}, steps=())
        state = federation.run(lambda _: None)
    found = metrics(state.answers["correct"], np.array([len(test) for test in stream.test]))
    columns = np.cumsum([len(task.columns) for task in stream.tasks])
    # Each round a client sends a gradient, and is sent as many numbers of W.
    gradients = (_BYTES * rounds * federation.server.dimension * columns) if measured else 0 * columns
    task, stream_bytes = state.ledger.rows["up_bytes"].max() + gradients[-1], gradients.sum()
    sizes = (task / 2**20, (state.ledger.communication()["up_total_max_bytes"] + stream_bytes) / 2**20)
    cells = [str(rounds), "clients" if measured else "drawn", *(f"{size:.3f}" for size in sizes)]
    return " | ".join([*cells, f"{found['A_avg']:.2f}", f"{found['A_T']:.2f}"])


def main(arguments: list[str]) -> None:
    counts, *overrides = arguments
    print("| rounds | gradients | MiB, last task | MiB, all tasks | A_avg | A_T |", "|---" * 6 + "|", sep="\n")
    for rounds in map(int, counts.split(",")):
        for measured in (False, True) if rounds else (False,):
            print(f"| {line(rounds, measured, overrides)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
