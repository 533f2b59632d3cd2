"""`python -m arpo_megatron.engine.server.main ARGS`: SGLang's server with this project's additions.

ARGS are those of `sglang.launch_server`. The additions are:

- `gate`: refuses generations during a weight push; only the HTTP server has it
- `receive`: receives a push's weights straight into the parameters
- `checksums`: computes checksums of the weights, for the check after a push
- `stream`: streams an answer in few pieces
- `entropy`: exact entropies of sampled tokens
- `cpu`: what a CPU server needs (with `--device cpu`)
- `fp8_on_cpu`: emulates the products of FP8 engines (with `--device cpu`)
- guards that kill the engine's processes when the process that started them dies

SGLang spawns its scheduler and detokenizer. A spawned child imports this module again as `__mp_main__`, so the module
level prepares it, too. On a CPU they are forked and inherit everything.
"""

import itertools
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from arpo_megatron.engine.server import cpu, entropy, fp8_on_cpu, gate
from arpo_megatron.engine.wire.endpoints import ENGINE_TOKEN_VARIABLE, LAUNCHER_PID_VARIABLE
from arpo_megatron.errors import USER_ERROR_EXIT_CODE, UserError
from arpo_megatron.utils.processes import bind_to_parent, watch_parent


def _die_with_spawner() -> None:
    """Have the kernel kill a spawned child together with its parent (SGLang notices only seconds later)."""
    spawner = multiprocessing.parent_process()
    if spawner is None or spawner.pid is None:
        return
    bind_to_parent(spawner.pid)


def _die_with_launcher() -> None:
    """Kill the server's process group when the launcher dies."""
    if launcher := int(os.environ.get(LAUNCHER_PID_VARIABLE, "0")):
        watch_parent(launcher, lambda: os.killpg(0, signal.SIGKILL))


def _on_cpu(arguments: list[str]) -> bool:
    return ("--device", "cpu") in itertools.pairwise(arguments)


def _fork_workers() -> None:
    """Fork SGLang's workers from the server instead of spawning them, so that they need not import SGLang again.

    This is safe on a CPU only: CUDA does not survive a fork. No torch operator, which would start threads, has run in
    the server when SGLang starts its workers.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def fork(*_args: object) -> None:
        multiprocessing.set_start_method("fork", force=True)

    HookRegistry.register("sglang.srt.entrypoints.engine._set_envs_and_config", fork, HookType.AFTER)


def _keep_files_in_scratch() -> None:
    """Move SGLang's load table from /dev/shm to the scratch folder: killed processes would leave it there."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if find_spec("sglang.srt.managers.load_snapshot") is None:
        return  # sglang 0.5.12 has no such table

    def in_scratch(original: Callable[[str], str], ipc_name: str) -> str:
        return str(Path(tempfile.gettempdir(), Path(original(ipc_name)).name))

    HookRegistry.register("sglang.srt.managers.load_snapshot.shm_path_for", in_scratch, HookType.AROUND)


def _prepare_process() -> None:
    """Prepare any process of the engine; must run before SGLang is imported."""
    _die_with_spawner()
    # SGLang's debug dumper imports Megatron if it is installed, which costs 2 CPU seconds at each start.
    sys.modules["megatron"] = None  # type: ignore[assignment]  # None blocks the import
    if _on_cpu(sys.argv):
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
        cpu.install_stubs()
        cpu.register_hooks()
        fp8_on_cpu.register_hooks()
    from arpo_megatron.engine.server import checksums, receive, stream

    _keep_files_in_scratch()
    entropy.register_hooks()
    receive.register_hooks()
    checksums.register_hooks()
    stream.register_hooks()


def main() -> None:
    """Serve until a signal ends the process. Exits with 2 on a `UserError`."""
    _die_with_launcher()
    # SGLang's ranks meet here instead of at a port, which would be open to every network. A killed server leaves its
    # file, so each start has its own.
    os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{tempfile.mkdtemp(prefix='ranks-')}/store"
    try:
        _prepare_process()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(USER_ERROR_EXIT_CODE)
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    if _on_cpu(sys.argv):
        _fork_workers()
    gate.register_hooks()
    load_plugins()
    gate.install(os.environ.get(ENGINE_TOKEN_VARIABLE))
    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":
    _prepare_process()
