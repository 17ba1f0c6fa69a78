"""Joint training: plain SGD over all samples so far."""

from __future__ import annotations

import pytest
import torch

from fcl_bench.methods.averaging.centralised import Centralised
from fcl_bench.training.knobs import Training
from tests.methods.plain_training import (
    FAST,
    differing,
    made_tasks,
    plainly,
    state_of,
)
from tests.methods.training_harness import (
    federation_of,
    learn_images,
    tiny_context,
)


def joint(restart: bool = True, **knobs) -> Centralised:
    return Centralised(training=Training(**{**FAST, "momentum": 0.9, "augment": "crop_flip", **knobs}), restart=restart)


@pytest.mark.slow
def test_centralised_is_plain_sgd_over_all_samples_so_far_bit_for_bit():
    """In the order in which they came; from the initial network at every task."""
    context, tasks = tiny_context(), made_tasks([[20, 7], [0, 25], [9, 9]])
    method = joint(rounds=2, epochs=2, schedule="cosine")
    states = []
    learn_images(method, context, tasks, after=lambda _, server: states.append(state_of(server)))
    merged = [tuple(torch.cat([parts[i] for parts in clients]) for i in (0, 1)) for clients in tasks]
    for done, state in enumerate(states, start=1):
        plain = plainly(context, method.training, merged[:done], joint=True).state_dict()
        for name, value in state.items():
            assert torch.equal(value, plain[name]), (done, name)


def test_centralised_does_not_care_who_held_a_sample():
    """The same samples in the same order, dealt to one client, to two, to four."""
    images, labels = made_tasks([[40]])[0][0]
    models = []
    for sizes in ([40], [13, 27], [1, 0, 30, 9]):
        shards = list(zip(images.split(sizes), labels.split(sizes), strict=True))
        models.append(learn_images(joint(), tiny_context(), [shards]).model())
    assert not differing(models[0], models[1])
    assert not differing(models[0], models[2])


@pytest.mark.slow
def test_a_restart_forgets_what_earlier_tasks_trained_and_without_one_it_counts():
    context, tasks = tiny_context(), made_tasks([[20, 7], [9, 16]])

    def spoil(_, server):
        server.network.load({name: torch.full_like(value, 0.01) for name, value in server.network.state().items()})

    for restart in (True, False):
        method, models = joint(restart), []
        for spoilt in (False, True):
            federation = federation_of(method, context, tasks)
            server = federation.server
            federation.run(
                lambda done, server=server, spoilt=spoilt: (
                    spoil(None, server) if spoilt and done.state.tasks_done == 1 else None
                )
            )
            models.append(server.model())
        assert bool(differing(*models)) is not restart


def test_centralised_uploads_bytes_and_labels_and_gets_nothing():
    samples = [[12, 9, 0, 0], [9, 9, 0, 11], [8, 0, 9, 8]]
    ledger = federation_of(joint(), tiny_context(size=9), made_tasks(samples, size=9)).run(lambda _: None).ledger
    assert len(ledger.uploads) == 3 * 4
    for row in ledger.uploads:
        count = samples[row.task][row.client]
        assert (row.up_bytes, row.down_bytes, row.stage) == (count * (3 * 9 * 9 + 4), 0, "samples")
