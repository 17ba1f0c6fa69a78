"""Requests that the server signs (Ed25519), so that a node answers nobody else, whoever runs the SuperLink.

A signed request has an end of its time and a number of its own: who recorded it cannot send it again to have a state
deleted, the day's uploads used up, or a turn done over samples that came since. A worker that was started again has
forgotten the numbers, but takes no request whose time is over.
"""

from __future__ import annotations

import secrets
import struct
import time
from typing import Any

from fcl_bench.flower.refusals import NOT_SIGNED, Refusal

#: Before a signed request; the signature follows, the end of its time (seconds since 1970), its number, the request.
_SIGNED, _LENGTH, _STAMP = b"fcl-bench signed", 64, struct.Struct("<d16s")
#: Seconds by which the clocks of a site and of the SuperLink's machine may differ; none further ahead can join.
CLOCKS = 5.0


def signed(request: bytes, key: Any | None, seconds: float) -> bytes:
    """The request with the signature of a private key before it; without a key, the request.

    Args:
        seconds: after which no node takes it any more.
    """
    if key is None:
        return request
    stamped = _STAMP.pack(time.time() + seconds, secrets.token_bytes(16)) + request
    return _SIGNED + key.sign(_SIGNED + stamped) + stamped


def opened(request: bytes, server: Any | None, seen: dict[bytes, float]) -> bytes:
    """The request within what `signed` returned.

    Args:
        server: the public key whose signature it must have; None: none is needed.
        seen: the numbers of earlier requests, and until when each was valid; this one's is added, old ones go.

    Raises:
        Refusal: it has not, or it came before, or too late.
    """
    start = len(_SIGNED) + _LENGTH if request.startswith(_SIGNED) else 0
    stamped = request[start:]
    if server is not None:
        from cryptography.exceptions import InvalidSignature

        try:
            server.verify(request[start - _LENGTH : start] if start else b"", _SIGNED + stamped)
        except InvalidSignature as error:
            remedy = "the server's transport.key, or its public half in the policy"
            raise Refusal(NOT_SIGNED, "a request is not signed by the key of policy server=", remedy) from error
        until, number = _STAMP.unpack_from(stamped)
        late = time.time() - CLOCKS - until
        if number in seen or late > 0:
            why = f"came {late:.0f} s too late" if late > 0 else "came before"
            raise Refusal(NOT_SIGNED, f"a signed request {why}", "a request of the server's own, and clocks that agree")
        for old in [old for old, end in seen.items() if end < time.time() - CLOCKS]:
            del seen[old]
        seen[number] = until
    return stamped[_STAMP.size :] if start else stamped
