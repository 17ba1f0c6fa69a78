"""Requests that the server signs (Ed25519), so that a node answers nobody else, whoever runs the SuperLink."""

from __future__ import annotations

from typing import Any

from fcl_bench.flower.refusals import NOT_SIGNED, Refusal

#: Before a signed request; the signature follows, and then the request.
_SIGNED, _LENGTH = b"fcl-bench signed", 64


def signed(request: bytes, key: Any | None) -> bytes:
    """The request with the signature of a private key before it; without a key, the request."""
    return request if key is None else _SIGNED + key.sign(_SIGNED + request) + request


def opened(request: bytes, server: Any | None) -> bytes:
    """The request within what `signed` returned.

    Args:
        server: the public key whose signature it must have; None: none is needed.

    Raises:
        Refusal: it has not.
    """
    start = len(_SIGNED) + _LENGTH if request.startswith(_SIGNED) else 0
    content = request[start:]
    if server is not None:
        from cryptography.exceptions import InvalidSignature

        try:
            server.verify(request[start - _LENGTH : start] if start else b"", _SIGNED + content)
        except InvalidSignature as error:
            remedy = "the server's transport.key, or its public half in the policy"
            raise Refusal(NOT_SIGNED, "a request is not signed by the key of policy server=", remedy) from error
    return content
