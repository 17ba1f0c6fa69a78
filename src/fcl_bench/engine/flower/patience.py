"""How long Flower waits for a part of a reply that its node is still sending."""

from __future__ import annotations

import contextlib

#: Seconds until Flower asks for such a part again; it doubles them from one time to the next.
FIRST_WAIT = 0.05
_NAME = "initial_backoff"


def retry_soon() -> None:
    """Have Flower, in this process, ask again after `FIRST_WAIT` and not after a second.

    A reply is announced before its parts have come, so that whoever looks often finds it unfinished: in two of three
    looks on busy cores. Flower has no setting for this. Where a version of it has no such default, it keeps its own.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from flwr.supercore.inflatable.inflatable_utils import pull_objects

        defaults = pull_objects.__kwdefaults__ or {}
        if _NAME in defaults:
            defaults[_NAME] = FIRST_WAIT
