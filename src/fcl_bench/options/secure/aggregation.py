"""The server's side of secure sums in one round: it adds up masked uploads, and removes the masks from the sum."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch

from fcl_bench.engine.validation import BadUpload
from fcl_bench.errors import UserError
from fcl_bench.options.secure.base import SecureSums
from fcl_bench.options.secure.masks import BYTES, TAG, Masks, agreed_key, as_bytes, by_side, joined
from fcl_bench.options.secure.party import SIGNATURE, FixedPoint, flat, in_bytes, rows
from fcl_bench.protocol.message import Message
from fcl_bench.randomness import generator


class Aggregation:
    """The server's part in one round.

    Args:
        seed: of the run; who shares masks with whom follows from it, and is no secret.
    """

    def __init__(self, secure: SecureSums, seed: int, broadcast: Message, keys: Mapping[int, Message]) -> None:
        self._secure, self._broadcast = secure, broadcast
        self._keys = dict(keys)
        for client, own in keys.items():
            has = {"signature": (SIGNATURE,)} if "signature" in own else {}
            require(client, own, {"cipher": (BYTES,), "mask": (BYTES,), **has})
        self._peers = peers_of(sorted(keys), secure.neighbours, seed, broadcast.task, broadcast.round)
        self._shares: dict[int, dict[int, bytes]] = {}
        self._sums: dict[str, torch.Tensor] | None = None
        #: The clients whose uploads are in the sums.
        self.survivors: list[int] = []

    def shares_request(self, client: int) -> Mapping[str, torch.Tensor]:
        """Return `clients` (1,), n; `peers` (k,) and their public keys, `cipher` and `mask` (k, 32): 4 + 68 k bytes.

        And each `signature` (k, 160), if all have one.
        """
        peers = self._peers[client]
        names = [name for name in ("cipher", "mask", "signature") if all(name in own for own in self._keys.values())]
        texts = {name: [bytes(self._keys[peer][name].numpy()) for peer in peers] for name in names}
        return {
            "clients": torch.tensor([len(self._keys)], dtype=torch.int32),
            "peers": torch.tensor(peers, dtype=torch.int32),
            **{name: rows(own, BYTES) for name, own in texts.items()},
        }

    def take_shares(self, client: int, answer: Message) -> None:
        """Return the encrypted shares of a client, for each of its peers."""
        require(client, answer, {"shares": (len(self._peers[client]), 2 * BYTES + TAG)})
        self._shares[client] = dict(zip(self._peers[client], in_bytes(answer["shares"]), strict=True))

    def take_in_request(self, client: int) -> Mapping[str, torch.Tensor]:
        """Return `peers` (m,), those that shared, and what each has for this client, `shares` (m, 80): 84 m bytes."""
        peers = self._holders(client, but=client)
        return {
            "peers": torch.tensor(peers, dtype=torch.int32),
            "shares": rows([self._shares[peer][client] for peer in peers], 80),
        }

    def add(self, client: int, upload: Message) -> None:
        """Add a masked upload. Raises a `BadUpload`: its fields differ from those of the uploads before it."""
        if self._sums is None:
            self._sums = {name: tensor.clone() for name, tensor in upload.items()}
        else:
            forms = [{name: (t.shape, t.dtype) for name, t in found.items()} for found in (self._sums, upload)]
            if forms[0] != forms[1]:
                raise BadUpload(client, upload, "it has other fields than other clients'", ", ".join(self._sums))
            for name, total in self._sums.items():
                own, more = flat(total), flat(upload[name].contiguous())
                np.add(own, more, out=own)
        self.survivors.append(client)

    def require_enough(self) -> None:
        """Raise a `UserError` if too few clients answered to remove the masks."""
        n, answered = len(self._shares), len(self.survivors)
        for client in sorted(self._shares):
            holders = [client, *self._peers[client]]
            wanted = self._secure.least(len(holders))
            if len(self._holders(client, self.survivors)) < wanted:
                whole = len(holders) == n
                of = f"{answered} of {n} clients" if whole else f"of {len(holders)} holders of client {client}'s shares"
                found = "" if whole else f" {len(self._holders(client, self.survivors))}"
                where = f"task {self._broadcast.task}, round {self._broadcast.round}"
                raise UserError(
                    f"secure=sums: {of}{found} answered in {where}, and it takes {wanted} to unmask the sum",
                    f"fewer faults, or a smaller secure.threshold than {self._secure.threshold:g}",
                )

    def unmasking_request(self, client: int) -> Mapping[str, torch.Tensor]:
        """Return `survivors` (s,), those among the client and its peers: 4 s bytes."""
        return {"survivors": torch.tensor(self._holders(client, self.survivors), dtype=torch.int32)}

    def unmasked(self, answers: Mapping[int, Message]) -> Message:
        """Return the sum of the survivors' uploads.

        Args:
            answers: theirs to `unmasking_request`.
        """
        held: dict[int, dict[int, int]] = {client: {} for client in self._shares}
        for holder, answer in answers.items():
            require(holder, answer, {"shares": (len(self._holders(holder)), BYTES)})
            for client, share in zip(self._holders(holder), in_bytes(answer["shares"]), strict=True):
                held[client][holder + 1] = int.from_bytes(share, "big")
        survivors = set(self.survivors)
        to_add, to_subtract = [], []
        for client, shares in held.items():
            wanted = self._secure.least(1 + len(self._peers[client]))
            if len(shares) < wanted:
                raise UserError(
                    f"secure=sums: {len(shares)} clients helped to unmask client {client}'s part of task"
                    f" {self._broadcast.task}, round {self._broadcast.round}, and it takes {wanted}",
                    f"a smaller secure.threshold than {self._secure.threshold:g}",
                )
            secret = as_bytes(joined(dict(list(shares.items())[:wanted])))
            if client in survivors:
                to_subtract.append(secret)
                continue
            # What its peers among the survivors have put on for it; the other end has the other sign.
            keys = [
                (peer, agreed_key(secret, bytes(self._keys[peer]["mask"].numpy()), "masks", client, peer))
                for peer in self._holders(client, survivors)
            ]
            added, subtracted = by_side(client, keys)
            to_add += added
            to_subtract += subtracted
        masks, sums = Masks(to_add, to_subtract), self._sums or {}
        for total in sums.values():
            masks.put_on(flat(total))
        fixed = FixedPoint(self._secure.bits, self._secure.fraction_bits)
        return fixed.decoded(sums, self._broadcast, len(self.survivors))

    def _holders(self, client: int, among: Collection[int] | None = None, but: int | None = None) -> list[int]:
        """Return those of the client and its peers that shared, ascending."""
        chosen = self._shares.keys() if among is None else self._shares.keys() & set(among)
        return sorted(holder for holder in {client, *self._peers[client]} & chosen if holder != but)


def require(client: int, answer: Message, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise a `BadUpload` unless an answer has tensors of bytes with these names and shapes."""
    found = {name: tuple(tensor.shape) for name, tensor in answer.items() if tensor.dtype == torch.uint8}
    if found != shapes or len(found) < len(answer):
        raise BadUpload(client, answer, f"it holds bytes of the shapes {found}", f"{shapes}")


def peers_of(clients: Sequence[int], neighbours: int | None, seed: int, task: int, round_: int) -> dict[int, list[int]]:
    """Return with whom each client shares masks: all others, or as many on either side of a random circle."""
    if neighbours is None or neighbours >= len(clients) - 1:
        return {client: [other for other in clients if other != client] for client in clients}
    circle = generator(seed, "secure circle", task, round_).permutation(np.asarray(clients)).tolist()
    steps = [step for distance in range(1, neighbours // 2 + 1) for step in (distance, -distance)]
    return {
        client: sorted(circle[(place + step) % len(circle)] for step in steps) for place, client in enumerate(circle)
    }
