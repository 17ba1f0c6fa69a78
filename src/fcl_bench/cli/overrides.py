"""Between what a user types and Hydra: arguments in the form that Hydra wants, its complaints in ours."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from fcl_bench.errors import UserError, choices, first_line

SEE_HELP = "fcl-bench --help lists keys and choices"
#: Keys whose values are paths.
_PATHS = ("out", "data.path", "backbone.checkpoint", "cache.dir")
#: Hydra's options that take part here, and whether a value follows.
_OPTIONS = {
    **dict.fromkeys(("-m", "--multirun", "--hydra-help", "--resolve", "--run", "-r"), False),
    **dict.fromkeys(("--cfg", "-c", "--package", "-p", "--info", "-i"), True),
    **dict.fromkeys(("--config-name", "-cn", "--config-dir", "-cd", "--experimental-rerun"), True),
}


def ordered(arguments: list[str]) -> list[str]:
    """The options, then the overrides, as Hydra's parser wants them; a UserError for whatever is neither."""
    options: list[str] = []
    overrides: list[str] = []
    value_follows = False
    for argument in arguments:
        if value_follows:
            options.append(argument)
            value_follows = False
        elif argument.startswith("-"):
            name, has_value, _ = argument.partition("=")
            if name not in _OPTIONS:
                remedy = f"keys are written {name.lstrip('-')}=VALUE; {choices(_OPTIONS, name)}"
                raise UserError(f"unknown option {argument}", remedy)
            options.append(argument)
            value_follows = _OPTIONS[name] and not has_value
        elif "=" in argument or argument.startswith("~"):
            overrides.append(argument)
        else:
            raise UserError(f"{argument} is not key=value", f"such as method=fedran; {SEE_HELP}")
    if value_follows:
        raise UserError(f"{options[-1]} needs a value", "such as --cfg job")
    sweep = bool({"-m", "--multirun"} & set(options))
    overrides = [_quoted_path(override, sweep) for override in overrides]
    return options + (_swept(overrides) if sweep else overrides)


def _swept(overrides: list[str]) -> list[str]:
    """In a sweep over a group (method=stsa,afl), a key of its choices (method.gamma=1) as a sweep over one value.

    Hydra first composes a sweep without what is swept, so with the group's default choice, and would look for the key
    there.
    """
    groups = {key for key, _, value in (override.partition("=") for override in overrides) if "," in value}
    made = []
    for override in overrides:
        key, _, value = override.partition("=")
        one_value = "," not in value or value[:1] in ("[", "{", "'", '"')
        if key.partition(".")[0] in groups and "." in key and one_value and not re.match(r"\w+\(", value):
            override = f"{key}=choice({value})"
        made.append(override)
    return made


def _quoted_path(override: str, sweep: bool) -> str:
    """A path with its `~` expanded, in the quotes that Hydra's grammar wants around spaces, brackets and the like.

    In a sweep a comma separates values and is left alone; so is what is already quoted.
    """
    key, _, value = override.partition("=")
    if key.lstrip("+") not in _PATHS or value[:1] in ("'", '"') or (sweep and "," in value):
        return override
    value = os.path.expanduser(value)
    if re.fullmatch(r"[\w./:+%@?|-]*", value, flags=re.ASCII) or "${" in value:
        return f"{key}={value}"
    escaped = value.replace("'", "\\'")
    return f"{key}='{escaped}'"


def composition_error(error: Exception) -> UserError:
    """Hydra's report of a wrong group, choice, key or syntax, in one line with what would work."""
    from hydra.core.override_parser.overrides_parser import OverrideParseException

    from fcl_bench.config import config_dir, register_presets

    conf = config_dir()
    text = " ".join(str(error).split())
    if found := re.search(r"Could not (?:find|load) '([^']+)/([^'/]+)'", text):
        group, choice = found.groups()
        presets = register_presets() if group == "experiment/preset" else []
        options = presets or [file.stem for file in (conf / group).glob("*.yaml")]
        return UserError(f"{group}={choice} is not known", choices(options, choice) if options else SEE_HELP)
    if found := re.search(r"Could not override '([^']+)'", text):
        for choice in _choices_swept(found[1].partition(".")[0]):
            known = _keys_beside(found[1], conf, choice)
            if found[1] not in known:
                return UserError(f"unknown key {found[1]} of {choice}", choices(known, found[1]))
        known = _keys_beside(found[1], conf)
        if found[1] in known:
            return UserError(f"{found[1]} takes no new keys in this form", f"+{found[1]}.KEY=VALUE")
        return UserError(f"unknown key {found[1]}", choices(known, found[1]))
    if found := re.search(r"Ambiguous value for argument '([^']*)'", text):
        return UserError(f"{found[1]} names several values", "-m runs each of them; a list is written key=[a,b]")
    if isinstance(error, OverrideParseException):
        return UserError(
            f"{error.override} cannot be parsed", "key=value; a value with special characters as key='\"value\"'"
        )
    return UserError(first_line(error), SEE_HELP)


def _choices_swept(group: str) -> list[str]:
    """method=stsa, method=afl for what was typed as method=stsa,afl; none if the group is not swept."""
    typed = (text.partition("=") for text in sys.argv[1:])
    return [
        f"{key}={choice}" for key, _, value in typed if key == group and "," in value for choice in value.split(",")
    ]


def _keys_beside(key: str, conf: Path, *chosen: str) -> list[str]:
    """The keys that share the parent of `key` in the configuration of the groups `chosen`, or of those typed.

    The keys of the top level if `key` has no parent there.
    """
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    from fcl_bench.config import composed

    groups = [entry.name for entry in conf.iterdir() if entry.is_dir()]
    GlobalHydra.instance().clear()
    typed = [text for text in sys.argv[1:] if text.partition("=")[0] in groups and "," not in text]
    top: Any = OmegaConf.to_container(composed(chosen or typed))
    parent = key.rpartition(".")[0]
    node = top
    for part in parent.split(".") if parent else ():
        node = node.get(part) if isinstance(node, dict) else None
    if not isinstance(node, dict):
        return list(top)
    return [f"{parent}.{name}" if parent else name for name in node if name != "_target_"]
