"""The saved model of a run: its tensors, and all information needed to build the server that predicts with them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

import fcl_bench
from fcl_bench.engine.checkpoint import for_disk
from fcl_bench.errors import UserError, first_line
from fcl_bench.files import regular, replacing
from fcl_bench.protocol.context import Task
from fcl_bench.protocol.method import Server

if TYPE_CHECKING:
    from fcl_bench.execution.adapt import Adapted
    from fcl_bench.execution.inputs import Inputs
    from fcl_bench.execution.plan import Plan

#: Version of `about`.
FORMAT = 1
#: Its only key in the file's metadata, since the order of several keys is undefined.
_KEY = "fcl_bench"
#: Before the names of an adapted network's tensors.
ADAPTED = "adapted."


def model_tensors(server: Server, labels: torch.Tensor, adapted: Adapted | None) -> dict[str, torch.Tensor]:
    """What model.safetensors holds.

    Args:
        labels: (C,) int64, the data set's label of each column.
    """
    before = {} if adapted is None else {ADAPTED + name: value for name, value in adapted.trained.items()}
    return {**server.model(), **before, "class_order": labels}


def about(plan: Plan, inputs: Inputs) -> dict[str, Any]:
    """The description inside model.safetensors: JSON, the same for the same run wherever it was made."""
    settings, scalars, context, dealt = plan.settings, plan.settings.scalars, plan.context, plan.dealt
    train, config = dealt.dataset.train, settings.resolved
    backbone = dict(config["backbone"])
    if settings.method.trains_network or _whole(inputs.adapted):
        backbone |= settings.backbone.without_weights()
    return {
        "format": FORMAT,
        "version": fcl_bench.__version__,
        "run_id": plan.id,
        "method": settings.method.name,
        "backbone": settings.backbone.name,
        "data": settings.data.name,
        "takes": dealt.dataset.kind,
        "dimension": context.inputs,
        # The size of the first training image, which some networks are built for.
        "image": list(train.inputs[0].size) if dealt.dataset.kind == "images" else None,
        "labels": dealt.stream.class_order.tolist(),
        "class_names": list(dealt.dataset.class_names),
        "tasks": [{"columns": list(task.columns), "columns_seen": task.columns_seen} for task in dealt.stream.tasks],
        "features": plan.identity,
        "weights": inputs.weights,
        "settings": {"method": config["method"], "adapt": config["adapt"], "backbone": backbone},
        "seed": scalars.seed,
        "dtype": scalars.dtype,
        "wire": dataclasses.asdict(scalars.wire),
        "clients": scalars.clients,
        "recurring": context.recurring,
    }


def _whole(adapted: Adapted | None) -> bool:
    """Whether the first stage may have changed every number of its network, so that no other weights are needed."""
    if adapted is None:
        return False
    numbers = {f"body.{name}" for name, value in adapted.body.state_dict().items() if value.is_floating_point()}
    return numbers <= adapted.trained.keys()


def write_model(path: Path, tensors: dict[str, torch.Tensor], description: Mapping[str, Any]) -> None:
    """Write model.safetensors, whole or not at all."""
    with replacing(path) as temporary:
        save_file(for_disk(tensors), temporary, metadata={_KEY: json.dumps(description, sort_keys=True)})


def read_model(path: Path, device: torch.device | None) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What a saved model says of itself, and its tensors on the device; None: no tensors are read.

    Raises:
        UserError: it is no model of fcl-bench's, or damaged.
    """
    try:
        with safe_open(regular(path), framework="pt", device=str(device or "cpu")) as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in (file.keys() if device else ())}
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read: {first_line(error)}", "the model.safetensors of a run") from error
    if _KEY not in metadata:
        raise UserError(f"{path} does not say what it is", "the model.safetensors of a run")
    try:
        description = json.loads(metadata[_KEY])
        form = description["format"]
    except (ValueError, KeyError, TypeError) as error:
        what = "what it says of itself cannot be read"
        raise UserError(f"{path} is damaged: {what}", "the model.safetensors of a run") from error
    if form != FORMAT:
        raise UserError(f"{path} is of format {form}", f"a model of format {FORMAT}, as this version writes")
    return description, tensors


def tasks_of(description: Mapping[str, Any]) -> list[Task]:
    """The tasks that a saved model has learnt."""
    ends = [0, *(task["columns_seen"] for task in description["tasks"])]
    return [
        Task(index, range(ends[index], ends[index + 1]), ends[index + 1], tuple(task["columns"]))
        for index, task in enumerate(description["tasks"])
    ]
