"""Sessions: a call continues from an earlier state, branches are independent, and no process runs in between."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from tests.tools_sandbox.helpers.services import python_pool, running, wait_until_gone
from tools_sandbox.client import SandboxClient, ToolAnswer
from tools_sandbox.config import Limits
from tools_sandbox.python_tool.call_supervisor import CALL_NAME
from tools_sandbox.python_tool.sessions import SessionStore

RunCode = Callable[..., ToolAnswer]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunCode, Any]]:
    folder = tmp_path_factory.mktemp("states")
    config = {"python": {"session_dir": str(folder)}, "limits": {"state_mib": 4, "memory_mib": 512}}
    with running(config) as service, SandboxClient(service.url) as client:

        def run(
            code: str, state: str = "", keep: str = "", timeout_s: float = 10.0, trajectory_id: str = ""
        ) -> ToolAnswer:
            arguments = {"code": code, "state": state, "keep": keep}
            return client.call("python", arguments, timeout_s=timeout_s, trajectory_id=trajectory_id)

        yield run, service


def test_session_keeps_names_functions_classes_and_files(session: tuple[RunCode, Any]) -> None:
    run, _ = session
    first = """
import numpy as np, math
x = 1
def f(): return x + math.floor(2.5)
class A:
    def __init__(self): self.a = np.arange(3)
    def double(self): return self.a * 2
a = A(); same = a
counter = (n for n in range(3)).__class__
open('note', 'w').write('kept')
"""
    assert run(first, keep="go/1").status == "ok"
    # As in a notebook, a function sees the values that a later call gives to its globals.
    assert run("x = 10; same.a[0] = 7; f()", state="go/1", keep="go/2").text == "12"
    after = "f(), a is same, a.double().tolist(), isinstance(a, A), open('note').read(), np.pi > 3"
    assert run(after, state="go/2").text == "(12, True, [14, 2, 4], True, 'kept', True)"


def test_large_state_does_not_reduce_memory_of_code() -> None:
    with python_pool(Limits(state_mib=64, memory_mib=256)) as run:
        state = io.BytesIO()
        assert run("import os; kept = os.urandom(60 << 20)", keep=state).has_state
        assert len(state.getvalue()) > 60 << 20
        # The state is loaded into memory again, next to 120 MiB of the code.
        outcome = run("more = bytearray(120 << 20); len(kept) >> 20", state=state)
        assert (outcome.status, outcome.text) == ("ok", "60")


def test_branches_of_one_state_are_independent(session: tuple[RunCode, Any]) -> None:
    run, _ = session
    run("log = ['root']", keep="b/root")
    for name in ("left", "right"):
        run(f"log.append('{name}'); open('{name}', 'w').close()", state="b/root", keep=f"b/{name}")
    look = "import os; log, os.listdir()"
    assert run(look, state="b/left").text == "(['root', 'left'], ['left'])"
    assert run(look, state="b/right").text == "(['root', 'right'], ['right'])"
    assert run(look, state="b/root").text == "(['root'], [])"
    assert run("log", state="").status == "error"


def test_repeated_call_changes_nothing(session: tuple[RunCode, Any]) -> None:
    run, _ = session
    run("n = 1", keep="r/1")
    for _ in range(3):
        assert run("n += 1; n", state="r/1", keep="r/2").text == "2"
    assert run("n", state="r/2").text == "2"


@pytest.mark.parametrize(
    ("code", "kept"),
    [
        ("n = 2; 1 / 0", "2"),  # as in a notebook, an exception keeps what was done before it
        ("n = 2; import sys; sys.exit(3)", "2"),
        ("n = 2\nwhile True: pass", "1"),
        ("n = 2; import os; os._exit(0)", "1"),
        ("n = 2; import os; os.kill(os.getpid(), 9)", "1"),
        ("n = 2; big = bytes(range(256)) * 40_000", "1"),
    ],
)
def test_aborted_call_keeps_state_before_it(session: tuple[RunCode, Any], code: str, kept: str) -> None:
    run, _ = session
    run("n = 1", keep="c/1")
    answer = run(code, state="c/1", keep="c/2", timeout_s=0.7 if "while" in code else 10)
    assert ("[the session is as it was before this call]" in answer.text) == (kept == "1")
    assert run("n", state="c/2").text == kept


def test_unpicklable_names_are_reported(session: tuple[RunCode, Any]) -> None:
    run, _ = session
    answer = run("g = (i for i in 'ab'); f = open('x', 'w'); n = 3; n", keep="u/1")
    assert answer.text == "3\n[not kept for the next call: g (generator), f (TextIOWrapper)]"
    assert run("n", state="u/1").text == "3"
    assert "NameError" in run("g", state="u/1").text


def test_files_are_kept_from_the_folder_of_the_call(session: tuple[RunCode, Any]) -> None:
    run, _ = session
    code = "import os; open('data', 'w').write('1'); os.mkdir('out'); os.chdir('out'); open('plot', 'w').write('2')"
    assert run(code, keep="f/1").status == "ok"
    assert run("import os; sorted(os.listdir()), os.listdir('out')", state="f/1").text == "(['data', 'out'], ['plot'])"
    assert run("y = 2; os.chdir('/')", state="f/1", keep="f/2").status == "ok"
    assert run("y, sorted(os.listdir())", state="f/2").text == "(2, ['data', 'out'])"


def test_unreadable_files_are_reported(session: tuple[RunCode, Any]) -> None:
    run, _ = session
    code = "import os; x = 1; os.mkdir('a'); open('a/b', 'w').close(); open('c', 'w').close(); os.chmod('a', 0)"
    assert run(code, keep="u/1").text == "[files not kept for the next call: a]"
    assert run("x, sorted(os.listdir())", state="u/1").text == "(1, ['c'])"


def test_missing_state_is_a_failure_and_no_answer(session: tuple[RunCode, Any]) -> None:
    """It was removed to make room: a model must not be trained on that."""
    run, _ = session
    answer = run("1", state="never")
    assert (answer.status, answer.failure) == ("error", "lasting")


@pytest.mark.parametrize("state_bytes", [10, 3 << 20])
def test_full_disk_is_a_failure_and_no_answer(session: tuple[RunCode, Any], state_bytes: int) -> None:
    run, service = session
    process = psutil.Process(service.process.pid)
    before = process.rlimit(psutil.RLIMIT_FSIZE)
    process.rlimit(psutil.RLIMIT_FSIZE, (1, before[1]))  # behaves like a full disk
    try:
        answer = run(f"import os; n = os.urandom({state_bytes}); 1", keep="d/1")
    finally:
        process.rlimit(psutil.RLIMIT_FSIZE, before)
    assert (answer.status, answer.failure) == ("error", "lasting")
    assert run("n", state="d/1").failure == "lasting"


def test_states_outlive_service_without_processes(start_service: Callable[..., Any], tmp_path: Path) -> None:
    for code, state, keep, text in (("n = 41", "", "a", ""), ("n + 1", "a", "", "42")):
        service = start_service({"python": {"session_dir": str(tmp_path)}})
        with SandboxClient(service.url) as client:
            answer = client.call("python", {"code": code, "state": state, "keep": keep})
            assert (answer.status, answer.text) == ("ok", text)
            wait_until_gone(service.calls())
        service.process.kill()
        service.process.wait()


def test_service_without_sessions_reports_it(client: SandboxClient) -> None:
    assert "session_dir" in client.call("python", {"code": "1", "keep": "a"}).text


def test_forged_state_harms_only_its_session(session: tuple[RunCode, Any]) -> None:
    run, _ = session
    forged = run("import os; os.write(3, b'nonsense' * 9); 1", keep="f/1")
    assert forged.text == "1\n[the session is as it was before this call]"
    assert run("1", state="f/1").text == "1"
    # A valid header, which any code can write, but invalid content.
    frame = "import os, struct\nd = b'no pickle'"
    frame += "\nos.write(3, struct.pack('!8sQQ', b'session2', len(d), 0) + d); os._exit(0)"
    run(frame, keep="f/3")
    assert run("1", state="f/3").text.splitlines()[-1].startswith("ValueError: the state of the session cannot be read")
    evil = "class E:\n    def __reduce__(self): return (open, ('/etc/shadow',))\ne = E()"
    run(evil, keep="f/2")
    assert "root:" not in run("e.read()", state="f/2").text
    assert run("6 * 7").text == "42"


def test_output_on_descriptor_of_state_is_bounded(session: tuple[RunCode, Any]) -> None:
    run, _ = session
    run("n = 1", keep="o/1")
    flood = run("import os\nwhile True: os.write(3, bytes(1 << 16))", state="o/1", keep="o/2", timeout_s=30)
    assert (flood.status, "4 MiB to the descriptor" in flood.text) == ("error", True)
    assert run("n", state="o/2").text == "1"


def test_kept_states_can_be_loaded(session: tuple[RunCode, Any]) -> None:
    run, _ = session
    for _ in range(5):  # two processes reach the end: the state is that of the call's first process
        assert "as it was" not in run("import os; n = 5; child = os.fork(); 1", keep="k/1").text
        assert run("n, child > 0", state="k/1").text == "(5, True)"
    odd = "class E(Exception):\n    def __init__(self, a, b): super().__init__(a)\ne = E(1, 2); n = 6"
    assert run(odd, keep="k/2").text == "[not kept for the next call: e (E)]"
    assert run("n", state="k/2").text == "6"


def test_trajectory_cannot_access_states_of_others(session: tuple[RunCode, Any]) -> None:
    run, _ = session
    run("secret = 4711", keep="s", trajectory_id="task/0/1")
    for other in ("task/0/2", "task/0/11", "task/0", "task", "", "B"):
        assert run("secret", state="s", trajectory_id=other).failure == "lasting"
        run("secret = 666", keep="s", trajectory_id=other)
    for own in ("task/0/1", "task/0/1/0", "task/0/1/3/2"):
        assert run("secret", state="s", trajectory_id=own).text == "4711"


def test_schema_hides_state_arguments(session: tuple[RunCode, Any]) -> None:
    _, service = session
    (python,) = (tool for tool in requests.get(f"{service.url}/tools").json() if tool["name"] == "python")
    assert list(python["arguments"]["properties"]) == ["code"]
    refused = requests.post(f"{service.url}/call", json={"tool": "python", "arguments": {"cod": "1"}}).json()["text"]
    assert refused.endswith("It takes: code.")


def write(store: SessionStore, trajectory: str, name: str, state: bytes) -> None:
    with store.new() as file:
        file.write(state)
        store.keep(file, trajectory, name)


def read(store: SessionStore, trajectory: str, name: str) -> bytes | None:
    file = store.open(trajectory, name)
    if file is None:
        return None
    with file:
        return file.read()


def test_state_removed_during_read_is_not_confused_with_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SessionStore(tmp_path, 1)
    write(store, "t", "s", b"old")
    write(store, "t/0", "s", b"new")

    # A stub, since the moment between two system calls cannot be hit otherwise.
    def removed(path: Path) -> None:
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "utime", removed)
    assert read(store, "t/0", "s") == b"new"


def test_store_stays_bounded_and_keeps_recently_used_states(tmp_path: Path) -> None:
    store = SessionStore(tmp_path, 1)
    for number in range(40):
        write(store, "t", f"s{number}", bytes(100_000))
        assert read(store, "t", "s0") is not None
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= 1 << 20
    assert read(store, "t", "s1") is None
    assert read(store, "t", "s39") == bytes(100_000)


def test_stores_that_share_a_folder_stay_bounded_together(tmp_path: Path) -> None:
    stores = [SessionStore(tmp_path, 1) for _ in range(4)]
    for number in range(40):
        write(stores[number % 4], "t", f"s{number}", bytes(100_000))
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= 1 << 20


def test_store_removes_no_file_of_others(tmp_path: Path) -> None:
    write(SessionStore(tmp_path, 1), "t", "s", b"first")
    folders = [tmp_path, *(path for path in tmp_path.iterdir() if path.is_dir())]
    others = [folder / "thesis.tex" for folder in folders]
    for path in others:
        path.write_bytes(bytes(2 << 20))
        os.utime(path, (0, 0))
    store = SessionStore(tmp_path, 1)
    for number in range(30):
        write(store, "t", f"s{number}", bytes(100_000))
    assert all(path.exists() for path in others)
    assert read(store, "t", "s29") == bytes(100_000)


def resident_mib(process: psutil.Process, kind: str) -> float:
    """Return the memory that a process has ("VmRSS"), or the largest that it has had ("VmHWM"), in MiB."""
    fields = dict(line.split(":") for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
    return int(fields[kind].split()[0]) / 1024


def test_states_are_held_neither_by_service_nor_by_supervisors(
    start_service: Callable[..., Any], tmp_path: Path
) -> None:
    service = start_service({"python": {"session_dir": str(tmp_path)}, "limits": {"state_mib": 64}})
    main = psutil.Process(service.process.pid)
    write_and_wait = """
import os, pickle, struct, time
names = pickle.dumps({'kept': bytes(60 << 20)})
rest = memoryview(struct.pack('!8sQQ', b'session2', len(names), 0) + names)
while rest:
    rest = rest[os.write(3, rest):]
time.sleep(2)
os._exit(0)
"""
    with SandboxClient(service.url) as client, ThreadPoolExecutor(1) as pool:
        client.call("python", {"code": "1", "keep": "small"})
        before_mib, supervisors_mib = resident_mib(main, "VmHWM"), [resident_mib(service.zygote(), "VmRSS")]
        call = pool.submit(client.call, "python", {"code": write_and_wait, "keep": "large"})
        while not call.done():
            for each in service.calls():
                with suppress(psutil.Error, OSError, KeyError):  # it has ended meanwhile
                    if each.name() == CALL_NAME:
                        supervisors_mib.append(resident_mib(each, "VmRSS"))
            time.sleep(0.02)
        assert call.result().text == ""
        again = {"code": "len(kept)", "state": "large", "keep": "larger"}
        assert client.call("python", again).text == f"{60 << 20}"
    assert resident_mib(main, "VmHWM") - before_mib < 16
    assert max(supervisors_mib) - supervisors_mib[0] < 16
