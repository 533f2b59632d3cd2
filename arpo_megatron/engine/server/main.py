"""`python -m arpo_megatron.engine.server.main ARGS`: SGLang's own server with this project's additions.

They are the entropy plug-in, checksums of the weights and their receipt in place, the gate that a weight push closes,
the guard that no process outlives the one that started it, and with `--device cpu` the modules `cpu_*`. All
but the gate, which belongs to the HTTP server, must be in all of the engine's processes. SGLang spawns its scheduler
and detokenizer, and a spawned child imports this module again (as `__mp_main__`), so the module level reaches it; on a
CPU they are forked and inherit everything. ARGS are those of `sglang.launch_server`.
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

from arpo_megatron.engine.server import cpu_expert_routes as cpu_routes
from arpo_megatron.engine.server import cpu_onednn, cpu_stubs
from arpo_megatron.engine.server import entropy as sglang_plugin
from arpo_megatron.engine.server import gate as push_gate
from arpo_megatron.errors import USER_ERROR_EXIT_CODE, UserError
from arpo_megatron.utils.processes import die_with_parent, watch_parent

LAUNCHER_PID_VARIABLE = "ARPO_ENGINE_LAUNCHER_PID"
"""Environment variable: when the process with this id dies, the engine's whole process group dies too."""


def _die_with_spawner() -> None:
    """In a spawned child: be killed with the process that spawned it (SGLang does so too, but only seconds later)."""
    spawner = multiprocessing.parent_process()
    if spawner is None:
        return
    die_with_parent()
    if os.getppid() != spawner.pid:  # it died before the line above
        os._exit(1)


def _die_with_launcher() -> None:
    """In the server: end the whole process group when the launcher is gone."""
    if launcher := int(os.environ.get(LAUNCHER_PID_VARIABLE, "0")):
        watch_parent(launcher, lambda: os.killpg(0, signal.SIGKILL))


def _on_cpu(arguments: list[str]) -> bool:
    return ("--device", "cpu") in itertools.pairwise(arguments)


def _fork_workers() -> None:
    """Fork SGLang's workers from the server instead of spawning them: they need not import SGLang once more.

    A worker then inherits the imported modules. Safe on a CPU only: CUDA does not survive a fork, and nothing here
    has run a torch operator (which would have started threads) by the time SGLang starts its workers.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def fork(*_args: object) -> None:
        multiprocessing.set_start_method("fork", force=True)

    HookRegistry.register("sglang.srt.entrypoints.engine._set_envs_and_config", fork, HookType.AFTER)


def _keep_files_in_scratch() -> None:
    """SGLang's table of loads would stay in /dev/shm: its processes are killed, and nobody removes it."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if find_spec("sglang.srt.managers.load_snapshot") is None:
        return  # sglang 0.5.12 has no such table

    def in_scratch(original: Callable[[str], str], ipc_name: str) -> str:
        return str(Path(tempfile.gettempdir(), Path(original(ipc_name)).name))

    HookRegistry.register("sglang.srt.managers.load_snapshot.shm_path_for", in_scratch, HookType.AROUND)


def _prepare_process() -> None:
    """What every process of the engine needs before it imports SGLang."""
    _die_with_spawner()
    # SGLang's debug dumper imports Megatron wherever it finds it, two CPU seconds of each start; now it finds none.
    sys.modules["megatron"] = None  # type: ignore[assignment]  # None bars an import
    if _on_cpu(sys.argv):
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
        cpu_stubs.install()
        cpu_routes.register()
        cpu_onednn.register()
    from arpo_megatron.engine.server import checksums as weight_checksums
    from arpo_megatron.engine.server import receive as weight_arrival

    _keep_files_in_scratch()
    sglang_plugin.register()
    weight_arrival.register()
    weight_checksums.register()


def main() -> None:
    """Serve until a signal comes. Exits with 2 on a `UserError`."""
    _die_with_launcher()
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
    push_gate.register()
    load_plugins()
    push_gate.install(os.environ.get(push_gate.ENGINE_TOKEN))
    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":
    _prepare_process()
