"""Set every key of every choice to absurd values: each value is accepted, or refused in one line.

Each choice of each group is composed once; then a key is set to a value as Hydra's parser reads it, and the whole
configuration is checked as before a run. An accepted configuration is planned too, in a process with limits of time and
memory: data are dealt and the method inspects its problem. New groups and keys are included automatically.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from benchmarks.faults.forks import forked, quiet
from benchmarks.faults.part import Part, evenly
from fcl_bench.composition import composed, config_dir
from fcl_bench.config import GROUPS, Settings, load_settings
from fcl_bench.errors import UserError
from fcl_bench.tracking import load_tracking
from tests.small_methods import short_run

#: As typed after the key.
VALUES = (
    *("-1", "0", "1.5", "99999999999999999999999", "1e300", "nan", "-inf", "null", "true", "''", "text", "[1,x]"),
    *("{a:1}", "x" * 5000, "'été 中文'", "'=cmd()'", "'~nobody9/x'", "'/dev/zero'"),
)
_OTHERS = (*GROUPS, "logger", "grid", "hydra")
#: What else makes a choice of the group, or one of its choices, one that can be planned.
_BESIDE = {
    "adapt": ("backbone=tiny",),
    "noise=gaussian": ("noise.epsilon=8", "method=stsa"),
    "secure=sums": ("method=stsa",),
}
#: Address space for what is taken: a plan needs little, and what asks for more than a machine has is refused.
_ROOM = 8 << 30


class Configurations(Part):
    """Cases are `<group>=<choice>|<key>|<number of the value>`; of the keys of no group, `|<key>|<number>`."""

    name, quick, full = "configurations", 60, 1500

    def __init__(self, scratch: Path, seed: int = 0) -> None:
        super().__init__(scratch, seed)
        self._composed: dict[str, DictConfig] = {}
        self._parser = OverridesParser.create()
        self._outcome = ""
        self._warm()

    def _warm(self) -> None:
        """Import once here what every plan imports."""
        from fcl_bench.execution.plan import make_plan

        with quiet():
            make_plan(load_settings(composed(["method=afl", f"out={self.scratch}/out"])))

    def cases(self, most: int) -> Sequence[str]:
        top = {
            name: node
            for name, node in OmegaConf.to_container(self._of(""), resolve=False).items()  # type: ignore[union-attr]
            if name not in _OTHERS
        }
        keys = [("", key) for key in leaves(top, "")]
        chosen = evenly([f"{group}={choice}" for group, choice in choices()], -(-most // 8) if most else 0)
        for one in chosen:
            group = one.partition("=")[0]
            node = OmegaConf.to_container(self._of(one)[group], resolve=False)
            keys += [(one, key) for key in leaves(node, group)]
        # Values in another order for each key, so that any even choice meets all of them.
        return [
            f"{chosen}|{key}|{(number + place) % len(VALUES)}"
            for place, (chosen, key) in enumerate(keys)
            for number in range(len(VALUES))
        ]

    def tried(self, case: str) -> str:
        chosen, key, number = case.split("|")
        changed = self._of(chosen).copy()
        value = self._parser.parse_override(f"{key}={VALUES[int(number)]}").value()
        OmegaConf.update(changed, key, value, merge=False, force_add=True)
        self._outcome = "refused"
        try:
            load_tracking(changed)
            settings = load_settings(changed)
        except UserError as error:
            return _told(str(error))
        except BaseException as error:
            return "".join(traceback.format_exception(error)[-2:]).strip()
        self._outcome = "taken"
        ended = forked(lambda: _planned(settings), room=_ROOM)
        return ended.trouble() or ("" if ended.code == 0 else _told(ended.err.strip()))

    def count(self, case: str) -> str:
        return self._outcome

    def _of(self, chosen: str) -> DictConfig:
        if chosen not in self._composed:
            group, _, choice = chosen.partition("=")
            beside = (*_BESIDE.get(group, ()), *_BESIDE.get(chosen, ()))
            rest = short_run(choice) if group == "method" else (chosen, *beside) if chosen else ()
            extra = ["backbone.name=resnet18.tv_in1k"] if chosen == "backbone=timm" else []
            out = [f"out={self.scratch}/out", f"cache.dir={self.scratch}/cache"]
            self._composed[chosen] = composed([*rest, *extra, *out])
        return self._composed[chosen]


def _planned(settings: Settings) -> int:
    """Do everything that a run does before its first write."""
    from fcl_bench.cli.command import run_command
    from fcl_bench.execution.plan import make_plan

    def plan() -> int:
        make_plan(settings)
        return 0

    return run_command("fcl-bench", plan)


def _told(line: str) -> str:
    return "" if line.isprintable() and len(line) < 4500 else f"a message of {len(line)} characters, or not printable"


def choices() -> Iterator[tuple[str, str]]:
    """(group, choice), each YAML of each group."""
    for group in (*GROUPS, "logger"):
        for file in sorted((config_dir() / group).glob("[!_]*.yaml")):
            yield group, file.stem


def leaves(node: Any, prefix: str) -> Iterator[str]:
    """The keys below `node` that hold values; of a list or an empty mapping, its own."""
    if isinstance(node, dict) and node:
        for name, value in node.items():
            yield from leaves(value, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix
