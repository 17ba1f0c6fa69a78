"""The server's end of a Flower run: starts the relay on the SuperLink, and pushes and pulls messages through it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fcl_bench.errors import UserError, first_line, installing
from fcl_bench.flower import frames
from fcl_bench.flower.signing import signed

_BUNDLE = Path(__file__).parent / "bundle"
#: Seconds until a ServerApp that was asked for has come: Flower starts a process and installs two files.
_START = 60.0


class SuperLinkLost(Exception):
    """The SuperLink, or the relay on it, is not there (any more)."""


@dataclass(frozen=True)
class Answer:
    """The answer to a message.

    Attributes:
        message: the message that it answers.
        blobs: the answer of the node's worker; none if Flower reports an error.
        error: that error.
    """

    message: str
    blobs: list[bytes]
    error: str = ""


def require_flower(user: str) -> None:
    """Raise a `UserError` unless Flower is installed."""
    if importlib.util.find_spec("flwr") is None or not program("flwr").exists():
        raise UserError(f"{user} needs Flower, which is not installed", installing("flower"))


def program(name: str) -> Path:
    """The path of one of Flower's commands in the environment of this process."""
    return Path(sysconfig.get_path("scripts")) / name


def quiet_environment(home: Path) -> dict[str, str]:
    """The environment of Flower's processes: files in `home`, ten looks for work per second, no telemetry.

    Flower starts its programs by their names, so those of this environment come first.
    """
    own = {"FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1"}
    own["PATH"] = os.pathsep.join([str(program("flwr").parent), os.environ.get("PATH", "")])
    return {**os.environ, **own}


class Relay:
    """Pushes and pulls messages through a ServerApp on the SuperLink.

    Args:
        address: host:port of the SuperLink, on this machine.
        authority: file of the certificate authority that signed the SuperLink's certificate; None: no TLS.
        key: with which requests are signed; None: they are not.
    """

    def __init__(self, address: str, authority: Path | None = None, key: Any = None) -> None:
        self._address, self._authority, self._key = address, authority, key
        # A Unix socket's path has room for a hundred letters, which a run's folder may exceed.
        self._folder = Path(tempfile.mkdtemp(prefix="fcl-bench-"))
        self._socket: socket.socket | None = None

    def open(self) -> None:
        """Start the ServerApp, in place of one that is lost.

        Raises:
            UserError: the SuperLink refuses, which no waiting mends.
            SuperLinkLost: it does not answer.
        """
        self._hang_up()
        path = self._folder / "server"
        with contextlib.closing(frames.listener(path)) as listener:
            self._start(path)
            listener.settimeout(_START)
            try:
                self._socket, _ = listener.accept()
            except TimeoutError as error:
                raise SuperLinkLost(
                    f"no ServerApp of the SuperLink at {self._address} came within {_START:g} seconds; it has to run on"
                    " this machine, as this user, with fcl-bench installed"
                ) from error
        self._socket.settimeout(5 * _START)

    @property
    def is_open(self) -> bool:
        """Whether there is a ServerApp."""
        return self._socket is not None

    def _start(self, path: Path) -> None:
        """Have the SuperLink run the relay, by Flower's own command."""
        secure = (
            "insecure = true"
            if self._authority is None
            else f"root-certificates = {json.dumps(str(self._authority.absolute()))}"
        )
        (self._folder / "config.toml").write_text(
            f'[superlink]\ndefault = "link"\n[superlink.link]\naddress = {json.dumps(self._address)}\n{secure}\n'
        )
        command = [program("flwr"), "run", _BUNDLE, "link", "--run-config", f"socket={json.dumps(str(path))}"]
        try:
            done = subprocess.run(
                [*map(str, command), "--format", "json"],
                capture_output=True,
                text=True,
                timeout=_START,
                env=quiet_environment(self._folder),
            )
            result = json.loads(done.stdout[done.stdout.index("{") :])
        except (subprocess.TimeoutExpired, ValueError) as error:
            raise SuperLinkLost(f"flwr run says nothing of use about {self._address}") from error
        if not result.get("success"):
            # The last line says what is wrong; the lines before it say what was tried.
            reason = [line for line in str(result.get("error-message", done.stderr)).splitlines() if line.strip()][-1:]
            raise SuperLinkLost(f"the SuperLink at {self._address}: {' '.join(reason) or 'flwr run failed'}")

    def nodes(self) -> list[str]:
        """The SuperNodes that the SuperLink counts as there, by their numbers."""
        return list(self._call({"do": "nodes"}).header["nodes"])

    def push(self, node: str, seconds: float, request: bytes) -> str | None:
        """Send a request to a node; the message's name, or None if the node is gone.

        Args:
            node: of `nodes`.
            seconds: after which neither the request nor its answer is of use.
            request: for the node's worker.
        """
        request = signed(request, self._key, seconds)
        found = self._call({"do": "push", "node": node, "ttl": seconds}, [request]).header["message"]
        return None if found is None else str(found)

    def pull(self, messages: Mapping[str, int]) -> Iterator[Answer]:
        """The answers that are there, each once.

        Args:
            messages: what they answer, and the most bytes of each; of a longer one an error comes.
        """
        if not messages:
            return
        header, blobs = self._call({"do": "pull", "messages": dict(messages)}, most=sum(messages.values()))
        for reply in header["replies"]:
            own, blobs = blobs[: reply["blobs"]], blobs[reply["blobs"] :]
            yield Answer(reply["message"], own, reply["error"])

    def _call(self, header: dict[str, Any], blobs: Sequence[bytes] = (), most: int = 0) -> frames.Frame:
        if self._socket is None:
            raise SuperLinkLost(f"there is no relay to {self._address}")
        try:
            frames.send(self._socket, header, blobs)
            answer, reason = frames.receive(self._socket, most), ""
        except OSError as error:
            answer, reason = None, f": {first_line(error)}"
        if answer is None:
            self._hang_up()
            raise SuperLinkLost(f"the SuperLink at {self._address} is gone{reason}")
        return answer

    def _hang_up(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def close(self) -> None:
        """End the ServerApp."""
        self._hang_up()
        shutil.rmtree(self._folder, ignore_errors=True)
