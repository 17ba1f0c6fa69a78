"""A method of an author's own, in a module and a YAML outside of the package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fcl_bench.cli.new import package

#: The module of the method that `fcl-bench new method my_method` writes, with short names of its halves.
WRITTEN = re.sub("MyMethod(Client|Server)", r"My\1", package("method", "my_method")["my_method/method.py"])


def own_method(
    folder: Path, monkeypatch: pytest.MonkeyPatch, source: str, kind: str, knobs: str, shared: str = ""
) -> str:
    """Write module and YAML below `folder`, so that `--config-dir FOLDER/conf method=mine` finds them.

    Args:
        source: the code of the module; its name differs from folder to folder, since modules stay imported.
        kind: the method's class in it.
        knobs: the YAML's keys.
        shared: the file that has further ones, "_gradient"; "": none.

    Returns:
        the class's path, as `_target_` has it.
    """
    module = f"own_{folder.name}"
    (folder / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(str(folder))
    (folder / "conf" / "method").mkdir(parents=True)
    path = f"{module}.{kind}"
    defaults = f"defaults: [{shared}, _self_]\n" if shared else ""
    (folder / "conf" / "method" / "mine.yaml").write_text(f"# Mine\n{defaults}_target_: {path}\n{knobs}")
    return path
