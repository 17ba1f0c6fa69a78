"""What an engineer at a site does before and after a run: `fcl-bench-node init`, `check`, `audit` and `withdraw`."""

from __future__ import annotations

import ssl
import time
from collections.abc import Sequence
from email.utils import parsedate_to_datetime
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import TYPE_CHECKING

import numpy as np
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from cryptography.x509 import load_pem_x509_certificate

from fcl_bench.cli.command import DONE
from fcl_bench.data.sources.array_files import SiteFile
from fcl_bench.errors import UserError, first_line
from fcl_bench.files import user_path
from fcl_bench.flower.identity import keys_in
from fcl_bench.flower.ledger import LEDGER, SENT, SiteLedger, read, summary
from fcl_bench.flower.node_registry import software
from fcl_bench.flower.policy import TEMPLATE, Policy
from fcl_bench.flower.signing import CLOCKS
from fcl_bench.options.withdrawal import WITHDRAWAL

if TYPE_CHECKING:
    from fcl_bench.flower.node import NodeArguments


def init(arguments: Sequence[str]) -> int:
    """Write a policy with safe values. Raises a `UserError` if the file is there."""
    if len(arguments) > 1:
        raise UserError(f"fcl-bench-node init {' '.join(arguments)} names several files", "one file, or none")
    path = user_path("init", arguments[0] if arguments else "policy.yaml")
    try:
        with path.open("x") as file:
            file.write(TEMPLATE.read_text())
    except FileExistsError as error:
        raise UserError(f"{path} is there already", "another name, or edit that file") from error
    print(f"{path}: edit it, then fcl-bench-node check policy={path} clients=K data.path=FILE")
    return DONE


def audit(out: str) -> int:
    """Check the ledger's chain, and print what left. Raises a `UserError` if there is none, or it was changed."""
    path = user_path("out", out) / "nodes" / LEDGER
    if not path.is_file():
        raise UserError(f"out={out} has no {path}", "out=FOLDER of a node that has answered a request")
    print(summary(path))
    return DONE


def withdraw(node: NodeArguments) -> int:
    """Let no more of a run leave; it can then forget what has left. Raises a `UserError` for what cannot be undone."""
    folder, run = user_path("out", node.out) / "nodes", str(node.changes.get("run", ""))
    ledger = SiteLedger(folder / LEDGER, Policy.read(node.policy))
    methods = {entry["run"]: entry["method"] for entry, _ in read(ledger.path)}
    for client in node.clients:
        sent = folder / SENT / run / str(client)
        if not sent.is_dir():
            what = f"what client {client} sent in run={run} cannot be undone (method={methods.get(run, 'unknown')})"
            remedy = "an id of fcl-bench-node audit whose server set transport.withdrawal=true, as it can for sums"
            raise UserError(f"{what}: nothing is in {sent}", remedy)
        if (run, client) in ledger.withdrawn:
            raise UserError(f"client {client} has withdrawn from run {run} already", f"{sent}, for the server")
        entry = {"kind": WITHDRAWAL, "run": run, "client": client, "method": methods.get(run, "unknown"), "left": True}
        ledger.write({**entry, "bytes": sum(file.stat().st_size for file in sent.iterdir())})
        print(f"{sent}: copy it to the server, for fcl-bench runs withdraw {run} {client}; no more of the run leaves")
    return DONE


def require_files(node: NodeArguments) -> None:
    """Raise a `UserError` unless the policy and the key files of a node can be used."""
    policy = Policy.read(node.policy)
    _ = policy.server_key, policy.peers and keys_in(policy.peers)
    of_key = partial(load_ssh_private_key, password=None), "a file of ssh-keygen -t ecdsa -b 384 -N ''"
    of_ca = load_pem_x509_certificate, "the certificate of the SuperLink's authority, in PEM"
    for name, file, (loads, remedy) in (("ca", node.ca, of_ca), ("key", node.key, of_key)):
        if file is not None:
            try:
                loads(user_path(name, file).read_bytes())
            except (OSError, ValueError, TypeError) as error:
                raise UserError(f"{name}={file} cannot be used: {first_line(error)}", remedy) from error


def check(node: NodeArguments) -> int:
    """Try what joining needs, and print what was found. Raises a `UserError` for the first thing that can't work."""
    policy = Policy.read(node.policy)
    print(f"policy: {node.policy or 'the one that fcl-bench-node init writes'}; {policy}")
    print(f"software: {', '.join(' '.join(item) for item in software().items())}")
    print(f"ledger: {sum(1 for _ in read(user_path('out', node.out) / 'nodes' / LEDGER))} lines")
    if "data.path" in node.changes:
        _check_data(str(node.changes["data.path"]), policy)
    elif policy.own_data:
        raise UserError("data.path is not given", "data.path=FILE, or policy=none for a data set that is public")
    _check_link(node)
    return DONE


def _check_data(path: str, policy: Policy) -> None:
    held = SiteFile(path=path).read()
    print(f"data: {len(held.x)} samples of {held.x.shape[1]} features, {int(held.labelled.sum())} with a label")
    for task in np.unique(held.task):
        columns, found = np.unique(held.column[(held.task == task) & held.labelled], return_counts=True)
        print(f"  task {task}: " + ", ".join(f"class {c}: {n}" for c, n in zip(columns, found, strict=True)))
        if few := [int(column) for column in columns[found < policy.smallest_group]]:
            print(f"  classes {few} have fewer than smallest_group={policy.smallest_group}: no sums by class leave")


def _check_link(node: NodeArguments) -> None:
    try:
        ahead = require_clock(node)
    except (OSError, HTTPException) as error:
        remedy = "a SuperLink that listens there (--host), an open firewall, and ca=FILE of its authority"
        raise UserError(f"link={node.link} cannot be reached: {first_line(error)}", remedy) from error
    print(
        f"SuperLink: {node.link} answers, {'with' if node.ca else 'without'} TLS; clocks differ by {abs(ahead):.0f} s"
    )


def require_clock(node: NodeArguments) -> float:
    """Seconds by which the clock here is ahead of the SuperLink's.

    The ledger's times, the day of `messages_per_day` and the end of a signed request's time need it, and a SuperLink
    refuses whatever a node signs that is 5 s ahead, without a word of clocks.

    Raises:
        UserError: these are too many.
        OSError, HTTPException: the SuperLink cannot be reached.
    """
    host, _, port = node.link.rpartition(":")
    context = None if node.ca is None else ssl.create_default_context(cafile=node.ca)
    of_kind = HTTPConnection if context is None else partial(HTTPSConnection, context=context)
    line = of_kind(host.strip("[]"), int(port), timeout=10)
    begin = time.time()
    try:
        line.request("HEAD", "/")
        there = parsedate_to_datetime(line.getresponse().getheader("Date", "")).timestamp() + 0.5  # in whole seconds
    except (ValueError, TypeError) as error:
        raise HTTPException("it does not say what time it is") from error
    finally:
        line.close()
    here, around = (begin + time.time()) / 2, (time.time() - begin) / 2
    ahead = here - there
    if abs(ahead) > CLOCKS + around:
        why = f"the clock here is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} that of link={node.link}"
        raise UserError(why, f"clocks that differ by {CLOCKS:.0f} s at most, such as by NTP")
    return ahead
