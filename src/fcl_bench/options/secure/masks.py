"""Keys that two clients agree on, the masks that follow from them, what passes between two, and secrets in shares.

X25519, HKDF-SHA256, AES-256 in counter mode as pseudo-random generator and ChaCha20-Poly1305, all of `cryptography`.
Shares are Shamir's: any t of n determine a secret, and fewer reveal nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

#: The largest prime below 2^256: secrets and shares are numbers below it, of 32 bytes each.
PRIME = 2**256 - 189
BYTES = 32
#: Draws the given number of random bytes.
Draw = Callable[[int], bytes]


def drawn(draw: Draw) -> int:
    """Return a number of the field; uniform but for a share of 2^-248."""
    return int.from_bytes(draw(BYTES), "big") % PRIME


def as_bytes(number: int) -> bytes:
    """Return a number of the field in its 32 bytes."""
    return number.to_bytes(BYTES, "big")


def split(secret: int, points: Sequence[int], threshold: int, draw: Draw) -> list[int]:
    """Return f(x) at each of the points; f is a random polynomial of degree t - 1 with f(0) = secret.

    Args:
        secret: below `PRIME`.
        points: the holders', different from each other and above 0.
        threshold: t, at least 1.
        draw: makes its other coefficients.
    """
    coefficients = [drawn(draw) for _ in range(threshold - 1)]
    shares = []
    for x in points:
        value = 0
        for coefficient in coefficients:
            value = (value + coefficient) * x % PRIME
        shares.append((value + secret) % PRIME)
    return shares


def joined(shares: Mapping[int, int]) -> int:
    """Return the secret of t or more shares, by their points: f(0) by Lagrange's formula."""
    points = tuple(shares)
    return sum(weight * shares[x] for weight, x in zip(_weights(points), points, strict=True)) % PRIME


@lru_cache(maxsize=1024)
def _weights(points: tuple[int, ...]) -> tuple[int, ...]:
    """Return prod over y != x of y / (y - x) for each x; most clients of a round have the same holders."""
    found = []
    for x in points:
        above = below = 1
        for y in points:
            if y != x:
                above, below = above * y % PRIME, below * (y - x) % PRIME
        found.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(found)


#: Bytes of a key, and of what encryption adds.
KEY, TAG = 32, 16
#: Bytes of masks made at a time: what is added stays in the processor's cache.
_BLOCK = 2**18
_ZEROS = bytes(_BLOCK)


def public_key(private: bytes) -> bytes:
    """Return what belongs to a private key; both of 32 bytes."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agreed_key(private: bytes, public: bytes, purpose: str, *clients: int) -> bytes:
    """Return two clients' key for a purpose, the same at both ends: HKDF of X25519 of one's private, other's public.

    Args:
        private, public: 32 bytes each.
        purpose, clients: another key for others; the two clients in any order.
    """
    secret = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    info = " ".join(map(str, ("fcl-bench", purpose, *sorted(clients)))).encode()
    return HKDF(SHA256(), KEY, None, info).derive(secret)


def sealed(key: bytes, sender: int, text: bytes) -> bytes:
    """Return `text` encrypted for the key's other owner, `TAG` bytes longer. A sender seals one text with a key."""
    return ChaCha20Poly1305(key).encrypt(_nonce(sender), text, None)


def opened(key: bytes, sender: int, sealed_text: bytes) -> bytes | None:
    """Return what `sealed` was given; None where somebody changed it."""
    try:
        return ChaCha20Poly1305(key).decrypt(_nonce(sender), sealed_text, None)
    except InvalidTag:
        return None


def _nonce(sender: int) -> bytes:
    return sender.to_bytes(12, "little")


class Masks:
    """Masks of several keys, to be added to the arrays of a message one after the other.

    Args:
        added, subtracted: keys of 32 bytes, whose masks are added and subtracted.
    """

    def __init__(self, added: Iterable[bytes], subtracted: Iterable[bytes]) -> None:
        self._streams: list[tuple[CipherContext, np.ufunc]] = [(_stream(key), np.add) for key in added]
        self._streams += [(_stream(key), np.subtract) for key in subtracted]

    def put_on(self, numbers: np.ndarray) -> None:
        """Change `numbers` (n,), unsigned and contiguous, in place, modulo what they can hold."""
        buffer = bytearray(min(_BLOCK, numbers.nbytes))
        each = _BLOCK // numbers.itemsize
        for begin in range(0, len(numbers), each):
            block = numbers[begin : begin + each]
            room = memoryview(buffer)[: block.nbytes]
            mask = np.frombuffer(room, dtype=numbers.dtype)
            for stream, apply in self._streams:
                stream.update_into(_ZEROS[: block.nbytes], room)
                apply(block, mask, out=block)


def _stream(key: bytes) -> CipherContext:
    # No key is used for a second stream.
    return Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()


def key_words(key: bytes) -> Callable[[int], np.ndarray]:
    """Return a function that makes the next so many uniform numbers of 64 bits of a key's stream."""
    stream = _stream(key)
    return lambda count: np.frombuffer(bytearray(stream.update(bytes(8 * count))), dtype="<u8")


def by_side(client: int, keys: Sequence[tuple[int, bytes]]) -> tuple[list[bytes], list[bytes]]:
    """Return the keys of a client's masks with others, those to be added (the other has a larger number) and the rest,
    to be subtracted."""
    return [key for other, key in keys if client < other], [key for other, key in keys if other < client]
