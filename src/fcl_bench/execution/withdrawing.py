"""Takes clients out of the model of a run that has stopped or is complete, by their copies of their uploads."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

from omegaconf import OmegaConf

from fcl_bench.config import load_settings
from fcl_bench.engine.blob import unpacked
from fcl_bench.engine.checkpoint import GROWING, tensor_text, text_tensor
from fcl_bench.engine.codec import Codec
from fcl_bench.engine.loop import CLIENT
from fcl_bench.errors import UserError
from fcl_bench.execution.folder import RunFolder
from fcl_bench.execution.model_file import read_model, write_model
from fcl_bench.execution.plan import make_plan
from fcl_bench.files import content_hash, file_checksum, write_json
from fcl_bench.options.withdrawal import WITHDRAWAL, take_out
from fcl_bench.protocol.fields import Uploads

_WITHDRAWAL, _MODEL = CLIENT + WITHDRAWAL, "model.safetensors"


def withdraw(path: Path, sent: Path) -> list[int]:
    """Subtract what clients sent from a run's sums, and make its model anew; returns these clients.

    The checkpoint is written last: until then the same command does the same again. Raises a `UserError` if the run
    keeps no sums, or `sent` lacks an upload of a client of which it has one.

    Args:
        path: the run's folder, whose lock the caller holds.
        sent: folder of the clients' copies of their uploads, by receipt (`options.withdrawal.receipt`).
    """
    record = RunFolder(path).verified(read=()) if (path / "run.json").exists() else None
    run = path.name.rpartition("-")[2] if record is None else record["run_id"]
    checkpoint = RunFolder(path, run).checkpoint
    state, tensors = checkpoint.load() or ({}, {})
    if _WITHDRAWAL not in tensors:
        raise UserError(f"{path} keeps no sums to subtract from", "a run with transport.withdrawal=true, after a task")
    withdrawal = json.loads(tensor_text(tensors[_WITHDRAWAL]))
    absorbed, withdrawn = withdrawal["absorbed"], withdrawal["withdrawn"]
    leaving = sorted({client for receipt, (client, _) in absorbed.items() if (sent / receipt).is_file()})
    if not leaving:
        remedy = "what fcl-bench-node withdraw names; run.json says who was taken out already"
        raise UserError(f"nothing of {sent} is in the sums of run {run}", remedy)
    if len(leaving) == len({client for client, _ in absorbed.values()}):
        raise UserError(f"nobody else is in run {run}", f"rm -r {path}: without that client there is no model")
    plan = make_plan(load_settings(OmegaConf.create(withdrawal["config"])), withdrawal["sites"])
    if plan.id != run:
        raise UserError(f"the data here are not what run {run} was made on", "the same files and folder as before")
    method, context = plan.settings.method, plan.context
    server, codec = method.server(context), Codec(Uploads.of(method, context), None, context.dtype, context.device)
    server.load_state_dict({name: own for name, own in tensors.items() if not name.startswith((GROWING, CLIENT))})
    for receipt, (client, task) in [*absorbed.items()]:
        if client in leaving:
            blob = (sent / receipt).read_bytes() if (sent / receipt).is_file() else b""
            if content_hash(blob).hexdigest() != receipt:
                what = f"{sent / receipt} is missing, or not what client {client} sent in task {task}"
                raise UserError(what, "the whole folder as the site keeps it")
            take_out(server, client, codec.receive(unpacked(blob)[0], client), plan.dealt.stream.tasks[task])
            del absorbed[receipt]
    server.finish_task()
    after, now = state["tasks_done"] - 1, datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    withdrawn += [{"client": client, "after_task": after, "time": now} for client in leaving]
    text = f"clients {leaving} were taken out after it; accuracies so far are with them"
    state["gates"]["found"].append({"gate": "withdrawn", "task": after, "text": text})
    if record is not None:
        about, before = read_model(path / _MODEL, context.device)
        write_model(path / _MODEL, {**server.model(), "class_order": before["class_order"]}, about)
        record["transport"]["withdrawn"], record["gates"] = withdrawn, state["gates"]["found"]
        record["files"][_MODEL] = file_checksum(path / _MODEL)
        write_json(path / "run.json", record)
    checkpoint.save(state, {**tensors, **server.state_dict(), _WITHDRAWAL: text_tensor(json.dumps(withdrawal))})
    return leaving
