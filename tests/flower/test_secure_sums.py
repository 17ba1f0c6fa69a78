"""Secure sums over nodes: keys of each node's own, signed by the nodes, and no upload without masks."""

from __future__ import annotations

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from safetensors.torch import load_file

from fcl_bench.engine.remote.replies import Received, deserialise
from fcl_bench.errors import UserError
from fcl_bench.flower.identity import Identity
from fcl_bench.flower.policy import Policy
from fcl_bench.flower.refusals import Refusal
from fcl_bench.options.secure import aggregation, party
from fcl_bench.options.secure.party import FIXED, KEYS, SHARES, SIGNATURE
from fcl_bench.protocol.message import Message
from tests.flower.fake_superlink import FakeSuperLink, reached
from tests.flower.test_sites import GIVEN, SITES, divided
from tests.small_runs import run_in, settings_for

SUMS = ("secure=sums",)


def keys_of(folder, clients: int) -> list[str]:
    """Key files as ssh-keygen makes them, node0 and so on, and peers.pub with their public halves."""
    lines = []
    for client in range(clients):
        key = ec.generate_private_key(ec.SECP384R1())
        (folder / f"node{client}").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
        lines.append(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
    (folder / "peers.pub").write_bytes(b"\n".join(lines) + b"\n")
    return [str(folder / f"node{client}") for client in range(clients)]


class Federation:
    """Three sites with keys, and all that crosses from them to the server."""

    def __init__(self, tmp_path, monkeypatch) -> None:
        self.folder, self.patch = tmp_path, monkeypatch
        self.whole = divided(tmp_path)
        self.keys = keys_of(tmp_path, 3)
        self.link = FakeSuperLink(tmp_path / "nodes")
        self.crossed: list[Received] = []
        self.blobs: list[bytes] = []

    def add(self, client: int, key: str | None = "own", **policy) -> str:
        own = Policy(own_data=False, smallest_group=1, **{"peers": str(self.folder / "peers.pub"), **policy})
        changes = {"data.path": str(self.folder / f"site-{client}.npz")}
        name = self.link.add_node(client, changes=changes, policy=own)
        worker = self.link.workers[name]
        worker._key = self.keys[client] if key == "own" else key
        answer = worker.answer

        def listening(request):
            blobs = answer(request)
            self.blobs += blobs
            self.crossed += map(deserialise, blobs)
            return blobs

        worker.answer = listening
        return name

    def run(self, out: str, *overrides):
        self.crossed.clear()
        self.blobs.clear()
        with reached(self.link, self.patch):
            given = (*GIVEN, *SITES, f"data.path={self.folder / 'test.npz'}", *SUMS, *overrides)
            return run_in(self.folder / out, *given)

    def uploads(self) -> list[Message]:
        return [one.message for one in self.crossed if one.kind == "reply" and one.message.stage == "statistics"]


@pytest.fixture
def federation(tmp_path, monkeypatch):
    return Federation(tmp_path, monkeypatch)


@pytest.mark.slow
def test_sites_under_masks_learn_what_one_process_learns_and_the_server_gets_no_secret(federation, monkeypatch):
    secrets: list[bytes] = []
    of_nodes = party.agreed_key

    def noted(make):
        def noting(private, *others):
            found = make(private, *others)
            secrets.extend([private, found] if make is of_nodes else [private])
            return found

        return noting

    monkeypatch.setattr(party, "public_key", noted(party.public_key))
    monkeypatch.setattr(party, "agreed_key", noted(of_nodes))

    def at_the_server(*_):
        raise AssertionError("the server works out a key")

    monkeypatch.setattr(aggregation, "agreed_key", at_the_server)
    for client in range(3):
        federation.add(client)
    first = federation.run("first")
    masked = federation.uploads()
    assert len(masked) == 6
    assert all(set(upload) == {"C::fixed", "B::fixed"} for upload in masked)
    told = b"".join(federation.blobs)
    assert len(set(secrets)) == 2 * 3 * (2 + 2)  # tasks, clients, two keys of each, and two of each pair
    assert not any(secret in told for secret in secrets)
    # Another run of the same settings: other masks, the same sums.
    second = federation.run("second")
    again = federation.uploads()
    assert first.record["run_id"] == second.record["run_id"]
    assert not any(torch.equal(one[name], two[name]) for one, two in zip(masked, again, strict=True) for name in one)
    assert first.record["secure"] == "secure sums"
    plain = run_in(federation.folder / "here", *GIVEN, *federation.whole, *SUMS)
    assert plain.record["secure"] == "simulated sums"
    assert plain.record["metrics"] == first.record["metrics"] == second.record["metrics"]
    weights = [load_file(outcome.folder / "model.safetensors") for outcome in (plain, first, second)]
    assert all(torch.equal(weights[0]["W"], own["W"]) for own in weights[1:])


@pytest.mark.slow
@pytest.mark.parametrize("key", [None, "node0"])
def test_a_node_whose_key_the_others_do_not_know_is_in_no_sum(federation, caplog, key):
    """Client 2 has no key, or that of another client."""
    federation.add(0)
    federation.add(1)
    federation.add(2, key=key and str(federation.folder / key))
    with pytest.raises(UserError, match=r"was lost in task 0, round 0: the node of client 0: error 15"):
        federation.run("there")
    assert "the key of client 2 in policy peers= has not signed its public keys" in caplog.text
    assert not federation.uploads()


@pytest.mark.slow
def test_a_node_that_starts_anew_within_a_round_sends_no_upload_and_the_same_command_goes_on(federation, caplog):
    """Its secrets are gone, and an upload without masks must not take their place."""
    nodes = {federation.add(client): client for client in range(3)}
    again = []

    def before(node, kind, request):
        if kind == "turn" and request.message.task == 1 and nodes[node] == 1 and not again:
            again.append(node)
            federation.link.workers[node]._federation = None  # as after a restart

    federation.link.before = before
    with pytest.raises(UserError, match=r"client 1 was lost in task 1, round 0: the node of client 1: error 21|22"):
        federation.run("there")
    assert "client 1 has no keys of task 1, round 0" in caplog.text
    assert all(name.endswith(FIXED) for upload in federation.uploads() for name in upload)
    whole = federation.run("there")
    assert (
        whole.record["metrics"] == run_in(federation.folder / "h", *GIVEN, *federation.whole, *SUMS).record["metrics"]
    )


@pytest.mark.slow
def test_a_server_cannot_talk_a_node_out_of_masks(federation, tmp_path):
    """Neither by secure=none, nor by a transport of which the seed gives the masks."""
    policy = Policy(own_data=False, peers=str(tmp_path / "peers.pub"))
    plain = settings_for(tmp_path, "data=digits", "method=afl", "transport=flower")
    with pytest.raises(Refusal, match="secure=none with transport=flower is refused"):
        policy.require_run(plain, {})
    simulated = settings_for(tmp_path, "data=digits", "method=afl", *SUMS)
    with pytest.raises(Refusal, match="secure=sums with transport=in_process is refused"):
        Policy(own_data=False).require_run(simulated, {})
    policy.require_run(settings_for(tmp_path, "data=digits", "method=afl", "transport=flower", *SUMS), {})


def keys_message(identity: Identity, client: int, round_: int = 0) -> Message:
    own = {"cipher": torch.full((32,), client, dtype=torch.uint8), "mask": torch.full((32,), 9, dtype=torch.uint8)}
    return identity.signed(client, Message(own, KEYS, task=1, round=round_))


def test_a_signature_is_of_one_client_in_one_round_of_one_run(tmp_path):
    files = keys_of(tmp_path, 3)
    peers = str(tmp_path / "peers.pub")
    signing = [Identity("a run", file, peers) for file in files]

    def request(*answers: Message, peers=(0, 1)) -> Message:
        fields = {name: torch.stack([own[name] for own in answers]) for name in ("cipher", "mask", "signature")}
        return Message({"peers": torch.tensor(peers), **fields}, SHARES, task=1, round=0)

    sound = [keys_message(signing[client], client) for client in (0, 1)]
    assert sound[0]["signature"].shape == (SIGNATURE,)
    signing[2].require_signed(request(*sound))
    Identity("a run", None, None).require_signed(request(*sound, peers=(1, 0)))  # who knows no peers believes all
    wrong = {
        "another round": request(sound[0], keys_message(signing[1], 1, round_=2)),
        "another run": request(sound[0], keys_message(Identity("other", files[1], peers), 1)),
        "another client": request(*sound, peers=(1, 0)),
        "no signature": request(sound[0], keys_message(Identity("a run", None, peers), 1)),
        "nobody's key": request(*sound, peers=(0, 7)),
        "no field": request(*sound).with_tensors(
            {name: own for name, own in request(*sound).items() if name != "signature"}
        ),
    }
    for message in wrong.values():
        with pytest.raises(Refusal, match=r"the key of client \d in policy peers= has not signed its public keys"):
            signing[2].require_signed(message)
    with pytest.raises(Refusal, match="alone in its sum"):
        signing[2].require_signed(Message({"peers": torch.zeros(0, dtype=torch.int32)}, SHARES))


@pytest.mark.parametrize("content", ["", "no key\n", "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIEjf3 x\n"])
def test_a_file_of_peers_that_is_none_is_one_line(tmp_path, content):
    (tmp_path / "peers.pub").write_text(content)
    with pytest.raises(UserError, match=r"policy.peers=.* cannot be used: .*ssh-keygen -t ecdsa"):
        Identity("a run", None, str(tmp_path / "peers.pub"))


def test_malformed_answers_are_one_line():
    from fcl_bench.options.secure.base import SecureSums

    def answer(**shapes) -> Message:
        return Message({name: torch.zeros(shape, dtype=torch.uint8) for name, shape in shapes.items()}, KEYS)

    sound = answer(cipher=32, mask=32)
    for broken in (answer(cipher=32), answer(cipher=31, mask=32), answer(cipher=32, mask=32, more=1)):
        with pytest.raises(UserError, match=r"client 1's upload in task 0, round 0 .*bytes of the shapes"):
            aggregation.Aggregation(SecureSums(), 0, Message({}), {0: sound, 1: broken})
    here = aggregation.Aggregation(SecureSums(), 0, Message({}), {0: sound, 1: sound})
    with pytest.raises(UserError, match="client 0's upload"):
        here.take_shares(0, answer(shares=(2, 80)))
