"""Old names of methods, groups and knobs, which stay as aliases: what is typed with one becomes today's name."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable

log = logging.getLogger(__name__)

#: Old group or top-level key -> today's; and old knob of a method -> today's.
KEYS = {"track": "logger"}
KNOBS = {"loss_over": "loss_classes", "on": "trains", "replay_head": "ccvr"}
#: Today's key -> its old values and today's.
VALUES: dict[str, dict[str, str]] = {
    "method": {"finetune": "fedavg", "joint": "centralised_ridge", "joint_training": "centralised"},
}


def current(arguments: Iterable[str]) -> list[str]:
    """The arguments of a command with today's names; each that changes is logged in one line.

    An argument is `key=value`, also with several values (`method=finetune,stsa`), a bare key, or an option, which
    stays as it is.
    """
    made = []
    for argument in arguments:
        new = _current(argument)
        if new != argument:
            log.warning("%s is now %s", argument, new)
        made.append(new)
    return made


def _current(argument: str) -> str:
    typed, equals, value = argument.partition("=")
    group, dot, below = typed.lstrip("+~").partition(".")
    prefix = typed.removesuffix(group + dot + below)
    below = KNOBS.get(below, below) if group == "method" else below
    key = KEYS.get(group, group) + dot + below
    names = VALUES.get(key, {})
    return prefix + key + equals + re.sub(r"\w+", lambda word: names.get(word[0], word[0]), value)
