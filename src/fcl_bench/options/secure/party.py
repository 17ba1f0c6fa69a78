"""The clients' side of secure sums: each client's secrets of a round, which leave it only as shares.

Real numbers travel as whole multiples of a step, so that sums of them are exact and masks may wrap around.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from fcl_bench.engine.codec import PACKED, Middleware
from fcl_bench.errors import UserError
from fcl_bench.linalg.structure import packed
from fcl_bench.linalg.tensors import all_finite
from fcl_bench.options.secure.base import SecureSums
from fcl_bench.options.secure.masks import (
    BYTES,
    TAG,
    Draw,
    Masks,
    agreed_key,
    as_bytes,
    by_side,
    drawn,
    opened,
    public_key,
    sealed,
    split,
)
from fcl_bench.protocol.fields import MEAN, SUM, Uploads
from fcl_bench.protocol.message import Message
from fcl_bench.randomness import generator

#: After the names of numbers that travel as multiples of the step, and of whole ones.
FIXED, WHOLE = "::fixed", "::whole"
#: Under which `Message.samples` travels: it is added up as all else is.
SAMPLES = "::samples"


@dataclass(frozen=True)
class FixedPoint:
    """Numbers x travel as round(x 2^fraction_bits) modulo 2^bits.

    Each is off by half a step at most, so a sum of n of them by n / 2 steps; sums are exact beyond that.
    """

    bits: int
    fraction_bits: int

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of what travels; it is signed, since torch has no arithmetic for unsigned numbers."""
        return torch.int64 if self.bits == 64 else torch.int32

    def most(self, clients: int) -> int:
        """Return the largest multiple of the step in absolute terms that each of so many clients may send."""
        return (2 ** (self.bits - 1) - 1) // clients

    def encoded(
        self, upload: Message, clients: int, client: int, triangles: Collection[str] = ()
    ) -> dict[str, torch.Tensor]:
        """Return all of an upload that is added up, `Message.samples` too, by name in ascending order, on the CPU.

        Args:
            clients: n, of how many uploads the sum may be.
            triangles: names of the symmetric matrices of which only the upper triangle travels.

        Raises:
            UserError: a number is so large that the sum could wrap around.
            FloatingPointError: a number is not finite.
        """
        found: dict[str, torch.Tensor] = {}
        for name, tensor in upload.items():
            if not tensor.is_floating_point():
                found[name + WHOLE] = self._within(tensor.long(), name, upload, clients, client, 1.0)
                continue
            if not all_finite(tensor):
                raise FloatingPointError(f"the upload's {name} is not finite")
            triangle = name in triangles
            value = packed(tensor) if triangle else tensor
            # A power of two, so that nothing is rounded but to the step.
            multiples = (value.double() * 2.0**self.fraction_bits).round_()
            step = 2.0**-self.fraction_bits
            found[name + (PACKED if triangle else "") + FIXED] = self._within(
                multiples, name, upload, clients, client, step
            )
        if upload.samples is not None:
            found[SAMPLES + WHOLE] = torch.tensor([upload.samples], dtype=self.dtype)
        return dict(sorted(found.items()))

    def _within(
        self, multiples: torch.Tensor, name: str, upload: Message, clients: int, client: int, step: float
    ) -> torch.Tensor:
        """Return `multiples` in the type in which they travel; none is larger than `most`."""
        largest = max(abs(int(end)) for end in torch.aminmax(multiples)) if multiples.numel() else 0
        if largest > self.most(clients):
            raise UserError(
                f"client {client}'s {name} in task {upload.task}, round {upload.round} ({upload.stage}) holds"
                f" {largest * step:.4g}, and secure.bits={self.bits} secure.fraction_bits={self.fraction_bits} hold"
                f" numbers up to {self.most(clients) * step:.4g} of each of {clients} clients",
                "a smaller secure.fraction_bits, secure.bits=64, or features of a smaller scale",
            )
        # A copy, whatever type it had: masks are put on in place.
        return multiples.to("cpu", self.dtype, copy=True).contiguous()

    def decoded(self, sums: Mapping[str, torch.Tensor], like: Message, uploads: int) -> Message:
        """Return the sum of the uploads, real numbers in float64.

        Args:
            sums: what `encoded` returned, added up.
        """
        tensors = {}
        for name, total in sums.items():
            if name.endswith(WHOLE):
                tensors[name.removesuffix(WHOLE)] = total.long()
            else:
                tensors[name.removesuffix(FIXED)] = total.double() * 2.0**-self.fraction_bits
        samples = tensors.pop(SAMPLES, None)
        made = Message(tensors, like.stage, None if samples is None else int(samples), task=like.task, round=like.round)
        return dataclasses.replace(made, clients=uploads)


def flat(tensor: torch.Tensor) -> np.ndarray:
    """Return the numbers of a contiguous integer tensor on the CPU as unsigned ones (n,), in the same memory."""
    numbers = tensor.flatten().numpy()
    return numbers.view(np.dtype(f"u{numbers.itemsize}"))


#: The stages of what the server asks for besides the upload: public keys, encrypted shares, to take in the others'
#: shares, and the shares that take masks out.
KEYS, SHARES, TAKE_IN, UNMASKING = "secure keys", "secure shares", "secure shares for you", "secure unmasking"
#: Bytes of the signature that may stand beside public keys; the first says how many of them are it.
SIGNATURE = 160
#: What may be added up, as `Field.combine` says it.
SUMMED = (SUM, MEAN)
#: Makes a client's secrets of a round from client, task and round.
Secrets = Callable[[int, int, int], Draw]


def simulated(seed: int, run: str) -> Secrets:
    """Secrets of clients that one process plays: they follow from the run's seed and id, so nothing is secret."""
    return lambda client, task, round_: generator(seed, f"secure sums {run}", task, round_, client).bytes


def from_the_system(client: int, task: int, round_: int) -> Draw:
    """Secrets of clients in processes of their own, which are others in every round of every run."""
    return os.urandom


@dataclass
class _Session:
    """One client's secrets of one round.

    Attributes:
        clients: n, of the round.
        threshold: t, of the holders of its shares.
        theirs: the public keys of its peers, for encryption and for masks.
        shares: of each client that shared with it, itself included, what it holds: of the private mask key and of the
            seed of the self mask.
        masked: whether its upload has been sent.
    """

    task: int
    round: int
    draw: Draw
    cipher: bytes
    mask: bytes
    own: bytes
    clients: int = 0
    threshold: int = 0
    theirs: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    shares: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    masked: bool = False


class Parties(Middleware):
    """The clients of one node in secure sums; none of them sees another's secrets.

    It is the last step before the wire codec, so that clipping and noise come before it. Only uploads of stages in
    which the server has to tell clients apart pass it unchanged.

    Args:
        packs: whether of symmetric matrices only the upper triangle travels.
    """

    def __init__(self, secure: SecureSums, secrets: Secrets, uploads: Uploads, packs: bool = False) -> None:
        self._secure, self._secrets, self._uploads, self._packs = secure, secrets, uploads, packs
        self._fixed = FixedPoint(secure.bits, secure.fraction_bits)
        self._sessions: dict[int, _Session] = {}

    def answer(self, client: int, request: Message) -> Message | None:
        """Return a client's answer to a request of the server's side; None: the request is of another kind.

        Raises:
            ValueError: no honest server would send this request.
        """
        answers = {KEYS: self._keys, SHARES: self._share, TAKE_IN: self._take_in, UNMASKING: self._unmask}
        if request.stage not in answers:
            return None
        return Message(answers[request.stage](client, request), request.stage, task=request.task, round=request.round)

    def _keys(self, client: int, request: Message) -> dict[str, torch.Tensor]:
        """Begin a session; return `cipher`, `mask` (32,), the client's public keys of the round."""
        draw = self._secrets(client, request.task, request.round)
        cipher, mask, own = (as_bytes(drawn(draw)) for _ in range(3))
        session = _Session(request.task, request.round, draw, cipher, mask, own)
        self._sessions[client] = session
        return {"cipher": rows([public_key(session.cipher)])[0], "mask": rows([public_key(session.mask)])[0]}

    def _share(self, client: int, request: Message) -> dict[str, torch.Tensor]:
        """Return `shares` (peers, 80): for each peer one of the mask key and one of the self mask's seed, encrypted.

        Args:
            request: n, the numbers of its peers and their public keys.
        """
        session = self._session(client, request)
        if session.theirs or session.shares:
            raise ValueError(f"client {client} has shared its secrets of this round already")
        peers = request["peers"].tolist()
        keys = zip(in_bytes(request["cipher"]), in_bytes(request["mask"]), strict=True)
        session.clients, session.theirs = int(request["clients"]), dict(zip(peers, keys, strict=True))
        holders = [client, *peers]
        session.threshold = self._secure.least(len(holders))
        points = [holder + 1 for holder in holders]
        parts = [
            [as_bytes(share) for share in split(int.from_bytes(secret, "big"), points, session.threshold, session.draw)]
            for secret in (session.mask, session.own)
        ]
        session.shares[client] = parts[0][0], parts[1][0]
        found = []
        for place, peer in enumerate(peers, start=1):
            found.append(sealed(self._cipher_key(client, peer), client, parts[0][place] + parts[1][place]))
        return {"shares": rows(found, 2 * BYTES + TAG)}

    def _take_in(self, client: int, request: Message) -> dict[str, torch.Tensor]:
        """Keep the `shares` of the `peers` that are still there, which share masks from now on; return nothing."""
        session = self._session(client, request)
        for peer, text in zip(request["peers"].tolist(), in_bytes(request["shares"]), strict=True):
            share = opened(self._cipher_key(client, peer), peer, text)
            if share is None:
                raise ValueError(f"the share that client {peer} sent to client {client} was changed on its way")
            session.shares[peer] = share[:BYTES], share[BYTES:]
        if len(session.shares) < session.threshold:
            raise ValueError(f"client {client} has {len(session.shares)} shares, and it takes {session.threshold}")
        return {}

    def send(self, message: Message, client: int | None) -> Message:
        """Return the upload in fixed-point numbers under its masks; besides these only names and shapes travel."""
        if client is None or message.stage in self._uploads.open_stages():
            return message
        session = self._session(client, message)  # never an upload without masks, whatever the server leaves out
        if session.masked:
            raise ValueError(f"client {client} has sent its upload of this round already")
        sent = dict(self._uploads.sent(message, message.stage))
        if apart := sorted(name for name in message if name not in sent or sent[name].combine not in SUMMED):
            raise UserError(
                f"secure=sums: the server needs each client's {', '.join(apart)} by itself ({message.stage})",
                "secure=none, or a method whose uploads add up, such as method=stsa",
            )
        triangles = [name for name, own in sent.items() if self._packs and own.form == "gram"]
        numbers = self._fixed.encoded(message, session.clients, client, triangles)
        peers = sorted(session.shares.keys() - {client})
        keys = [(peer, agreed_key(session.mask, session.theirs[peer][1], "masks", client, peer)) for peer in peers]
        added, subtracted = by_side(client, keys)
        masks = Masks([session.own, *added], subtracted)
        for tensor in numbers.values():
            masks.put_on(flat(tensor))
        session.masked = True
        return Message(numbers, message.stage, task=message.task, round=message.round)

    def _unmask(self, client: int, request: Message) -> dict[str, torch.Tensor]:
        """Return `shares` (holders, 32): of a survivor's self mask, of any other's private mask key, never both.

        Args:
            client: who is asked; a survivor, and for the first time. Its secrets are forgotten.
            request: the numbers of the `survivors` among itself and its peers.
        """
        session = self._session(client, request)
        survivors = set(request["survivors"].tolist())
        if not session.masked or client not in survivors or not survivors <= session.shares.keys():
            raise ValueError(f"client {client} is asked to unmask what it has not sent")
        if len(survivors) < session.threshold:
            raise ValueError(f"{len(survivors)} survivors, and client {client} unmasks for {session.threshold}")
        del self._sessions[client]
        found = [session.shares[holder][holder in survivors] for holder in sorted(session.shares)]
        return {"shares": rows(found, BYTES)}

    def _session(self, client: int, request: Message) -> _Session:
        session = self._sessions.get(client)
        if session is None or (session.task, session.round) != (request.task, request.round):
            raise UserError(
                f"client {client} has no keys of task {request.task}, round {request.round}",
                "a round that begins with keys, and a node that stays until its end",
            )
        return session

    def _cipher_key(self, client: int, peer: int) -> bytes:
        session = self._sessions[client]
        return agreed_key(session.cipher, session.theirs[peer][0], "shares", client, peer)


def rows(texts: list[bytes], length: int = 0) -> torch.Tensor:
    """Return the texts as (texts, length) uint8."""
    if not texts:
        return torch.zeros(0, length, dtype=torch.uint8)
    return torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8).reshape(len(texts), -1)


def in_bytes(texts: torch.Tensor) -> list[bytes]:
    """Return what `rows` was given."""
    return [row.tobytes() for row in texts.cpu().numpy()]
