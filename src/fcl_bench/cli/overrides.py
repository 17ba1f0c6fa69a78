"""Translates between the user and Hydra: arguments into Hydra's form, and Hydra's errors into ours."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from fcl_bench.cli.command import storage_error
from fcl_bench.composition import FOLDERS, choices_of, composed, current, groups
from fcl_bench.config import GROUPS
from fcl_bench.errors import UserError, choices, first_line, installing, require_choice

if TYPE_CHECKING:
    from omegaconf import DictConfig

#: Words that may come first in place of keys -> the module whose `work` gets the arguments after the word.
COMMANDS = {
    "show": "fcl_bench.cli.show",
    "tune": "fcl_bench.cli.tune",
    "predict": "fcl_bench.cli.predict",
    "runs": "fcl_bench.cli.runs",
    "new": "fcl_bench.cli.new",
    "plan": "fcl_bench.cli.plan",
    "leaderboard": "fcl_bench.leaderboard.command",
    "rank": "fcl_bench.leaderboard.rank",
}
SEE_HELP = "fcl-bench --help lists keys and choices"
#: Keys whose values are paths.
_PATHS = ("out", "data.path", "backbone.checkpoint", "cache.dir")
#: The group of the presets that a run of an experiment's grid consists of.
_PRESET = "experiment/preset"
#: Matches Hydra's own keys that can be typed; all others are as fcl-bench needs them, since it reads and writes there.
_OF_HYDRA = r"hydra/(launcher|sweeper)|hydra\.sweeper\.params|hydra\.launcher\.(?!_target_$).+"
#: Hydra's options that are accepted, and whether a value follows.
_OPTIONS = {
    **dict.fromkeys(("-m", "--multirun", "--resolve"), False),
    **dict.fromkeys(("--cfg", "-c", "--config-dir", "-cd", "--shell-completion", "-sc"), True),
}
#: The values of some of them; Hydra would print its usage for any other.
_VALUES = dict.fromkeys(("--cfg", "-c"), ("job", "hydra", "all"))


def without_folders(arguments: list[str]) -> list[str]:
    """The arguments but those that name folders with choices of one's own, which are searched from now on.

    Raises:
        UserError: such a folder is not there.
    """
    folders: list[Path] = []
    named: list[str] = []
    others: list[str] = []
    following = iter(arguments)
    for argument in following:
        key, has_value, value = argument.partition("=")
        if key in ("--config-dir", "-cd"):
            if not (given := value if has_value else next(following, "")):
                raise UserError(f"{argument} needs a value", f"such as {key} VALUE")
            folders.append(Path(given).absolute())
            named += [key, given]
        else:
            others.append(argument)
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder} is not available.", "--config-dir FOLDER, a folder with choices")
    if folders or FOLDERS[1:]:
        from fcl_bench.cli.knobs import search_also

        search_also(folders, named)
    return others


def ordered(arguments: list[str]) -> list[str]:
    """The options, then the overrides, as Hydra's parser expects; raise a `UserError` for any other argument."""
    arguments = current(arguments)
    options: list[str] = []
    overrides: list[str] = []
    skipped = -1
    for number, argument in enumerate(arguments):
        if number == skipped:
            continue
        following = next(iter(arguments[number + 1 :]), None)
        value = following if following is not None and not re.search(r"^-\D|=", following) else None
        if argument.startswith("-"):
            name, has_value, given = argument.partition("=")
            if name not in _OPTIONS:
                from fcl_bench.cli.knobs import unknown_option

                raise unknown_option(argument, value, _OPTIONS)
            options.append(argument)
            if _OPTIONS[name] and not has_value:
                if following is None:
                    known = choices(_VALUES[name]) if name in _VALUES else f"such as {name} VALUE"
                    raise UserError(f"{argument} needs a value", known)
                options.append(following)
                given, skipped = following, number + 1
            if name in _VALUES:
                require_choice(name, given, _VALUES[name])
        elif "=" in argument or argument.startswith("~"):
            overrides.append(argument)
        else:
            from fcl_bench.cli.knobs import no_override

            raise no_override(argument, value, [*COMMANDS, "--help", "--version"], f"such as method=fedran; {SEE_HELP}")
    for override in overrides:
        _require_plain_choice(override)
    sweep = bool({"-m", "--multirun"} & set(options))
    overrides = [_quoted_path(override, sweep) for override in overrides]
    return options + (_swept(overrides) if sweep else overrides)


def value_text(key: str, value: Any) -> str:
    """A Python value in the grammar of overrides: 0.1, true, null, [1,2], {a: 1}, 'a text with blanks'."""
    if value is None:
        return "null"
    if hasattr(value, "tolist"):  # NumPy's numbers and arrays
        value = value.tolist()
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | Path):
        # Text that needs no quotes in a shell gets none: `seed="0"` is a number there, too.
        plain = re.fullmatch(r"[\w./:+%@?|-]+", str(value), flags=re.ASCII)
        escaped = str(value).replace("\\", "\\\\").replace("'", "\\'")
        return str(value) if plain else f"'{escaped}'"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{value_text(key, entry)}" for name, entry in value.items()) + "}"
    if isinstance(value, list | tuple | range):
        return "[" + ",".join(value_text(key, entry) for entry in value) + "]"
    raise UserError(f"{key}={value!r} is a {type(value).__name__}", "a number, a text, a truth value, None or a list")


def _require_plain_choice(override: str) -> None:
    """Raise a `UserError` for a group's choice that is no text, and for keys of Hydra's that fcl-bench sets itself."""
    key, _, value = override.partition("=")
    key = key.lstrip("+~")
    if re.match(r"hydra[./]", key) and not re.fullmatch(_OF_HYDRA, key):
        raise UserError(f"{key} is a key of Hydra's that fcl-bench sets itself", "hydra/launcher, hydra.launcher.KEY")
    # All that Hydra's parser does not read as a text; Hydra would report it in its own words.
    if key in groups() and re.match(r"[{[]|(null|true|false|[-+]?(\d+(\.\d*)?(e[-+]?\d+)?|inf|nan))$", value, re.I):
        raise UserError(f"{override} is no choice of the group {key}", choices(choices_of(key)))


def _swept(overrides: list[str]) -> list[str]:
    """Turn a key of a swept group's choices (method.gamma=1 with method=stsa,afl) into a sweep over one value.

    Hydra first composes a sweep without the swept keys, so with the group's default choice, and would look for the key
    in that choice.
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
    """Expand the `~` of a path, and quote it as Hydra's grammar requires for spaces, brackets and the like.

    In a sweep, a comma separates values and is left as it is; a path that is already quoted is left as it is, too.
    """
    key, _, value = override.partition("=")
    if key.lstrip("+") not in _PATHS or value[:1] in ("'", '"') or (sweep and "," in value):
        return override
    value = os.path.expanduser(value)
    if re.fullmatch(r"[\w./:+%@?|-]*", value, flags=re.ASCII) or "${" in value:
        return f"{key}={value}"
    escaped = value.replace("'", "\\'")
    return f"{key}='{escaped}'"


def composed_as_typed(overrides: list[str], with_hydra: bool = False) -> DictConfig:
    """`composed` of what `ordered` returns. Raises a `UserError` if Hydra can't compose it."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        return composed(overrides, with_hydra)
    # Hydra raises Python's own errors, too, such as for a choice whose name is too long for a file.
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, TypeError, ValueError, OSError) as error:
        raise storage_error(error) or composition_error(error, overrides) from error


def composition_error(error: Exception, typed: list[str]) -> UserError:
    """Explain Hydra's error about a wrong group, choice, key or syntax in one line, with what would work."""
    from hydra.core.override_parser.overrides_parser import OverrideParseException
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    text = " ".join(str(error).split())
    if re.search(r"Could not (find|load) 'hydra/launcher/(joblib|submitit_\w+)'", text):
        launcher = next(argument for argument in typed if argument.startswith("hydra/launcher="))
        return UserError(f"{launcher}: its launcher is not installed", installing("sweep"))
    if found := re.search(r"Could not (?:find|load) '([^']+)/([^'/]*)'", text):
        return _unknown_choice(found[1], found[2])
    if isinstance(error, yaml.MarkedYAMLError):
        from fcl_bench.cli.knobs import unreadable

        return unreadable(error)
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        # Hydra looked for the choice's file, and the name is too long for a file.
        file = Path(str(error.filename))
        return _unknown_choice(file.parent.name, file.stem)
    if f"Could not override '{_PRESET}'" in text:
        return UserError(f"{_PRESET} without an experiment that has presets", f"experiment=NAME {_PRESET}=[NAME,...]")
    if found := re.search(r"Could not override '([^']+)'", text):
        return _unknown_key(found[1], typed)
    if found := re.search(r"Could not append to config. An item is already at '([^']+)'", text):
        return UserError(f"+{found[1]}: the configuration has this key already", f"{found[1]}=VALUE, without the +")
    if found := re.search(r"(?:Sweep parameters|Ambiguous value for argument) '([^']*)'", text):
        runs_each = "-m runs each of them, in Python fcl_bench.sweep; a list is written key=[a,b]"
        return UserError(f"{found[1]} names several values", runs_each)
    if isinstance(error, OverrideParseException):
        return UserError(
            f"{error.override} cannot be parsed", "key=value; a value with special characters as key='\"value\"'"
        )
    if isinstance(error, HydraException | OmegaConfBaseException):
        return UserError(first_line(error), SEE_HELP)
    return UserError(f"the configuration cannot be composed: {first_line(error)}", SEE_HELP)


def _unknown_choice(group: str, choice: str) -> UserError:
    options = choices_of(group)
    return UserError(f"{group}={choice} is not known", choices(options, choice) if options else SEE_HELP)


def _unknown_key(key: str, typed: list[str]) -> UserError:
    """Name the key that Hydra refused, the choice that lacks it, the choices that have it, and the existing keys."""
    from omegaconf import OmegaConf

    from fcl_bench.cli.knobs import unknown_key

    top: Any = OmegaConf.to_container(composed(choosing(typed), with_hydra=True))
    chosen = top.pop("hydra")["runtime"]["choices"]
    known = list(dict.fromkeys([*_dotted(top), *groups()]))
    if key in known:
        return UserError(f"{key} takes no new keys in this form", f"+{key}.KEY=VALUE")
    values = {name.lstrip("+"): value for name, _, value in (text.partition("=") for text in typed)}
    return unknown_key(key, values.get(key, ""), known, _keys_beside(key, known), chosen)


def choosing(typed: list[str]) -> list[str]:
    """The arguments that choose, with the first choice of those that a sweep goes through (`method=stsa,afl`).

    A sweep of which no run composes ends with the error of the first.
    """
    made = []
    for text in typed:
        key, _, value = text.lstrip("+").partition("=")
        if key in (*groups(), _PRESET) and "(" not in value:
            made.append(text if "[" in value else text.partition(",")[0])
    return made


def _dotted(node: Any, prefix: str = "") -> list[str]:
    """Every key in nested mappings, `a` and `a.b`."""
    if not isinstance(node, dict):
        return []
    named = [(f"{prefix}{key}", value) for key, value in node.items() if key != "_target_"]
    return [one for name, value in named for one in (name, *_dotted(value, f"{name}."))]


def _keys_beside(key: str, known: list[str]) -> list[str]:
    """The keys that share the parent of `key`, or the nearest part above it that has keys."""
    parent = key.rpartition(".")[0]
    beside = [one for one in known if one.rpartition(".")[0] == parent]
    return beside if beside or not parent or parent in GROUPS else _keys_beside(parent, known)
