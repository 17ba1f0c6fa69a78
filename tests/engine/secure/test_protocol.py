"""The protocol of one round: masks cancel, dropouts are recovered, and neither side takes what it should not."""

from __future__ import annotations

import dataclasses
import itertools
import os

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from fcl_bench.errors import UserError
from fcl_bench.options.secure.aggregation import Aggregation, peers_of
from fcl_bench.options.secure.base import SecureSums
from fcl_bench.options.secure.masks import Masks, agreed_key, opened, public_key, sealed
from fcl_bench.options.secure.party import KEYS, SHARES, TAKE_IN, UNMASKING, Parties, flat, simulated
from fcl_bench.protocol.fields import SUM, Uploads, real
from fcl_bench.protocol.message import Message

#: Sums, but for V.
UPLOADS = Uploads({"statistics": {"x": real("n", combine=SUM), "V": real("n")}})


def of_run(client):
    return simulated(client, "run")


class Round:
    """One round among clients, each in a node of its own, so that none can have another's secrets."""

    def __init__(self, clients, secure=None, secrets=None):
        self.secure = secure or SecureSums(threshold=0.5)
        self.nodes = {client: Parties(self.secure, (secrets or of_run)(client), UPLOADS) for client in clients}
        self.broadcast = Message({}, task=2, round=1)
        keys = {client: self.ask(client, KEYS, {}) for client in clients}
        self.server = Aggregation(self.secure, 0, self.broadcast, keys)

    def ask(self, client, stage, tensors):
        return self.nodes[client].answer(client, Message(tensors, stage, task=2, round=1))

    def share(self, clients):
        for client in clients:
            self.server.take_shares(client, self.ask(client, SHARES, self.server.shares_request(client)))
        for client in clients:
            self.ask(client, TAKE_IN, self.server.take_in_request(client))

    def send(self, client, numbers):
        upload = Message({"x": torch.tensor(numbers, dtype=torch.float64)}, task=2, round=1)
        return self.nodes[client].send(upload, client)

    def unmask(self, helpers=None):
        self.server.require_enough()
        helpers = self.server.survivors if helpers is None else helpers
        return self.server.unmasked(
            {client: self.ask(client, UNMASKING, self.server.unmasking_request(client)) for client in helpers}
        )


def values(clients, seed=0):
    return dict(zip(clients, np.random.default_rng(seed).integers(-99, 99, (len(clients), 5)) / 8, strict=True))


@pytest.mark.parametrize("clients", [[0], [4], [0, 1], [3, 1, 8], list(range(7))], ids=str)
def test_masks_cancel(clients):
    here, sent = Round(clients), values(clients)
    here.share(clients)
    for client in clients:
        masked = here.send(client, sent[client])
        assert list(masked) == ["x::fixed"]
        assert masked.samples is None
        here.server.add(client, masked)
    total = here.unmask()
    np.testing.assert_array_equal(total["x"].numpy(), sum(sent.values()))
    assert (total.clients, total.task, total.round) == (len(clients), 2, 1)


@pytest.mark.slow_cases("4", "None")
@pytest.mark.parametrize("neighbours", [None, 4])
def test_those_who_drop_out_after_they_shared_are_recovered(neighbours):
    """Every set of three of seven."""
    clients, sent = list(range(7)), values(range(7))
    for missing in itertools.combinations(clients, 3):
        here = Round(clients, SecureSums(threshold=0.3, neighbours=neighbours))
        here.share(clients)
        there = [client for client in clients if client not in missing]
        for client in there:
            here.server.add(client, here.send(client, sent[client]))
        expected = sum(sent[client] for client in there)
        np.testing.assert_array_equal(here.unmask()["x"].numpy(), expected)


def test_those_who_send_keys_and_no_shares_are_left_out():
    clients, sent = list(range(5)), values(range(5))
    here = Round(clients)
    here.share([0, 1, 3])
    for client in (0, 1, 3):
        here.server.add(client, here.send(client, sent[client]))
    np.testing.assert_array_equal(here.unmask()["x"].numpy(), sent[0] + sent[1] + sent[3])


def test_t_helpers_are_enough_and_fewer_are_not():
    """Of five of whom two fail: t = 3, so that each of the others is needed."""
    clients, sent = list(range(5)), values(range(5))
    for helpers, works in (([0, 1, 4], True), ([0, 1], False)):
        here = Round(clients)
        here.share(clients)
        for client in (0, 1, 4):
            here.server.add(client, here.send(client, sent[client]))
        if works:
            np.testing.assert_array_equal(here.unmask(helpers)["x"].numpy(), sent[0] + sent[1] + sent[4])
        else:
            with pytest.raises(UserError, match="2 clients helped to unmask .* and it takes 3"):
                here.unmask(helpers)


def test_too_few_uploads_are_one_line():
    here = Round(list(range(5)))
    here.share(list(range(5)))
    for client in (0, 1):
        here.server.add(client, here.send(client, np.zeros(5)))
    with pytest.raises(UserError, match=r"secure=sums: 2 of 5 clients answered in task 2, round 1, and it takes 3"):
        here.unmask()


def keystream(key: bytes, count: int) -> list[int]:
    """AES-256 in counter mode by its block cipher: the counter's blocks encrypted one by one, as 64-bit numbers."""
    block = Cipher(algorithms.AES256(key), modes.ECB()).encryptor()
    text = b"".join(block.update(number.to_bytes(16, "big")) for number in range(-(-count // 2)))
    return [int.from_bytes(text[8 * n : 8 * n + 8], "little") for n in range(count)]


def test_masks_are_sums_of_key_streams_modulo_2_64():
    keys, start = [bytes([n]) * 32 for n in range(4)], [0, 1, 2**64 - 1, 2**63, 7]
    numbers = torch.tensor([n - 2**64 if n >= 2**63 else n for n in start])
    masks = Masks(keys[:3], keys[3:])
    masks.put_on(flat(numbers)[:2])
    masks.put_on(flat(numbers)[2:])
    streams = [keystream(key, 5) for key in keys]
    signs = (1, 1, 1, -1)
    expected = [(n + sum(s * v[at] for s, v in zip(signs, streams, strict=True))) % 2**64 for at, n in enumerate(start)]
    assert flat(numbers).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_masks_of_many_blocks_go_on_where_they_were(dtype):
    """Put on in parts, and taken off at once."""
    numbers = torch.arange(200_001, dtype=dtype)
    on, off = Masks([b"a" * 32], [b"b" * 32]), Masks([b"b" * 32], [b"a" * 32])
    for begin in (0, 150_000):
        on.put_on(flat(numbers)[begin : begin + 150_000])
    assert (numbers != torch.arange(200_001)).float().mean() > 0.99
    off.put_on(flat(numbers))
    assert torch.equal(numbers, torch.arange(200_001, dtype=dtype))


def test_a_masked_upload_looks_like_noise():
    """Zeros and large numbers alike: no byte of it is more frequent than chance allows."""
    here = Round([0, 1])
    here.share([0, 1])
    body = here.send(0, np.zeros(50_000))["x::fixed"].numpy().tobytes()
    counts = np.bincount(np.frombuffer(body, dtype=np.uint8), minlength=256)
    expected = len(body) / 256
    assert ((counts - expected) ** 2 / expected).sum() < 400  # chi squared of 255 degrees: below 340 with 0.9998


def test_two_agree_on_a_key_that_others_do_not_have():
    a, b, c = (bytes([n]) * 32 for n in (1, 2, 3))
    assert agreed_key(a, public_key(b), "masks", 0, 1) == agreed_key(b, public_key(a), "masks", 0, 1)
    others = {agreed_key(c, public_key(b), "masks", 0, 1), agreed_key(a, public_key(b), "shares", 0, 1)}
    assert agreed_key(a, public_key(b), "masks", 0, 1) not in others


def test_a_changed_share_is_noticed():
    text = sealed(b"k" * 32, 3, b"secret")
    assert opened(b"k" * 32, 3, text) == b"secret"
    assert opened(b"k" * 32, 4, text) is None
    assert opened(b"x" * 32, 3, text) is None
    here = Round([0, 1, 2])
    for client in (0, 1, 2):
        here.server.take_shares(client, here.ask(client, SHARES, here.server.shares_request(client)))
    request = dict(here.server.take_in_request(0))
    request["shares"][0, 0] ^= 1
    with pytest.raises(ValueError, match="the share that client 1 sent to client 0 was changed on its way"):
        here.ask(0, TAKE_IN, request)


def test_a_client_never_gives_both_shares_nor_answers_twice():
    clients = [0, 1, 2, 3]
    here = Round(clients)
    here.share(clients)
    survivors = {"survivors": torch.tensor([0, 1, 2], dtype=torch.int32)}
    with pytest.raises(ValueError, match="asked to unmask what it has not sent"):
        here.ask(0, UNMASKING, survivors)
    here.send(0, np.zeros(3))
    with pytest.raises(ValueError, match="asked to unmask"):
        here.ask(0, UNMASKING, {"survivors": torch.tensor([1, 2], dtype=torch.int32)})
    with pytest.raises(ValueError, match="1 survivors, and client 0 unmasks for 2"):
        here.ask(0, UNMASKING, {"survivors": torch.tensor([0], dtype=torch.int32)})
    assert here.ask(0, UNMASKING, survivors)["shares"].shape == (4, 32)
    with pytest.raises(UserError, match="has no keys"):
        here.ask(0, UNMASKING, {"survivors": torch.tensor([0, 3], dtype=torch.int32)})


def test_an_upload_is_sent_once_and_only_of_summed_fields():
    here = Round([0, 1])
    here.share([0, 1])
    apart = Message({"x": torch.ones(2), "V": torch.ones(2)}, task=2, round=1)
    with pytest.raises(UserError, match="the server needs each client's V by itself"):
        here.nodes[0].send(apart, 0)
    here.send(0, np.zeros(2))
    with pytest.raises(ValueError, match="already"):
        here.send(0, np.zeros(2))
    other_round = Message({"x": torch.ones(2)}, task=2, round=2)
    with pytest.raises(UserError, match="client 1 has no keys of task 2, round 2"):
        here.nodes[1].send(other_round, 1)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float64])
@pytest.mark.parametrize("bits", [64, 32])
def test_masks_are_on_what_travels_and_not_on_what_the_client_has(dtype, bits):
    here = Round([0, 1], SecureSums(bits=bits, fraction_bits=0))
    here.share([0, 1])
    own = torch.arange(6, dtype=dtype).reshape(2, 3)
    sent = here.nodes[0].send(Message({"x": own}, task=2, round=1), 0)
    assert torch.equal(own, torch.arange(6, dtype=dtype).reshape(2, 3))
    assert next(iter(sent.values())).shape == (2, 3)
    assert not torch.equal(next(iter(sent.values())).to(dtype), own)


def test_uploads_of_other_fields_are_refused():
    here = Round([0, 1, 2])
    here.share([0, 1, 2])
    here.server.add(0, here.send(0, np.zeros(3)))
    with pytest.raises(UserError, match="client 1's upload in task 2, round 1 .* other fields"):
        here.server.add(1, here.send(1, np.zeros(4)))


def test_secrets_of_the_system_give_the_same_sum():
    clients, sent = [0, 1, 2], values(range(3))
    ends = []
    for secrets in (of_run, lambda client: lambda client, task, round_: os.urandom):
        here = Round(clients, secrets=secrets)
        here.share(clients)
        masked = [here.send(client, sent[client]) for client in clients]
        for client, upload in zip(clients, masked, strict=True):
            here.server.add(client, dataclasses.replace(upload))
        ends.append((masked[0]["x::fixed"], here.unmask()["x"]))
    assert not torch.equal(ends[0][0], ends[1][0])
    assert torch.equal(ends[0][1], ends[1][1])


def test_runs_of_one_seed_have_masks_of_their_own():
    """Two runs with one seed shared their masks, and the difference of two masked uploads had none."""
    sent = values(range(3))
    shown = []
    for run in ("one", "two", "one"):
        here = Round([0, 1, 2], secrets=lambda client, run=run: simulated(client, run))
        here.share([0, 1, 2])
        shown.append(here.send(0, sent[0])["x::fixed"])
    assert torch.equal(shown[0], shown[2])
    assert not torch.equal(shown[0], shown[1])


def test_a_circle_of_neighbours_is_mutual_and_connected():
    peers = peers_of(list(range(3, 24)), 4, 0, 1, 2)
    assert all(len(own) == 4 and client not in own for client, own in peers.items())
    assert all(client in peers[other] for client, own in peers.items() for other in own)
    seen, at = {3}, [3]
    while at:
        at = [other for client in at for other in peers[client] if other not in seen]
        seen.update(at)
    assert seen == set(range(3, 24))
    assert peers_of([0, 1, 2, 3, 4], 4, 0, 0, 0) == {k: [j for j in range(5) if j != k] for k in range(5)}
    assert peers != peers_of(list(range(3, 24)), 4, 0, 1, 3)
