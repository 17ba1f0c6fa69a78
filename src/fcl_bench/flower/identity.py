"""Whose public keys those of secure sums are: each node signs its own, and looks at the signatures of the others'."""

from __future__ import annotations

import torch
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePrivateKey, EllipticCurvePublicKey
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from fcl_bench.errors import UserError, first_line
from fcl_bench.files import user_path
from fcl_bench.flower.refusals import PEER, Refusal
from fcl_bench.options.secure.party import KEYS, SHARES, SIGNATURE, in_bytes
from fcl_bench.protocol.message import Message


class Identity:
    """A node's key, and those of all clients' nodes.

    Args:
        run: of which public keys are signed.
        key: file of the private key; None: nothing is signed.
        peers: file with the public keys of the nodes of client 0, 1 and so on; None: no signature is looked at.
    """

    def __init__(self, run: str, key: str | None, peers: str | None) -> None:
        self._run, self._peers = run, None if peers is None else keys_in(peers)
        loaded = None if key is None else load_ssh_private_key(user_path("key", key).read_bytes(), None)
        self._key = loaded if isinstance(loaded, EllipticCurvePrivateKey) else None

    def _text(self, of: Message, client: int, keys: bytes) -> bytes:
        return f"fcl-bench secure sums, run {self._run}, {of.task}, {of.round}, {client}: ".encode() + keys

    def signed(self, client: int, answer: Message) -> Message:
        """The answer of a client; public keys, with a `signature` (160,) of them, zeros without a key of this node."""
        if answer.stage != KEYS:
            return answer
        text = self._text(answer, client, bytes(answer["cipher"].numpy()) + bytes(answer["mask"].numpy()))
        signature = b"" if self._key is None else self._key.sign(text, ECDSA(SHA384()))
        padded = bytearray([len(signature), *signature]).ljust(SIGNATURE, b"\0")
        return answer.with_tensors({**answer, "signature": torch.frombuffer(padded, dtype=torch.uint8)})

    def require_signed(self, request: Message) -> None:
        """Raise a `Refusal` if a request brings public keys of others which their nodes have not signed, or none."""
        if request.stage != SHARES or self._peers is None:
            return
        if not len(request["peers"]):
            raise Refusal(PEER, "the client would be alone in its sum", "rounds of two clients or more")
        keys = [in_bytes(request[name]) for name in ("cipher", "mask")]
        signatures = in_bytes(request["signature"]) if "signature" in request else [bytes(1)] * len(keys[0])
        for client, cipher, mask, signature in zip(request["peers"].tolist(), *keys, signatures, strict=True):
            text = self._text(request, client, cipher + mask)
            try:
                self._peers[client].verify(signature[1 : 1 + signature[0]], text, ECDSA(SHA384()))
            except (InvalidSignature, IndexError) as error:
                why = f"the key of client {client} in policy peers= has not signed its public keys"
                raise Refusal(PEER, why, "key=FILE at its node, and the public half in peers=") from error


def keys_in(peers: str) -> list[EllipticCurvePublicKey]:
    """The keys in the file of `policy peers=`. Raises a `UserError` for a file that has others."""
    try:
        keys = [load_ssh_public_key(line) for line in user_path("policy.peers", peers).read_bytes().splitlines()]
        found = [key for key in keys if isinstance(key, EllipticCurvePublicKey)]
        if not found or len(found) < len(keys):
            raise ValueError("a key is of another kind")
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        remedy = "one public key of ssh-keygen -t ecdsa -b 384 per client: cat node0.pub node1.pub > peers.pub"
        raise UserError(f"policy.peers={peers} cannot be used: {first_line(error)}", remedy) from error
    return found
