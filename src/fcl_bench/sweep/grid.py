"""What a sweep's overrides stand for: the overrides of each of its jobs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser


def expand_grid(overrides: Sequence[str], config_loader: ConfigLoader | None = None) -> list[list[str]]:
    """The overrides of each job, in the order of Hydra's own sweeper: the last key varies fastest.

    Args:
        overrides: such as `seed=0,1`; the last one of a key counts.
        config_loader: knows the choices of groups, for `method=glob(*)`.

    Raises:
        HydraException: an override that cannot be parsed, or an interval, which is no list of values.
    """
    values: dict[str, list[str]] = {}
    for override in OverridesParser.create(config_loader).parse_overrides(list(overrides)):
        swept = override.is_sweep_override()
        found = override.sweep_string_iterator() if swept else [override.get_value_element_as_str()]
        key = override.get_key_element()
        values[key] = [f"{key}={value}" for value in found]
    return [list(job) for job in product(*values.values())]
