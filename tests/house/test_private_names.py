"""Nothing replaces or reads a private name of another package: an update of that package would break it unseen."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

#: What has no supported way, and why, by the beginning of its name.
ALLOWED = {
    "torch._foreach_": "many small tensors at once; torch.optim has no other way either",
    "torch._dynamo": "torch.compile is documented with its settings and errors under this name",
    "torch.utils._triton.": "the only question to torch whether torch.compile can make kernels here",
    "torch._BatchNorm": "the common class of all batch norms",
    "os._exit": "documented; ends a worker whose turn hangs",
}


def _private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


#: Of a module without this no name is private to another; most are told so, and parsing takes seconds.
MAYBE = re.compile(r"(?<!\bself)(?<!\bcls)\._[a-zA-Z]|\bimport\b.*\b_[a-zA-Z]|^ +_\w+( as \w+)?,?$", re.MULTILINE)


def private_uses(source: str) -> list[str]:
    """Private names of other packages that a module imports, reads or sets, as `package.name`."""
    if not MAYBE.search(source):
        return []
    tree = ast.parse(source)
    found, packages = [], {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            packages |= {(alias.asname or alias.name).partition(".")[0]: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith(("fcl_bench", "tests")):
            parts = [*node.module.split("."), *(alias.name for alias in node.names)]
            packages |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            if node.module != "__future__" and any(map(_private, parts)):
                found += [f"{node.module}.{alias.name}" for alias in node.names]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _private(node.attr):
            owner = node.value
            while isinstance(owner, ast.Attribute):
                owner = owner.value
            if isinstance(owner, ast.Name) and owner.id in packages:
                found.append(f"{packages[owner.id]}.{node.attr}")
    return [name for name in found if not name.startswith("fcl_bench.")]


@pytest.mark.parametrize("source", ["from hydra._internal import x", "import torch\ntorch._dynamo.reset()"])
def test_a_private_name_is_found(source: str) -> None:
    assert private_uses(source)


def test_no_private_name_is_used() -> None:
    uses = {(path, name) for path in Path(REPOSITORY / "src").rglob("*.py") for name in private_uses(path.read_text())}
    names = {name for _, name in uses}
    assert {(str(path), name) for path, name in uses if not name.startswith(tuple(ALLOWED))} == set()
    assert not [name for name in ALLOWED if not any(used.startswith(name) for used in names)], "no longer used"
