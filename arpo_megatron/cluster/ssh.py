"""A login node that is elsewhere (`ssh` in the profile): `arpo` runs there, with the code as it lies here.

nemo-run's SSHTunnel brings the working tree, as a git clone of one commit (`~/.arpo/code/TREE`); the same command then
runs on the login node and does what it always does there: the run directory, the inputs and Slurm are all on its side.
Command, profile and the secrets that come from our environment go through standard input, so that no list of processes
shows them.
"""

import json
import os
import re
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
import yaml

from arpo_megatron.cluster.code_snapshot import ROOT, Code, git, snapshot
from arpo_megatron.cluster.profile import read_profile
from arpo_megatron.errors import UserError

if TYPE_CHECKING:
    from nemo_run import SSHTunnel

HINT_VARIABLE = "ARPO_CLUSTER_WORDS"
"""Environment variable on the login node: what the user adds to each command here."""
_HERE_ONLY = ("ssh", "identity")
_CODE = ".arpo/code"
_KEPT_DAYS = 30


@dataclass(frozen=True, slots=True)
class LoginNode:
    """How to get there, and what `arpo` is there.

    Attributes:
        cluster: name of the profile, or its file.
        profile: what it says to the login node.
        user: None: what ~/.ssh/config says, or the user here.
        host: name, or an alias of ~/.ssh/config.
        port: None: likewise.
        identity: private key; None: the agent, the usual files, or a password that is asked for.
    """

    cluster: str
    profile: Mapping[str, Any]
    user: str | None
    host: str
    port: int | None
    identity: str | None


def words_to_add() -> str:
    """For the end of each command that is told to the user; nothing where the user is on this machine."""
    return os.environ.get(HINT_VARIABLE, "")


def login_node(cluster: str | None) -> LoginNode | None:
    """Where the profile's commands run; None: here.

    Raises:
        UserError: there is no such profile, or it lacks what a login node elsewhere wants.
    """
    if cluster is None:
        return None
    values, where = read_profile(cluster)
    if values.get("ssh") is None:
        return None
    found = re.fullmatch(r"(?:([\w.-]+)@)?([\w.-]+)(?::(\d+))?", str(values["ssh"]))
    if found is None:
        raise UserError(f"{where}: ssh: {values['ssh']!r} is not [USER@]HOST[:PORT]")
    if not isinstance(values.get("python"), str) or '"' in values["python"]:
        raise UserError(f"{where}: with ssh, python must name the Python on the cluster that has this package")
    identity = values.get("identity")
    return LoginNode(
        cluster=cluster,
        profile={key: value for key, value in values.items() if key not in _HERE_ONLY},
        user=found[1],
        host=found[2],
        port=int(found[3]) if found[3] else None,
        identity=None if identity is None else os.path.expandvars(Path(identity).expanduser()),
    )


def elsewhere(cluster: str | None, command: str, *words: str | None, **options: object) -> None:
    """Run an `arpo` command on the profile's login node and exit as it did; returns where that is this machine.

    Args:
        cluster: profile.
        command: `submit`, `status`, ...
        words: its arguments; None: not given.
        options: its options; None and False: not given, True: a flag, a path: of a file that goes along.

    Raises:
        UserError: the login node cannot be reached, or the code cannot be brought there.
    """
    if (node := login_node(cluster)) is None:
        return
    files = {f"{Path(node.cluster).stem}.yaml": yaml.safe_dump(dict(node.profile))}
    said = [command, *(word for word in words if word is not None), "--cluster", next(iter(files))]
    for name, value in options.items():
        if isinstance(value, Path):
            files[f"over-{value.name}"] = _text_of(value)
            said += [f"--{name}", f"over-{value.name}"]
        elif value is not None and value is not False:
            said += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    wanted = [name for name, source in (node.profile.get("secrets") or {}).items() if source == "env"]
    payload = {
        "words": said,
        "files": files,
        "environment": {name: os.environ[name] for name in wanted if name in os.environ}
        | {HINT_VARIABLE: f" --cluster {node.cluster}"},
    }
    raise typer.Exit(_run_there(node, json.dumps(payload)))


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None


def _run_there(node: LoginNode, payload: str) -> int:
    code = snapshot()
    tunnel = _connected(node, f"{_CODE}/{code.tree}")
    from paramiko.ssh_exception import SSHException

    try:
        _bring(tunnel, code, node.host)
        python = node.profile["python"]
        shell = f'cd {tunnel.job_dir} && exec "{python}" -m arpo_megatron.cluster.ssh'
        # A login shell: it is the one that has Slurm on its PATH.
        given = StringIO(payload + "\n")
        code_there = int(tunnel.run(f"bash -lc '{shell}'", hide=False, warn=True, in_stream=given).exited)
    except (EOFError, ConnectionError, SSHException) as error:
        raise UserError(f"the connection to {node.host} was lost: {error or type(error).__name__}") from None
    finally:
        tunnel.cleanup()
    if code_there < 0:
        raise UserError(f"no end of the command was heard from {node.host}: the connection was lost, or it was killed")
    return code_there


def _connected(node: LoginNode, folder: str) -> "SSHTunnel":
    with warnings.catch_warnings():  # of packages that nemo-run imports for other executors
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
        raise UserError(f"{node.host} lets {node.user or 'this user'} in with no key, and with no password") from None
    return tunnel


def _bring(tunnel: "SSHTunnel", code: Code, host: str) -> None:
    """The working tree as a clone whose HEAD is our commit; a tree that is there already is not sent again."""
    folder, whole = tunnel.job_dir, f"{tunnel.job_dir}/.git/arpo-whole"
    if tunnel.run(f"test -e {whole}", warn=True).ok:
        return
    listed = git(ROOT, "rev-list", "--objects", "--no-walk", code.commit, code.tree)
    with tempfile.TemporaryDirectory() as scratch:
        pack = Path(scratch) / "pack"
        pack.write_bytes(git(ROOT, "pack-objects", "--stdout", "-q", given=listed))
        made = tunnel.run(f"rm -rf {folder} && mkdir -p -m 700 {folder}", warn=True)
        if not made.ok:
            raise UserError(f"{host}: no directory for the code: {' '.join(made.stderr.split())}")
        try:
            tunnel.put(str(pack), f"{folder}/.pack")
        except OSError as error:  # what SFTP says of a full disk does not name it
            raise UserError(f"{host}: {folder}/.pack cannot be written ({error}): is the disk there full?") from None
    done = tunnel.run(
        f"cd {folder} && git init -q . && git unpack-objects -q <.pack && rm .pack && "
        f"echo {code.commit} >.git/shallow && git update-ref --no-deref HEAD {code.commit} && "
        f"git read-tree -m -u {code.tree} && touch .git/arpo-whole && "
        f"find .. -mindepth 1 -maxdepth 1 -mtime +{_KEPT_DAYS} -exec rm -rf {{}} +",
        warn=True,
    )
    if not done.ok:
        raise UserError(f"the code cannot be unpacked on the login node: {' '.join(done.stderr.split())}")


def _words(given: Sequence[str], files: Mapping[str, str], folder: Path) -> list[str]:
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [str(folder / word) if word in files else word for word in given]
