"""Every method and stage, ordered from nodes with a default policy: what left them holds no single sample.

The methods' own declarations are not trusted here: the uploads are compared with the samples themselves.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from fcl_bench.engine.remote.replies import deserialise
from fcl_bench.errors import UserError
from fcl_bench.flower.policy import OPEN, Policy
from tests.flower.fake_superlink import FakeSuperLink, reached
from tests.small_methods import NAMES, short_run
from tests.small_runs import run_in

#: A benchmark's data stand for the site's own, since few methods work on ready features.
DEFAULT = Policy(own_data=False)
SMALL = ("data=digits", "clients=2", "tasks=2", "beta=10", "logger=none", "transport=flower", "transport.deadline=60")
#: Methods of which nothing that holds samples may leave, or whose clients would keep them; and by which number.
REFUSED = {
    **dict.fromkeys(("centralised", "centralised_ridge", "centralised_softmax", "glfc", "lga"), 12),
    "fedicarl": 13,
}
#: Knobs with which a server might get at single samples under the name of a method that is allowed.
ATTEMPTS = {
    "a sum for each few samples": ("method=stsa_e", "method.dummy_clients=300"),
    "few samples at each client": ("method=afl", "clients=100"),
    "few samples at each client, trained": (
        "method=fedavg",
        *short_run("fedavg")[1:],
        "clients=100",
        "beta=0.1",
        "partition.min_size=0",
    ),
    "few samples of some classes": ("method=fedfecam", "clients=20", "beta=0.1"),
    "few samples of some classes, sketched": ("method=gaussian_sketch", "clients=20", "beta=0.1"),
    "gradients of prototypes": ("method=glfc", *short_run("glfc")[1:], "method.memory=0"),
    "gradients of prototypes in LGA": ("method=lga", *short_run("lga")[1:], "method.memory=0"),
    "an autoencoder for each class": ("method=fedcbc", *short_run("fedcbc")[1:], "clients=60"),
}


class Watch:
    """What left the nodes: messages, and the samples that their clients have."""

    def __init__(self, link: FakeSuperLink) -> None:
        self.messages = []
        self._link = link
        for name, worker in link.workers.items():
            worker.answer = self._watched(name, worker.answer)

    def _watched(self, name, answer):
        def watched(request):
            blobs = answer(request)
            found = [deserialise(blob) for blob in blobs]
            self.messages += [(name, each.message) for each in found if each.kind == "reply"]
            return blobs

        return watched

    def samples(self, name: str) -> np.ndarray:
        federation = self._link.workers[name]._federation
        inputs = federation.node.data._inputs
        return inputs.reshape(len(inputs), -1).double().cpu().numpy()


def copies(tensor: np.ndarray, samples: np.ndarray) -> int:
    """How many rows, columns or parts of a tensor are a multiple of a sample."""
    d = samples.shape[1]
    if not tensor.size or tensor.size % d:
        return 0
    directions = samples / np.linalg.norm(samples, axis=1, keepdims=True)
    found = 0
    for rows in (tensor.reshape(-1, d), tensor.reshape(d, -1).T):
        length = np.linalg.norm(rows, axis=1)
        rows = rows[length > 0] / length[length > 0, None]
        found += int((np.abs(rows @ directions.T) > 1 - 1e-9).any(axis=1).sum())
    return found


def ordered(tmp_path, monkeypatch, *overrides, clients=((0,), (1,)), policy=DEFAULT):
    """What left the nodes, and why the run ended."""
    link = FakeSuperLink(tmp_path / "nodes")
    for own in clients:
        link.add_node(*own, policy=policy)
    watch, why = Watch(link), ""
    try:
        with reached(link, monkeypatch):
            run_in(tmp_path / "run", *SMALL, *overrides)
    except UserError as error:
        why = str(error)
    return watch, why


def held(watch: Watch) -> list[str]:
    """The fields in which samples left."""
    every = [(name, message.stage, *one) for name, message in watch.messages for one in message.items()]
    return [f"{s}/{field}" for name, s, field, t in every if copies(t.double().numpy(), watch.samples(name))]


def lines(tmp_path) -> list[dict]:
    found = [path.read_text().splitlines() for path in sorted((tmp_path / "nodes").rglob("ledger.jsonl"))]
    return [json.loads(line) for each in found for line in each]


def require_groups(tmp_path, watch):
    """The ledger has every message that left, none of them over fewer than five samples."""
    turns = [line for line in lines(tmp_path) if line["kind"] == "turn"]
    assert len([line for line in turns if line["left"]]) == len(watch.messages)
    for line in turns:
        least = [about["least"] for about in line["fields"].values() if about["least"] is not None]
        assert not line["left"] or min(least, default=5) >= 5


@pytest.mark.slow
@pytest.mark.parametrize("method", NAMES)
def test_no_method_gets_single_samples(tmp_path, monkeypatch, method):
    watch, why = ordered(tmp_path, monkeypatch, *short_run(method))
    assert not held(watch)
    require_groups(tmp_path, watch)
    if method in REFUSED:
        assert f"error {REFUSED[method]}" in why
    else:
        assert why == ""
        assert watch.messages


@pytest.mark.slow
@pytest.mark.parametrize("overrides", ATTEMPTS.values(), ids=ATTEMPTS)
def test_no_knob_gets_single_samples(tmp_path, monkeypatch, overrides):
    count = next((int(each[8:]) for each in overrides if each.startswith("clients=")), 2)
    own = (tuple(range(0, count, 2)), tuple(range(1, count, 2)))
    watch, why = ordered(tmp_path, monkeypatch, *overrides, clients=own)
    assert not held(watch)
    require_groups(tmp_path, watch)
    assert "error 12" in why


def test_the_samples_are_found_where_a_site_lets_everything_out(tmp_path, monkeypatch):
    watch, why = ordered(tmp_path, monkeypatch, "method=centralised_ridge", policy=OPEN)
    assert why == ""
    assert set(held(watch)) == {"statistics/Z"}
