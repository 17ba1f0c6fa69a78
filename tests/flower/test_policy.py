"""A site's policy: which runs may use its samples, and which messages may leave."""

from __future__ import annotations

import getpass
import json
import socket
import subprocess

import numpy as np
import pytest
import torch
import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from fcl_bench.engine.remote.replies import deserialise, serialise
from fcl_bench.errors import UserError
from fcl_bench.flower import signing
from fcl_bench.flower.policy import OPEN, TEMPLATE, Policy, described
from fcl_bench.flower.refusals import DOES_NOT_FIT, NOT_SIGNED, RUN_FORBIDDEN, Refusal
from fcl_bench.flower.signing import opened, signed
from fcl_bench.flower.site import site_of
from fcl_bench.flower.worker import Worker
from fcl_bench.protocol.fields import CLASSES, SUM, Uploads, counts, gram_matrix, real, weights
from fcl_bench.protocol.message import Message
from fcl_bench.results.signing import read_key
from tests.flower.fake_superlink import FakeSuperLink, reached
from tests.flower.test_sites import GIVEN, SITES, divided
from tests.small_runs import run_in, settings_for


def test_init_writes_the_defaults(tmp_path):
    (tmp_path / "policy.yaml").write_text(TEMPLATE.read_text())
    assert Policy.read(str(tmp_path / "policy.yaml")) == Policy.read(None) == Policy()
    assert set(yaml.safe_load(TEMPLATE.read_text())) == set(vars(Policy()))
    assert Policy.read("none") == OPEN


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("smallest_group: 0", "policy.smallest_group=0"),
        ("smalest_group: 9", "policy.smalest_group"),
        ("[1, 2]", "has no lines KEY: VALUE"),
        ("a: [", "has no lines KEY: VALUE"),
    ],
)
def test_a_file_that_is_no_policy_is_refused(tmp_path, text, named):
    (tmp_path / "policy.yaml").write_text(text)
    with pytest.raises(UserError, match=named) as error:
        Policy.read(str(tmp_path / "policy.yaml"))
    assert "\n" not in str(error.value)


def test_the_smallest_sum_of_a_field_counts():
    fields = {
        "G": gram_matrix("M"),
        "B": real("M", "c", combine=SUM, columns=CLASSES, leaks="sums"),
        "n": counts("c"),
        "*": weights(),
        "each": real("M", "k"),
    }
    labels = torch.tensor([0, 0, 0, 1, 1])
    tensors = {name: torch.zeros(2, 2) for name in ("G", "B", "n", "body.weight", "body.bias", "each")}
    upload = Message(tensors, groups={"each": torch.tensor([-1, 7, 7, 7, 3]), "body.bias": torch.arange(5)})
    found = described(upload, "statistics", Uploads({"statistics": fields}), labels)
    assert {name: about["least"] for name, about in found.items()} == {"G": 5, "B": 2, "n": 5, "*": 1, "each": 1}
    assert found["*"] == {"tensors": 2, "least": 1}
    assert found["G"]["shape"] == [2, 2]
    nothing = described(Message({"G": torch.zeros(2, 2)}), "statistics", Uploads({"statistics": fields}), labels[:0])
    assert nothing["G"]["least"] is None
    Policy().require_groups(nothing)
    with pytest.raises(Refusal, match="B holds sums over 2 samples: policy smallest_group=5"):
        Policy().require_groups(found)
    OPEN.require_groups(found)


def site(tmp_path, *overrides, changes=None, policy=None):
    settings = settings_for(tmp_path, *overrides)
    run = {"id": "abc", "stage": "run", "config": settings.resolved, "inputs": 12, "recurring": False}
    own = {"out": str(tmp_path / "node"), **(changes or {})}
    return site_of({**run, "classes": [[0, 1], [2, 3]]}, own, [0], policy or Policy())


def test_a_server_cannot_name_a_file_of_the_site(tmp_path):
    divided(tmp_path)
    own, other = str(tmp_path / "site-0.npz"), str(tmp_path / "f.npz")
    with pytest.raises(Refusal, match="data=features is refused: policy own_data=true") as error:
        site(tmp_path, "data=features", f"data.path={other}", *GIVEN)
    assert error.value.code == RUN_FORBIDDEN
    with pytest.raises(Refusal, match="own_data=true"):
        site(tmp_path, *GIVEN, *SITES, f"data.path={own}")
    assert len(site(tmp_path, *GIVEN, *SITES, changes={"data.path": own}).inputs)
    anchors = tmp_path / "anchors.npz"
    np.savez(anchors, anchors=np.eye(4, 8, dtype=np.float32))
    lander = ("method=lander", "method.anchor_size=8", f"method.anchors={anchors}")
    with pytest.raises(Refusal, match="method.anchors names a file of this site"):
        site(tmp_path, *GIVEN[:-1], *SITES, *lander, changes={"data.path": own})


def test_a_server_cannot_name_classes_of_other_packages(tmp_path):
    config = {"method": {"_target_": "subprocess.Popen"}, "seed": 0}
    with pytest.raises(Refusal, match="method._target_=subprocess.Popen is refused"):
        Policy().require_classes(config)
    with pytest.raises(Refusal, match="fcl_benchmark"):
        Policy().require_classes({"method": {"_target_": "fcl_benchmark.Method"}})
    OPEN.require_classes(config)
    Policy(packages=["fcl_bench", "subprocess"]).require_classes(config)


def test_a_policy_may_name_the_methods_and_ask_for_noise(tmp_path):
    divided(tmp_path)
    own = {"data.path": str(tmp_path / "site-0.npz")}
    with pytest.raises(Refusal, match=r"method=afl is refused \(policy methods=\['stsa'\]\)"):
        site(tmp_path, *GIVEN, *SITES, changes=own, policy=Policy(methods=["stsa"]))
    with pytest.raises(Refusal, match="noise=none is refused: policy epsilon=8"):
        site(tmp_path, *GIVEN, *SITES, changes=own, policy=Policy(epsilon=8))
    noise = ("noise=gaussian", "noise.multiplier=1e-9", "method=stsa", "method.M=null")
    with pytest.raises(Refusal, match="noise=gaussian is refused"):
        site(tmp_path, *GIVEN[:-1], *SITES, *noise, changes=own, policy=Policy(epsilon=8))


def test_a_run_s_name_leads_to_no_other_folder(tmp_path, caplog):
    worker = Worker([0], tmp_path / "nodes", lambda run: pytest.fail("the site was made"), OPEN)
    (answer,) = worker.answer(serialise("delete", run={"id": "../../elsewhere", "stage": "run"}))
    assert deserialise(answer).kind == "failed"
    assert "is no name of a run" in caplog.text
    # Nor does it write lines of its own into the ledger.
    worker.answer(serialise("info", run={"id": "abc\nrefused: none\x1b[2K", "stage": "run"}))
    entries = [json.loads(line) for line in (tmp_path / "nodes" / "ledger.jsonl").read_text().splitlines()]
    assert [entry["run"] for entry in entries] == ["unknown", "unknown"]


def test_a_request_without_the_servers_signature_is_refused(tmp_path):
    for name in ("server", "other"):
        whole = ("openssl", "genpkey", "-algorithm", "ed25519", "-out", tmp_path / name)
        subprocess.run(whole, check=True)
        subprocess.run(("openssl", "pkey", "-in", whole[-1], "-pubout", "-out", tmp_path / f"{name}.pub"), check=True)
    own, other = (read_key("transport.key", str(tmp_path / name), "private") for name in ("server", "other"))
    server = Policy(server=str(tmp_path / "server.pub")).server_key
    request = b"some request"
    assert opened(request, None, {}) == opened(signed(request, None, 9), None, {}) == request
    assert opened(signed(request, own, 9), server, {}) == opened(signed(request, own, 9), None, {}) == request
    for wrong in (request, signed(request, other, 9), signed(request, own, 9) + b"!", b""):
        with pytest.raises(Refusal, match="not signed by the key") as error:
            opened(wrong, server, {})
        assert error.value.code == NOT_SIGNED
    with pytest.raises(UserError, match="policy.server"):
        _ = Policy(server=str(tmp_path / "server")).server_key


def test_a_signed_request_is_taken_once_and_in_its_time(monkeypatch):
    key = Ed25519PrivateKey.generate()
    server, now, seen = key.public_key(), [1000.0], {}
    monkeypatch.setattr(signing.time, "time", lambda: now[0])
    first, second = signed(b"delete", key, 30), signed(b"delete", key, 30)
    assert first != second
    assert [opened(each, server, seen) for each in (first, second)] == [b"delete"] * 2
    with pytest.raises(Refusal, match="a signed request came before") as error:
        opened(first, server, seen)
    assert error.value.code == NOT_SIGNED
    later = signed(b"info", key, 300)
    now[0] += 30 + signing.CLOCKS + 1
    with pytest.raises(Refusal, match="a signed request came 1 s too late"):
        opened(first, server, {})  # the worker was started again
    assert opened(later, server, seen) == b"info"
    assert len(seen) == 1


def test_a_recorded_request_has_nothing_done_again(tmp_path):
    """Who records what the server signed could have had later states deleted, and the day's uploads used up."""
    key, made = Ed25519PrivateKey.generate(), []
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "server.pub").write_bytes(public)

    def make(run):
        made.append(run)
        raise UserError("no data", "some")

    worker = Worker([0], tmp_path / "nodes", make, Policy(server=str(tmp_path / "server.pub")))
    request = signed(serialise("info", run={"id": "abc", "stage": "run"}), key, 60)
    assert [deserialise(*worker.answer(request)).beside["code"] for _ in range(2)] == [DOES_NOT_FIT, NOT_SIGNED]
    assert len(made) == 1


def test_a_site_that_refuses_costs_its_own_turn_only(tmp_path, monkeypatch, caplog):
    """One of three sites lets nothing out; where transport.minimum allows it, the round goes on without that site."""
    divided(tmp_path)
    link = FakeSuperLink(tmp_path / "nodes")
    for client in range(3):
        policy = Policy(smallest_group=1000 if client == 1 else 1)
        link.add_node(client, changes={"data.path": str(tmp_path / f"site-{client}.npz")}, policy=policy)
    given = (*GIVEN, *SITES, f"data.path={tmp_path / 'test.npz'}")
    with reached(link, monkeypatch):
        with pytest.raises(UserError, match=r"client 1 was lost in task 0, round 0: .*error 12: its policy") as error:
            run_in(tmp_path / "a", *given)
        done = run_in(tmp_path / "b", *given, "transport.minimum=0.5")
    assert str(tmp_path) not in str(error.value)
    assert done.record["absences"]["lost"] == 2
    assert "policy smallest_group=1000" in caplog.text


def test_no_path_crosses_and_no_row_number(tmp_path, monkeypatch):
    """Of three sites that reveal single samples, in both directions, errors included."""
    divided(tmp_path)
    link, crossed = FakeSuperLink(tmp_path / "nodes"), []
    for client in range(3):
        changes = {"data.path": str(tmp_path / f"site-{client}.npz")}
        link.add_node(client, changes=changes, policy=Policy(smallest_group=1))
    push, pull = link.push, link.pull
    monkeypatch.setattr(link, "push", lambda *args: crossed.append(args[-1]) or push(*args))

    def pulled(messages):
        for answer in pull(messages):
            crossed.extend(answer.blobs)
            yield answer

    monkeypatch.setattr(link, "pull", pulled)
    given = (*GIVEN[:-1], *SITES, "method=stsa", "method.M=null", f"data.path={tmp_path / 'test.npz'}", "clients=3")
    with reached(link, monkeypatch):
        done = run_in(tmp_path / "there", *given)
    words = (str(tmp_path), socket.gethostname(), getpass.getuser(), "site-", "test.npz", ".npz")
    assert not [word for word in words for blob in crossed if word.encode() in blob]
    # The samples that are alone in their class, by their places in the sites' files.
    alone = []
    for client in range(3):
        with np.load(tmp_path / f"site-{client}.npz") as file:
            task, column = file["task"], file["column"]
        same = (task[:, None] == task) & (column[:, None] == column)
        alone.append(np.flatnonzero(same.sum(axis=1) == 1).tolist())
    replies = [deserialise(blob) for blob in crossed if deserialise(blob).kind == "reply"]
    told = [[], [], []]
    for reply in replies:
        told[reply.beside["client"]] += reply.beside["revealed"]["samples"]
    assert [len(each) for each in told] == [len(each) for each in alone]
    assert any(told)
    assert done.record["privacy"]["revealed_samples"] == sum(map(len, alone))
    assert told != alone


def test_a_second_node_with_the_same_client_is_left_out(tmp_path, monkeypatch, caplog):
    divided(tmp_path)
    link = FakeSuperLink(tmp_path / "nodes")
    for client in range(3):
        link.add_node(client, changes={"data.path": str(tmp_path / f"site-{client}.npz")}, policy=OPEN)

    def join(node, kind, request):
        if kind == "turn" and request.message.task == 0 and len(link.workers) == 3:
            link.add_node(0, changes={"data.path": str(tmp_path / "site-1.npz")}, policy=OPEN)
            link.add_node(2, changes={"data.path": str(tmp_path / "nowhere.npz")}, policy=OPEN)

    link.before = join
    given = (*GIVEN, *SITES, f"data.path={tmp_path / 'test.npz'}")
    with reached(link, monkeypatch):
        done = run_in(tmp_path / "there", *given)
    assert len(link.workers) == 5
    assert "has other data than before" in caplog.text
    assert "a node is left out: the node of client 2: error 20" in caplog.text
    assert done.record["absences"]["lost"] == 0


def test_a_site_s_epsilon_is_for_all_runs_together(tmp_path, monkeypatch):
    pytest.importorskip("dp_accounting")
    divided(tmp_path)
    link = FakeSuperLink(tmp_path / "nodes")
    for client in range(3):
        changes = {"data.path": str(tmp_path / f"site-{client}.npz")}
        link.add_node(client, changes=changes, policy=Policy(smallest_group=1, epsilon=10))
    noise = ("method=stsa", "method.M=null", "noise=gaussian", "noise.epsilon=8", "dtype=float64")
    given = (*GIVEN[:-1], *SITES, *noise, f"data.path={tmp_path / 'test.npz'}")
    with reached(link, monkeypatch):
        assert run_in(tmp_path / "a", *given).record["privacy"]["guarantee"]["against_server"]
        # The same run again costs nothing; under another seed it would be another 8.
        run_in(tmp_path / "b", *given)
        with pytest.raises(UserError, match="error 14"):
            run_in(tmp_path / "c", *given, "seed=1")
