"""What a method's halves hand to the engine: a slip in a method is told in one line, before it reaches a number."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from fcl_bench.errors import UserError, kind_of
from fcl_bench.protocol.context import Prediction, State
from fcl_bench.protocol.fields import Field, Schema, Uploads
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.method import Client, Server
from fcl_bench.protocol.task import Task


def turn_of(half: Client, returned: Any, uploads: Uploads, stage: str, samples: int) -> tuple[Message, State]:
    """The upload and the new state that a client half returned.

    Args:
        half: the client half, for messages.
        returned: by its `update`.
        uploads: what the method declares.
        stage: of the broadcast that it answers.
        samples: n, the labelled samples of the client's shard.

    Raises:
        UserError: `returned` is not a message and a mapping of tensors, a tensor of the message is not declared, or the
            message groups other samples.
    """
    where = f"{_name(half)}.update"
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise UserError(f"{where} returned {kind_of(returned)}", "the upload and the new state: return message, state")
    made, state = returned
    _require_message(where, made)
    if unknown := [name for name in made if uploads.field(stage, name) is None]:
        fields = ", ".join(uploads.declared.get(stage, {})) or "none"
        raise UserError(
            f"{where} sent {unknown[0]}, which `uploads` of the method does not declare", f"{stage}: {fields}"
        )
    for name, which in made.groups.items():
        _require_groups(f"{where}: groups", name, which, samples)
    _require_tensors(f"{where}: the state", state)
    return made, state


def versions(state: State) -> dict[str, int]:
    """How often each tensor of a state was changed in place so far."""
    return {name: 0 if tensor.is_inference() else tensor._version for name, tensor in state.items()}


def require_unchanged(half: Client, client: int, state: State, before: Mapping[str, int] | None) -> None:
    """Raise a `UserError` if a client's state was changed in place since its last turn ended.

    It would be another client's, or depend on where the clients live, without a word.

    Args:
        half: the client half, for messages.
        client: whose state it is.
        state: as it is now.
        before: `versions` at the end of that turn; None: the state comes from elsewhere.
    """
    if before is not None and (changed := [name for name, now in versions(state).items() if now != before[name]]):
        raise UserError(
            f"{_name(half)}: {changed[0]} of the state of client {client} was changed in place after its turn",
            "a copy in the state, such as tensor.clone()",
        )


def broadcast_of(server: Server, task: Task, round_: int) -> Message:
    """What the server broadcasts. Raises a `UserError` if that is no message of tensors."""
    broadcast = server.broadcast(task, round_)
    _require_message(f"{_name(server)}.broadcast", broadcast)
    return broadcast


def schema_of(server: Server, task: Task, stage: str) -> Schema:
    """What the server expects of the round's uploads. Raises a `UserError` if that is not a `Field` for each name."""
    where = f"{_name(server)}.schema"
    try:
        expected = server.schema(task, stage)
    except KeyError as error:
        raise UserError(f"{where}: the method declares no stage {stage!r}", "`uploads` with all stages") from error
    remedy = 'a mapping of names to what each is, such as {"G": gram_matrix(M)}'
    if not isinstance(expected, Mapping):
        raise UserError(f"{where} returned {kind_of(expected)}", remedy)
    for name, wanted in expected.items():
        if not isinstance(wanted, Field):
            raise UserError(f"{where}: {name} is {kind_of(wanted)}", remedy)
    return expected


def participants_of(server: Server, named: Iterable[int], clients: int) -> list[int]:
    """The clients that the server named for a round, among them perhaps others than those that were available.

    Raises:
        UserError: one of them is no client of the run, or is named twice.
    """
    present = [int(client) for client in named]
    if present and (min(present) < 0 or max(present) >= clients or len(set(present)) < len(present)):
        raise UserError(
            f"{_name(server)}.participants named the clients {', '.join(map(str, present[:20]))}",
            f"some of 0 to {clients - 1}, each once",
        )
    return present


def answer_of(server: Server, prediction: Any, samples: int, task: Task) -> Prediction:
    """The server's prediction for test samples.

    Args:
        server: for messages.
        prediction: what its `classify` returned.
        samples: n.
        task: the last one learnt.

    Raises:
        UserError: it has not a row of scores for each sample and a column for each class seen so far, a score is not
            finite, or it names tasks that have not been.
    """
    where = f"{_name(server)}.classify"
    if not isinstance(prediction, Prediction):
        raise UserError(f"{where} returned {kind_of(prediction)}", "a Prediction, such as Prediction(scores)")
    tasks = prediction.tasks
    _require_scores(f"{where}: scores", prediction.scores, (samples, task.columns_seen))
    if tasks is not None:
        whole = isinstance(tasks, torch.Tensor) and tasks.dtype == torch.int64 and tasks.shape == (samples,)
        if not whole or (samples and not 0 <= int(tasks.min()) <= int(tasks.max()) <= task.index):
            last = "" if not whole or not samples else f" {int(tasks.min())} to {int(tasks.max())}"
            raise UserError(
                f"{where}: tasks is {kind_of(tasks)}{last} after task {task.index}",
                f"None, or int64 numbers ({samples},) from 0 to {task.index}",
            )
    return prediction


def report_of(server: Server) -> dict[str, Any]:
    """The method's own entries in the run record. Raises a `UserError` if JSON cannot hold them."""
    report = server.report()
    try:
        json.dumps(report, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{_name(server)}.report: {error}", "numbers, texts, lists and mappings, None where a number is not defined"
        ) from error
    return report


def _require_message(where: str, message: Any) -> None:
    if not isinstance(message, Message):
        raise UserError(f"{where} returned {kind_of(message)}", "a Message of named tensors")
    _require_tensors(f"{where}: the message", message.tensors)


def _require_tensors(where: str, tensors: Any) -> None:
    if not isinstance(tensors, Mapping):
        raise UserError(f"{where} is {kind_of(tensors)}", "a mapping of names to tensors, such as {}")
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise UserError(f"{where} has {name}, which is {kind_of(tensor)}", "a tensor, such as torch.tensor(3)")


def _require_groups(where: str, name: str, which: Any, samples: int) -> None:
    """Raise a `UserError` unless `which` says of each sample in which sum it is."""
    if which is None:
        return
    whole = isinstance(which, torch.Tensor) and which.ndim == 1 and not which.is_floating_point()
    if not whole or len(which) < samples:
        raise UserError(
            f"{where}: {name} is {kind_of(which)}",
            f"None, or a whole number for each of the {samples} samples",
        )


def _require_scores(where: str, scores: Any, shape: tuple[int, int]) -> None:
    wanted = f"floating-point numbers {shape}, a row per test sample and a column per class seen so far"
    if not isinstance(scores, torch.Tensor) or not scores.is_floating_point() or scores.shape != shape:
        raise UserError(f"{where} is {kind_of(scores)}", wanted)


def _name(half: object) -> str:
    return type(half).__name__
