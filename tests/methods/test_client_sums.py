"""What clients and server keep in FedDyn and SCAFFOLD: interruptions, frozen rows, wires."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fcl_bench.methods.averaging.feddyn import FedDyn
from fcl_bench.methods.averaging.scaffold import Scaffold
from fcl_bench.training.knobs import Training
from tests.methods.drift_harness import COUNTS, SMALL
from tests.methods.plain_training import made_tasks, state_of
from tests.methods.training_harness import image_tasks, learn_images, tiny_context
from tests.methods.whole_runs import learnt

both = pytest.mark.parametrize("kind", [FedDyn, Scaffold])


@pytest.mark.slow_cases("FedDyn")
@both
def test_rows_of_frozen_heads_stay_where_only_some_of_their_classes_come_back(kind):
    rng = np.random.default_rng(0)
    first, second = image_tasks(rng, [3, 2], [[20, 16], [12, 9]])
    [back] = image_tasks(rng, [1], [[6, 5]])
    second = [(torch.cat([a, c]), torch.cat([b, d])) for (a, b), (c, d) in zip(second, back, strict=True)]
    ends = []
    method = kind(Training(**SMALL), frozen_heads=True)
    learn_images(method, tiny_context(), [first, second], after=lambda _, server: ends.append(state_of(server)))
    for name in ("weight", "bias"):
        before, after = (end[f"heads.0.{name}"] for end in ends)
        assert torch.equal(before[1:], after[1:])
        assert not torch.equal(before[0], after[0])


@pytest.mark.slow_cases(
    "bfloat16-FedDyn", "bfloat16-Scaffold", "float16-Scaffold", "float64-FedDyn", "float64-Scaffold"
)
@both
@pytest.mark.parametrize("wire", ["float16", "bfloat16", "float64"])
def test_every_wire_and_loss_classes_the_task_run(kind, wire):
    method = kind(Training(fraction=0.5, **SMALL), loss_classes="task")
    federation = learnt(method, tiny_context(wire=wire), made_tasks(COUNTS), unlabelled=[(1, 0)])
    assert all(bool(torch.isfinite(value).all()) for value in state_of(federation.server).values())
