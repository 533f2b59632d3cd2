"""Sessions: a call goes on where an earlier one ended, branches do not see each other, nothing runs in between."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.tools_sandbox.test_service_process import wait_until_gone
from tools_sandbox.client import SandboxClient, ToolAnswer
from tools_sandbox.python_tool.sessions import SessionStore

Say = Callable[..., ToolAnswer]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Say, Any]]:
    from tests.tools_sandbox.conftest import running

    folder = tmp_path_factory.mktemp("states")
    config = {"python": {"session_dir": str(folder)}, "limits": {"state_mb": 4, "memory_mb": 512}}
    with running(config) as service, SandboxClient(service.url) as client:

        def say(
            code: str, state: str = "", keep: str = "", timeout_s: float = 10.0, trajectory_id: str = ""
        ) -> ToolAnswer:
            arguments = {"code": code, "state": state, "keep": keep}
            return client.call("python", arguments, timeout_s=timeout_s, trajectory_id=trajectory_id)

        yield say, service


def test_names_functions_classes_and_files_go_on(session: tuple[Say, Any]) -> None:
    say, _ = session
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
    assert say(first, keep="go/1").status == "ok"
    # A function sees what a later call makes of the names it uses, as in a notebook.
    assert say("x = 10; same.a[0] = 7; f()", state="go/1", keep="go/2").text == "12"
    after = "f(), a is same, a.double().tolist(), isinstance(a, A), open('note').read(), np.pi > 3"
    assert say(after, state="go/2").text == "(12, True, [14, 2, 4], True, 'kept', True)"


def test_a_large_state_leaves_the_code_its_memory(start_service: Callable[..., Any], tmp_path: Path) -> None:
    limits = {"state_mb": 64, "memory_mb": 256}
    service = start_service({"python": {"session_dir": str(tmp_path)}, "limits": limits})
    with SandboxClient(service.url) as client:
        code = "import os; kept = os.urandom(60 << 20)"
        assert client.call("python", {"code": code, "keep": "large"}, timeout_s=20).status == "ok"
        # Loaded once more, and 120 MiB beside it.
        code = "more = bytearray(120 << 20); len(kept) >> 20"
        answer = client.call("python", {"code": code, "state": "large"}, timeout_s=20)
        assert (answer.status, answer.text) == ("ok", "60")


def test_branches_of_one_state_do_not_see_each_other(session: tuple[Say, Any]) -> None:
    say, _ = session
    say("log = ['root']", keep="b/root")
    for name in ("left", "right"):
        say(f"log.append('{name}'); open('{name}', 'w').close()", state="b/root", keep=f"b/{name}")
    look = "import os; log, os.listdir()"
    assert say(look, state="b/left").text == "(['root', 'left'], ['left'])"
    assert say(look, state="b/right").text == "(['root', 'right'], ['right'])"
    assert say(look, state="b/root").text == "(['root'], [])"
    assert say("log", state="").status == "error"


def test_a_repeated_call_changes_nothing(session: tuple[Say, Any]) -> None:
    say, _ = session
    say("n = 1", keep="r/1")
    for _ in range(3):
        assert say("n += 1; n", state="r/1", keep="r/2").text == "2"
    assert say("n", state="r/2").text == "2"


@pytest.mark.parametrize(
    ("code", "kept"),
    [
        ("n = 2; 1 / 0", "2"),  # an exception leaves what was done before it, as in a notebook
        ("n = 2; import sys; sys.exit(3)", "2"),
        ("n = 2\nwhile True: pass", "1"),
        ("n = 2; import os; os._exit(0)", "1"),
        ("n = 2; import os; os.kill(os.getpid(), 9)", "1"),
        ("n = 2; big = bytes(range(256)) * 40_000", "1"),
    ],
)
def test_a_call_without_an_end_of_its_own_leaves_the_state_before_it(
    session: tuple[Say, Any], code: str, kept: str
) -> None:
    say, _ = session
    say("n = 1", keep="c/1")
    answer = say(code, state="c/1", keep="c/2", timeout_s=0.7 if "while" in code else 10)
    assert ("[the session is as it was before this call]" in answer.text) == (kept == "1")
    assert say("n", state="c/2").text == kept


def test_what_cannot_be_kept_is_said(session: tuple[Say, Any]) -> None:
    say, _ = session
    answer = say("g = (i for i in 'ab'); f = open('x', 'w'); n = 3; n", keep="u/1")
    assert answer.text == "3\n[not kept for the next call: g (generator), f (TextIOWrapper)]"
    assert say("n", state="u/1").text == "3"
    assert "NameError" in say("g", state="u/1").text


def test_a_state_that_is_not_there_is_an_error_the_model_can_read(session: tuple[Say, Any]) -> None:
    say, _ = session
    answer = say("1", state="never")
    assert (answer.status, answer.text) == ("error", 'The state "never" is not here (any more).')


def test_states_outlive_the_service_and_nothing_runs_between_calls(
    start_service: Callable[..., Any], tmp_path: Path
) -> None:
    for code, state, keep, said in (("n = 41", "", "a", ""), ("n + 1", "a", "", "42")):
        service = start_service({"python": {"session_dir": str(tmp_path)}})
        with SandboxClient(service.url) as client:
            answer = client.call("python", {"code": code, "state": state, "keep": keep})
            assert (answer.status, answer.text) == ("ok", said)
            wait_until_gone(service.calls())
        service.process.kill()
        service.process.wait()


def test_a_service_without_sessions_says_so(client: SandboxClient) -> None:
    assert "session_dir" in client.call("python", {"code": "1", "keep": "a"}).text


def test_a_state_that_foreign_code_has_forged_harms_only_itself(session: tuple[Say, Any]) -> None:
    say, _ = session
    forged = say("import os; os.write(3, b'nonsense' * 9); 1", keep="f/1")
    assert forged.text == "1\n[the session is as it was before this call]"
    assert say("1", state="f/1").text == "1"
    # Whole by its header, which anyone can write, and nothing inside.
    frame = "import hashlib, os, struct\nd = b'no pickle'"
    frame += "\nos.write(3, struct.pack('!8sQ32s', b'session1', len(d), hashlib.sha256(d).digest()) + d); os._exit(0)"
    say(frame, keep="f/3")
    assert say("1", state="f/3").text.splitlines()[-1].startswith("ValueError: the state of the session cannot be read")
    evil = "class E:\n    def __reduce__(self): return (open, ('/etc/shadow',))\ne = E()"
    say(evil, keep="f/2")
    assert "root:" not in say("e.read()", state="f/2").text
    assert say("6 * 7").text == "42"


def test_a_state_that_was_kept_can_be_gone_on_from(session: tuple[Say, Any]) -> None:
    say, _ = session
    for _ in range(5):  # two processes that end in one place: the state is that of the call's own
        assert "as it was" not in say("import os; n = 5; child = os.fork(); 1", keep="k/1").text
        assert say("n, child > 0", state="k/1").text == "(5, True)"
    odd = "class E(Exception):\n    def __init__(self, a, b): super().__init__(a)\ne = E(1, 2); n = 6"
    assert say(odd, keep="k/2").text == "[not kept for the next call: e (E)]"
    assert say("n", state="k/2").text == "6"


def test_a_trajectory_neither_reads_nor_replaces_states_of_others(session: tuple[Say, Any]) -> None:
    say, _ = session
    say("secret = 4711", keep="s", trajectory_id="task/0/1")
    for other in ("task/0/2", "task/0/11", "task/0", "task", "", "B"):
        assert "is not here" in say("secret", state="s", trajectory_id=other).text
        say("secret = 666", keep="s", trajectory_id=other)
    for own in ("task/0/1", "task/0/1/0", "task/0/1/3/2"):
        assert say("secret", state="s", trajectory_id=own).text == "4711"


def test_a_model_is_not_told_of_the_names_of_states(session: tuple[Say, Any]) -> None:
    _, service = session
    (python,) = (tool for tool in requests.get(f"{service.url}/tools").json() if tool["name"] == "python")
    assert list(python["arguments"]["properties"]) == ["code"]
    refused = requests.post(f"{service.url}/call", json={"tool": "python", "arguments": {"cod": "1"}}).json()["text"]
    assert refused.endswith("It takes: code.")


def test_a_state_cleaned_away_while_it_is_read_is_not_taken_for_an_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SessionStore(tmp_path, 1)
    store.write("t", "s", b"old")
    store.write("t/0", "s", b"new")

    # A double, since the moment between two system calls cannot be met otherwise.
    def cleaned_away(path: Path) -> None:
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "utime", cleaned_away)
    assert store.read("t/0", "s") == b"new"


def test_the_store_stays_within_its_bound_and_keeps_what_was_used_last(tmp_path: Path) -> None:
    store = SessionStore(tmp_path, 1)
    for number in range(40):
        store.write("t", f"s{number}", bytes(100_000))
        assert store.read("t", "s0") is not None
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 1 << 20
    assert store.read("t", "s1") is None
    assert store.read("t", "s39") == bytes(100_000)
