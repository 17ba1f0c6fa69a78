"""Every key of every choice with values that no sane user types: each is taken, or refused in one line.

    python benchmarks/faults/configurations.py [--most N]

Each choice of each group is composed once; then a key is set to a value as Hydra's parser reads it, and the whole
configuration is checked as before a run. Nothing is trained. Prints how many were tried, how many held (`taken` or
`refused`) and what failed; the exit code is 1 if anything did.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Iterator
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from fcl_bench.composition import composed, config_dir
from fcl_bench.config import GROUPS, load_settings
from fcl_bench.errors import UserError
from fcl_bench.tracking.base import load_tracking

#: As typed after the key.
VALUES = (
    *("-1", "0", "1.5", "99999999999999999999999", "1e300", "nan", "-inf", "null", "true", "''", "text", "[1,x]"),
    *("{a:1}", "x" * 5000, "'été 中文'", "'=cmd()'", "'~nobody9/x'", "'/dev/zero'"),
)


def choices() -> Iterator[tuple[str, str]]:
    """(group, choice), each YAML of each group."""
    for group in (*GROUPS, "track"):
        for file in sorted((config_dir() / group).glob("*.yaml")):
            yield group, file.stem


def leaves(node: Any, prefix: str) -> Iterator[str]:
    """The keys below `node` that hold values; of a list or an empty mapping, its own."""
    if isinstance(node, dict) and node:
        for name, value in node.items():
            yield from leaves(value, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix


def cases() -> Iterator[tuple[DictConfig, str, str]]:
    """(a composed configuration, one of its keys, a value): first the keys of a run, then those of each choice."""
    plain = composed([])
    top = {name: node for name, node in OmegaConf.to_container(plain, resolve=False).items() if name not in _OTHERS}
    for key in leaves(top, ""):
        yield from ((plain, key, value) for value in VALUES)
    for group, choice in choices():
        extra = ["backbone.name=resnet18.tv_in1k"] if (group, choice) == ("backbone", "timm") else []
        config = composed([f"{group}={choice}", *extra])
        node = OmegaConf.to_container(config[group], resolve=False)
        for key in leaves(node, group):
            yield from ((config, key, value) for value in VALUES)


_OTHERS = (*GROUPS, "track", "grid", "hydra")


def tried(config: DictConfig, key: str, value: str, parser: OverridesParser) -> str:
    """ "taken" or "refused"; else what went wrong."""
    changed = config.copy()
    OmegaConf.update(changed, key, parser.parse_override(f"{key}={value}").value(), merge=False, force_add=True)
    try:
        load_tracking(changed)
        load_settings(changed)
    except UserError as error:
        line = str(error)
        return "refused" if line.isprintable() and len(line) < 4500 else f"a message of {len(line)} characters"
    except BaseException as error:
        return "".join(traceback.format_exception(error)[-2:]).strip()
    return "taken"


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--most", type=int, default=0, help="stop after so many cases, evenly chosen (0: all)")
    most = arguments.parse_args().most
    parser, counts, failed = OverridesParser.create(), {"taken": 0, "refused": 0}, []
    whole = list(cases())
    step = max(1, len(whole) // most) if most else 1
    for config, key, value in whole[::step]:
        outcome = tried(config, key, value, parser)
        if outcome in counts:
            counts[outcome] += 1
        else:
            failed.append(f"{key}={value[:60]}: {outcome}")
    for line in failed:
        print(f"failed: {line}")
    total = sum(counts.values())
    print(f"configurations: {total + len(failed)} tried, {total} held ({counts}), {len(failed)} failed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
