"""`python -m arpo_megatron.rollout.sglang_main ARGS`: SGLang's own server with this project's two additions.

SGLang starts its scheduler and detokenizer with the `spawn` method, which imports this module again in every child, so what stands
at module level reaches all of the engine's processes: the entropy plug-in, the CPU stand-ins (only with `--device cpu`), and
the guard that no process outlives the one that started it. ARGS are those of `sglang.launch_server`.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time

from arpo_megatron.errors import USER_ERROR_EXIT_CODE, UserError
from arpo_megatron.rollout import cpu_standins, sglang_plugin

LAUNCHER_PID_VARIABLE = "ARPO_ENGINE_LAUNCHER_PID"
"""Environment variable: when the process with this id dies, the engine's whole process group dies too."""

_PR_SET_PDEATHSIG = 1
_WATCH_INTERVAL_S = 0.5


def _die_with_spawner() -> None:
    """In a spawned child: be killed with the process that spawned it (SGLang does so too, but only seconds later)."""
    spawner = multiprocessing.parent_process()
    if spawner is None:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != spawner.pid:  # it died before the line above
        os._exit(1)


def _die_with_launcher() -> None:
    """In the server: end the process group when the launcher is gone, however it went.

    PR_SET_PDEATHSIG would do for a launcher's main thread, but it fires when the launching THREAD ends.
    """
    launcher = int(os.environ.get(LAUNCHER_PID_VARIABLE, "0"))
    if not launcher:
        return

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(_WATCH_INTERVAL_S)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()


def _on_cpu(arguments: list[str]) -> bool:
    return "--device=cpu" in arguments or ("--device", "cpu") in zip(arguments, arguments[1:], strict=False)


def _prepare_process() -> None:
    """What every process of the engine needs before it imports SGLang."""
    _die_with_spawner()
    if _on_cpu(sys.argv):
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
        cpu_standins.install()
    sglang_plugin.register()


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

    load_plugins()
    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":
    _prepare_process()
