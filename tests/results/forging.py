"""Run folders edited by somebody who seals them again, so that all checksums hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from safetensors.numpy import load_file, save_file

from fcl_bench.files import file_checksum, write_json


def put(node: Any, edits: Mapping[str, Any]) -> None:
    """Set values by their dotted keys; a number is a place in a list."""
    for key, value in edits.items():
        *path, last = (int(part) if part.isdigit() else part for part in key.split("."))
        at = node
        for name in path:
            at = at[name]
        at[last] = value


def resealed(folder: Path, record: Mapping[str, Any] | None = None, config: Mapping[str, Any] | None = None) -> None:
    """Edit keys of run.json and config.yaml, and give the record the checksums of all files as they are now."""
    if config:
        whole = yaml.safe_load((folder / "config.yaml").read_text())
        put(whole, config)
        (folder / "config.yaml").write_text(yaml.safe_dump(whole))
    written = json.loads((folder / "run.json").read_text())
    written.pop("checksum")
    put(written, record or {})
    written["files"] = {name: file_checksum(folder / name) for name in written["files"]}
    write_json(folder / "run.json", written)


def edit_table(file: Path, column: str, row: int, value: Any) -> None:
    """Set one cell of a CSV file; the others keep every digit."""
    table = pd.read_csv(file, dtype=str, keep_default_na=False)
    table.loc[row, column] = str(value)
    table.to_csv(file, index=False)


def edit_arrays(file: Path, **arrays: Any) -> None:
    """Replace arrays of an .npz file by what functions make of them."""
    with np.load(file) as old:
        whole = {name: old[name] for name in old.files}
    np.savez_compressed(file, **whole | {name: edit(whole[name]) for name, edit in arrays.items()})


def edit_model(file: Path, edits: Mapping[str, Any]) -> None:
    """Edit what a saved model says of itself."""
    about = json.loads(_metadata(file)["fcl_bench"])
    put(about, edits)
    save_file(load_file(file), file, metadata={"fcl_bench": json.dumps(about)})


def _metadata(file: Path) -> dict[str, str]:
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    found: dict[str, str] = json.loads(content[8 : 8 + size])["__metadata__"]
    return found
