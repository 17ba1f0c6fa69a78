"""The state of unfinished work: tensors and JSON, whole or absent, verified before it is trusted."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from fcl_bench.files import content_hash, file_checksum, replacing

log = logging.getLogger(__name__)


class Checkpoint:
    """A folder with `state.json` and the tensors that it names; a new state replaces the old one at once.

    Args:
        folder: made when something is saved.
        schema: version of what is saved; another one is not taken over.
    """

    def __init__(self, folder: Path, schema: int) -> None:
        self.folder = folder
        self._schema = schema

    def save(self, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Keep `state` (JSON) and `tensors`."""
        before = set(self.folder.glob("tensors-*.safetensors"))
        number = 1 + max((int(file.stem.partition("-")[2]) for file in before), default=0)
        file = self.folder / f"tensors-{number}.safetensors"
        with replacing(file) as temporary:
            save_file(for_disk(tensors), temporary)
        header = {"schema": self._schema, "tensors": file.name, "tensors_checksum": file_checksum(file)}
        write_json(self.folder / "state.json", {**header, **state})
        for old in before:
            old.unlink()

    def load(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]] | None:
        """What `save` kept; None where there is none, or it is damaged or of another schema."""
        file = self.folder / "state.json"
        if not file.exists():
            return None
        try:
            state = read_json(file)
            tensors = self.folder / state["tensors"]
            if state["schema"] != self._schema or file_checksum(tensors) != state["tensors_checksum"]:
                raise ValueError("it does not match its checksum or schema")
            return state, load_file(tensors)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            log.warning("checkpoint %s is damaged (%s); starting from the first task", self.folder, error)
            return None

    def remove(self) -> None:
        """Forget it."""
        shutil.rmtree(self.folder, ignore_errors=True)


def for_disk(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As safetensors wants them: on the CPU, in the plain layout, none sharing memory with another."""
    return {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
    }


def _checksum(content: dict[str, Any]) -> str:
    digest = content_hash()
    digest.update(json.dumps({k: v for k, v in content.items() if k != "checksum"}, sort_keys=True).encode())
    return digest.hexdigest()


def write_json(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    """Write `content` with a checksum of itself; returns what was written."""
    # Through JSON once, so that the checksum is of what a reader will see (lists for tuples, text for keys).
    content = json.loads(json.dumps(content, allow_nan=False))
    content["checksum"] = _checksum(content)
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2) + "\n")
    return content


def read_json(path: Path) -> dict[str, Any]:
    """What `write_json` wrote. Raises ValueError where it does not match its own checksum."""
    content = json.loads(path.read_text())
    if content["checksum"] != _checksum(content):
        raise ValueError("it does not match its own checksum")
    return content
