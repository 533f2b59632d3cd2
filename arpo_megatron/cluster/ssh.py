"""Run `arpo` on a login node that is reached over SSH (`ssh` in the profile), with the local code.

nemo-run's SSHTunnel copies the working tree, as a git clone of one commit (`~/.arpo/code/TREE`). The same command then
runs on the login node, which has the run directory, the inputs and Slurm. Command, profile and the secrets from the
local environment are sent through standard input, so that no process list shows them.
"""

import json
import os
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from arpo_megatron.cluster.code_snapshot import ROOT, Code, git, snapshot
from arpo_megatron.cluster.profile import read_profile
from arpo_megatron.errors import UserError
from tools_sandbox.utils.yaml import yaml_text

if TYPE_CHECKING:
    from nemo_run import SSHTunnel

HINT_VARIABLE = "ARPO_CLUSTER_HINT"
"""Environment variable on the login node: the text that completes commands printed there, ` --cluster NAME`."""
_LOCAL_KEYS = ("ssh", "identity")
_CODE = ".arpo/code"
_KEPT_DAYS = 30


@dataclass(frozen=True, slots=True)
class LoginNode:
    """The SSH address of a login node, and the profile to use there."""

    cluster: str
    """Name or file of the profile."""
    profile: Mapping[str, Any]
    """Values of the profile without those that only the local machine needs."""
    user: str | None
    """None: the user of ~/.ssh/config, or the local user."""
    host: str
    """Host name, or an alias of ~/.ssh/config."""
    port: int | None
    """None: the port of ~/.ssh/config, or 22."""
    identity: str | None
    """Private key; None: the agent, the usual files, or a password prompt."""


def cluster_hint() -> str:
    """Return the text that completes each printed `arpo` command, empty if the user works on this machine."""
    return os.environ.get(HINT_VARIABLE, "")


def login_node(cluster: str | None) -> LoginNode | None:
    """Return the login node of a profile, or None if its commands run on this machine.

    Raises:
        UserError: there is no such profile, or a key that SSH needs is wrong or missing.
    """
    if cluster is None:
        return None
    values, where = read_profile(cluster)
    if values.get("ssh") is None:
        return None
    found = re.fullmatch(r"(?:([\w.-]+)@)?([\w.-]+)(?::(\d+))?", str(values["ssh"]))
    if found is None:
        raise UserError(f"{where}: ssh: {values['ssh']!r} does not have the form [USER@]HOST[:PORT]")
    if not isinstance(values.get("python"), str) or '"' in values["python"]:
        raise UserError(f"{where}: ssh needs python, the path of the cluster's Python that has this package")
    identity = values.get("identity")
    return LoginNode(
        cluster=cluster,
        profile={key: value for key, value in values.items() if key not in _LOCAL_KEYS},
        user=found[1],
        host=found[2],
        port=int(found[3]) if found[3] else None,
        identity=None if identity is None else os.path.expandvars(Path(identity).expanduser()),
    )


def run_on_login_node(cluster: str | None, command: str, *arguments: str | None, **options: object) -> None:
    """Run an `arpo` command on the profile's login node and exit with its code. Return if that is this machine.

    Args:
        cluster: name or file of the profile.
        command: `submit`, `status`, ...
        arguments: positional arguments; None is left out.
        options: command options. None and False are left out, True is a flag, a path is a file to send.

    Raises:
        UserError: the login node cannot be reached, or the code cannot be copied to it.
    """
    if (node := login_node(cluster)) is None:
        return
    raise typer.Exit(_run_remotely(node, json.dumps(payload_of(node, command, arguments, options))))


def payload_of(
    node: LoginNode, command: str, arguments: Sequence[str | None], options: Mapping[str, object]
) -> dict[str, Any]:
    """Return what `cli.login_node` reads: arguments, files and environment. See `run_on_login_node`."""
    files = {f"{Path(node.cluster).stem}.yaml": yaml_text(dict(node.profile))}
    sent = [command, *(each for each in arguments if each is not None), "--cluster", next(iter(files))]
    for name, value in options.items():
        if isinstance(value, Path):
            files[f"over-{value.name}"] = _text_of(value)
            sent += [f"--{name}", f"over-{value.name}"]
        elif value is not None and value is not False:
            sent += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    wanted = [name for name, source in (node.profile.get("secrets") or {}).items() if source == "env"]
    return {
        "arguments": sent,
        "files": files,
        "environment": {name: os.environ[name] for name in wanted if name in os.environ}
        | {HINT_VARIABLE: f" --cluster {node.cluster}"},
    }


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None


def _run_remotely(node: LoginNode, payload: str) -> int:
    with connected(node) as (tunnel, shell):
        exit_code = int(tunnel.run(shell, hide=False, warn=True, in_stream=StringIO(payload + "\n")).exited)
    if exit_code < 0:
        raise UserError(f"{node.host} returned no exit code: the connection was lost, or the command was killed")
    return exit_code


@contextmanager
def connected(node: LoginNode) -> "Iterator[tuple[SSHTunnel, str]]":
    """Connect to a login node with the local code on it; yield the connection and the command of `cli.login_node`.

    Raises:
        UserError: the login node cannot be reached, the code cannot be copied, or the connection is lost.
    """
    code = snapshot()
    tunnel = _connect(node, f"{_CODE}/{code.tree}")
    from paramiko.ssh_exception import SSHException

    try:
        _upload(tunnel, code, node.host)
        python = node.profile["python"]
        # In a login shell, because only that has Slurm on its PATH.
        yield tunnel, f"bash -lc 'cd {tunnel.job_dir} && exec \"{python}\" -m arpo_megatron.cli.login_node'"
    except (EOFError, ConnectionError, SSHException) as error:
        raise UserError(f"the connection to {node.host} was lost: {error or type(error).__name__}") from None
    finally:
        tunnel.cleanup()


def _connect(node: LoginNode, folder: str) -> "SSHTunnel":
    with warnings.catch_warnings():  # nemo-run imports packages for other executors that warn
        warnings.simplefilter("ignore")
        try:
            from nemo_run import SSHTunnel
        except ImportError:
            raise UserError(
                "a profile with ssh needs nemo-run: pip install 'arpo-megatron[slurm]', or `make setup` in the clone"
            ) from None
        from paramiko.ssh_exception import SSHException
    from rich.console import Console

    tunnel = SSHTunnel(host=node.host, user=node.user, port=node.port, identity=node.identity, job_dir=folder)
    tunnel.console = Console(stderr=True)
    try:
        tunnel.connect()
    except (OSError, SSHException) as error:
        raise UserError(f"{node.host} cannot be reached over SSH: {error or type(error).__name__}") from None
    except SystemExit:
        user = node.user or "this user"
        raise UserError(f"{node.host} accepts no key and no password of {user}: check ssh and identity") from None
    return tunnel


def _upload(tunnel: "SSHTunnel", code: Code, host: str) -> None:
    """Copy the working tree as a clone with the local HEAD, unless the login node has this tree already."""
    folder, whole = tunnel.job_dir, f"{tunnel.job_dir}/.git/arpo-whole"
    if tunnel.run(f"test -e {whole}", warn=True).ok:
        return
    listed = git(ROOT, "rev-list", "--objects", "--no-walk", code.commit, code.tree)
    with tempfile.TemporaryDirectory() as scratch:
        pack = Path(scratch) / "pack"
        pack.write_bytes(git(ROOT, "pack-objects", "--stdout", "-q", stdin=listed))
        made = tunnel.run(f"rm -rf {folder} && mkdir -p -m 700 {folder}", warn=True)
        if not made.ok:
            raise UserError(f"{host}: cannot create {folder}: {' '.join(made.stderr.split())}")
        try:
            tunnel.put(str(pack), f"{folder}/.pack")
        except OSError as error:  # SFTP's message for a full disk does not mention the disk
            raise UserError(f"{host}: cannot write {folder}/.pack ({error}): is the disk there full?") from None
    done = tunnel.run(
        f"cd {folder} && git init -q . && git unpack-objects -q <.pack && rm .pack && "
        f"echo {code.commit} >.git/shallow && git update-ref --no-deref HEAD {code.commit} && "
        f"git read-tree -m -u {code.tree} && touch .git/arpo-whole && "
        f"find .. -mindepth 1 -maxdepth 1 -mtime +{_KEPT_DAYS} -exec rm -rf {{}} +",
        warn=True,
    )
    if not done.ok:
        raise UserError(f"{host}: cannot unpack the code: {' '.join(done.stderr.split())}")
