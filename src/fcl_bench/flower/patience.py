"""How long Flower waits for a part of a message that somebody is still sending."""

from __future__ import annotations

import sys

#: Seconds until Flower asks for such a part again; it doubles them from one time to the next.
FIRST_WAIT = 0.05
_NAME = "initial_backoff"


def retry_soon() -> None:
    """Have Flower, in this process, ask again after `FIRST_WAIT` and not after a second.

    A message is announced before its parts have come, so that whoever looks often finds it unfinished: in two of three
    looks on busy cores. Flower has no setting for this. Where a version of it has no such default, it keeps its own.
    """
    try:
        from flwr.supercore.inflatable import inflatable_utils

        for pull in (inflatable_utils.pull_objects, inflatable_utils.pull_and_inflate_object_from_tree):
            defaults = pull.__kwdefaults__ or {}
            defaults[_NAME] = min(defaults[_NAME], FIRST_WAIT)
    except (ImportError, AttributeError, KeyError) as error:
        print(f"fcl-bench: this version of Flower keeps its own pauses ({error!r})", file=sys.stderr)
