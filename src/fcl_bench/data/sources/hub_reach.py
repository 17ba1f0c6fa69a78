"""Find out in seconds whether the Hugging Face hub answers; its own client tries for most of a minute."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

#: Seconds that the hub has to accept a connection.
_PATIENCE = 5.0


def unreachable() -> str:
    """Why the hub cannot be reached; "" if it answers, or if there is a proxy, which may reach it."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    url = urlsplit(constants.ENDPOINT)
    if url.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(url.hostname or ""):
        return ""
    try:
        port = url.port or (443 if url.scheme == "https" else 80)
        socket.create_connection((url.hostname or "", port), timeout=_PATIENCE).close()
    except OSError as error:
        return f"{url.netloc} does not answer: {error.strerror or error}"
    return ""


@contextmanager
def cache_unless_reachable() -> Iterator[str]:
    """A context in which the hub's client uses only its cache if the hub cannot be reached; yields the reason."""
    from huggingface_hub import constants

    why, before = unreachable(), constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or bool(why)
    try:
        yield why
    finally:
        constants.HF_HUB_OFFLINE = before
