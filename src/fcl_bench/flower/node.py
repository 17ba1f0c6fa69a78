"""The command `fcl-bench-node`: one node of a federation over Flower, a SuperNode with a worker beside it."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any, BinaryIO

from fcl_bench.cli.command import DONE, run_command
from fcl_bench.errors import UserError
from fcl_bench.files import user_path, writable

# The name is written out, since a module that is run as a program has another `__name__`.
log = logging.getLogger("fcl_bench.flower.node")

USAGE = Path(__file__).with_name("help.txt").read_text()
#: Seconds from one start of a process to the next, at least: a process that has worked for longer starts again at once.
_PAUSE = 2.0
_WORKER = "--worker"


@dataclass
class NodeArguments:
    """The arguments of the command (`USAGE`); `clients` ascend, and `changes` are the run's keys that differ here."""

    clients: list[int]
    link: str = "localhost:8000"
    out: str = "outputs"
    ca: str | None = None
    key: str | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    policy: str | None = None


def main() -> int:
    """The console script `fcl-bench-node`; it returns when it is interrupted (130, 143), or for wrong input (2)."""
    return run_command("fcl-bench-node", _work, "the same command joins the run again")


def _work() -> int:
    arguments = sys.argv[1:]
    if {"-h", "--help"} & set(arguments):
        print(USAGE, end="")
        return DONE
    if arguments[:1] == [_WORKER]:
        return _work_for_good(Path(arguments[1]), parsed(arguments[2:]))
    from fcl_bench.flower.relay import require_flower
    from fcl_bench.tracking.console import log_to_terminal

    require_flower("fcl-bench-node")
    from fcl_bench.flower import site_commands

    if arguments[:1] == ["init"]:
        return site_commands.init(arguments[1:])
    if arguments[:1] == ["audit"]:
        return site_commands.audit(parsed(["clients=0", *arguments[1:]]).out)
    if arguments[:1] == ["withdraw"]:
        return site_commands.withdraw(parsed(arguments[1:]))
    log_to_terminal("fcl-bench-node")
    checks = arguments[:1] == ["check"]
    node = parsed(arguments[checks:])
    site_commands.require_files(node)
    if checks:
        return site_commands.check(node)
    with contextlib.suppress(OSError, HTTPException):  # a SuperLink that is not there yet is waited for
        site_commands.require_clock(node)
    return _node(node, arguments)


def parsed(arguments: Sequence[str]) -> NodeArguments:
    """Parse the arguments. Raises a `UserError` if they are wrong."""
    import yaml

    found: dict[str, Any] = {}
    changes: dict[str, Any] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or not re.fullmatch(r"[\w.]+", key):
            raise UserError(f"{argument} is no KEY=VALUE", "fcl-bench-node --help lists the keys")
        if key in ("clients", "link", "out", "ca", "key", "policy"):
            found[key] = value
        else:
            try:
                changes[key] = yaml.safe_load(value)
            except yaml.YAMLError as error:
                raise UserError(f"{argument} has no value that YAML knows", f"{key}=TEXT") from error
    if "clients" not in found:
        raise UserError("clients is not given", "clients=K, the number of this node's client, or a list: 0,3,6")
    if not re.fullmatch(r"\[?\d{1,9}(,\d{1,9})*\]?", found["clients"]):
        raise UserError(f"clients={found['clients']} names no clients", "a number from 0, or a list: 0,3,6")
    clients = [int(number) for number in found.pop("clients").strip("[]").split(",")]
    if len(set(clients)) < len(clients):
        raise UserError(f"clients={','.join(map(str, clients))} names a client twice", "each once")
    link = re.fullmatch(r"(?:[^\s:]+|\[[0-9a-fA-F:]+\]):(\d{1,5})", found.get("link", "localhost:8000"), re.ASCII)
    if link is None or not 0 < int(link[1]) < 2**16:
        raise UserError(f"link={found['link']} is no host:port", "such as link=localhost:8000")
    return NodeArguments(sorted(clients), **found, changes=changes)


class _Restarted:
    """A process that is started again whenever it ends.

    Args:
        name: the process's name in messages.
        start: starts the process, as the first of its own group.
    """

    def __init__(self, name: str, start: Callable[[], subprocess.Popen[bytes]]) -> None:
        self._name, self._start, self._since = name, start, time.monotonic()
        self.process = start()

    def look(self) -> None:
        """Start it again if it has ended, `_PAUSE` after its last start."""
        if (code := self.process.poll()) is not None and time.monotonic() - self._since >= _PAUSE:
            _end_group(self.process)
            log.warning("the %s ended (%d); it starts again", self._name, code)
            self.process, self._since = self._start(), time.monotonic()

    def end(self) -> None:
        """Stop it for good, and whatever it has started."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
        _end_group(self.process)
        self.process.wait()


def _end_group(leader: subprocess.Popen[bytes]) -> None:
    """Kill a process and all that it has started: Flower's own processes have been seen to outlive their SuperNode."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGKILL)


def _node(node: NodeArguments, arguments: Sequence[str]) -> int:
    """Keep a SuperNode and a worker running until this process is told to end."""
    from fcl_bench.flower.relay import quiet_environment

    # A Unix socket's path can have only about a hundred characters.
    folder = Path(tempfile.mkdtemp(prefix="fcl-bench-"))
    path = folder / "worker"
    worker = [sys.executable, "-m", "fcl_bench.flower.node", _WORKER, str(path), *arguments]
    running: list[_Restarted] = []
    try:
        running.append(_Restarted("worker", lambda: _child(worker, dict(os.environ))))
        output = writable(f"out={node.out}", user_path("out", node.out) / "nodes") / f"supernode-{node.clients[0]}.log"
        clients = ", ".join(map(str, node.clients))
        log.info("node of clients %s: SuperLink %s; what the SuperNode says goes to %s", clients, node.link, output)

        def supernode() -> subprocess.Popen[bytes]:
            command = [sys.executable, "-m", "fcl_bench.flower.supernode"]
            command += ["--superlink", node.link, "--port", str(_free_port())]
            command += ["--node-config", f'socket="{path}"']
            command += ["--insecure"] if node.ca is None else ["--root-certificates", str(Path(node.ca).absolute())]
            command += [] if node.key is None else ["--auth-supernode-private-key", str(Path(node.key).absolute())]
            with output.open("ab") as file:
                return _child(command, quiet_environment(folder), file)

        running.append(_Restarted(f"SuperNode (see {output})", supernode))
        while True:
            for process in running:
                process.look()
            time.sleep(0.2)
    finally:
        for process in running:
            process.end()
        shutil.rmtree(folder, ignore_errors=True)


def _child(
    command: Sequence[str], environment: dict[str, str], output: BinaryIO | None = None
) -> subprocess.Popen[bytes]:
    """Start a process that ends whenever this one ends, and that Ctrl-C reaches only through this one.

    Args:
        command, environment: the process's command and environment variables.
        output: the file for its output; None for the terminal.
    """
    return subprocess.Popen(
        command,
        env=environment,
        stdout=output,
        stderr=output,
        preexec_fn=_die_with_parent,
        start_new_session=True,
    )


def _die_with_parent() -> None:
    """On Linux, have the kernel end this process when its parent is gone."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def _free_port() -> int:
    """A free port for the SuperNode's own processes, since several nodes may share a machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _work_for_good(path: Path, node: NodeArguments) -> int:
    """Work as the worker, which answers the messages that the ClientApp forwards."""
    from fcl_bench.flower.frames import listener
    from fcl_bench.flower.policy import Policy
    from fcl_bench.flower.site import site_of
    from fcl_bench.flower.worker import Worker
    from fcl_bench.tracking.console import log_to_terminal

    log_to_terminal("fcl-bench-node")
    out = user_path("out", node.out)
    changes = {"out": node.out, "cache.dir": str(out / "cache"), **node.changes}
    policy = Policy.read(node.policy)
    make = partial(site_of, changes=changes, own=node.clients, policy=policy)
    worker = Worker(node.clients, out / "nodes", make, policy, node.key)
    with listener(path) as line:
        worker.serve(line)
    return DONE


if __name__ == "__main__":
    sys.exit(main())
