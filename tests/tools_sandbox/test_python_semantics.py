"""Semantics of python calls: they behave like notebook cells and otherwise like Python."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.tools_sandbox.helpers.services import python_pool
from tools_sandbox.client import SandboxClient
from tools_sandbox.config import Limits

OK_CASES = [
    ("1 + 1", "2"),
    ("x = 1", ""),
    ("", ""),
    ("# only a comment", ""),
    ("None", ""),
    ("print('a')", "a"),
    ("print('a')\n'b'", "a\nb"),
    ("x = [1, 2]\nx", "[1, 2]"),
    ("'text'", "text"),
    ("def f():\n    return 3\nf()", "3"),
    ("if __name__ == '__main__':\n    print('main')", "main"),
    ("import sys; sys.exit(0)", ""),
    ("import sys; print('warn', file=sys.stderr); 1", "1"),
    ("print('é😀')", "é😀"),
    ("open('note', 'w').write('kept'); open('note').read()", "kept"),
    ("f = lambda n: n and f(n - 1) + 1\nf(20)", "20"),
    ("class A: pass\nimport pickle; type(pickle.loads(pickle.dumps(A()))).__name__", "A"),
    ("import atexit; atexit.register(print, 'end'); None", "end"),
    ("import threading; threading.Thread(target=print, args=('thread',)).start()", "thread"),
    ("from concurrent.futures import ThreadPoolExecutor as P\nP(2).submit(print, 'pool'); None", "pool"),
    ("def f(x: Undefined): pass", None),
    ("import subprocess; subprocess.run(['echo', 'sub'], capture_output=True, text=True).stdout", "sub"),
    ("open('/dev/zero', 'rb').read(3)", r"b'\x00\x00\x00'"),
    ("input()", None),
    ("import asyncio; asyncio.run(asyncio.sleep(0, 5))", "5"),
    ("import os, tempfile; open(tempfile.mkstemp()[1]).read(), os.path.expanduser('~')", "('', '/tmp')"),
    ("import datetime, zoneinfo; zoneinfo.ZoneInfo('Europe/Paris').key", "Europe/Paris"),
]


@pytest.mark.parametrize(("code", "text"), OK_CASES)
def test_code_answers_like_notebook_cell(client: SandboxClient, code: str, text: str | None) -> None:
    answer = client.call("python", {"code": code})
    assert (answer.status, answer.text) == ("ok", text) if text is not None else answer.status == "error"
    assert answer.seconds > 0
    assert not answer.cached


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("1 / 0", ['File "<python>", line 1', "ZeroDivisionError: division by zero"]),
        ("x = (", ['File "<python>", line 1', "SyntaxError"]),
        ("def f():\n    g()\ndef g():\n    raise KeyError('k')\nf()", ["line 5", "line 2", "line 4", "KeyError: 'k'"]),
        ("import sys; sys.exit('message')", ["message"]),
        ("import sys; sys.exit(3)", ["exit code 3"]),
        ("import os; os.kill(os.getpid(), 9)", ["SIGKILL"]),
        ("import os; os.abort()", ["SIGABRT"]),
        ("def f(): f()\nf()", ["RecursionError"]),
        (
            "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise ValueError('v') from e",
            ["direct cause", "ValueError: v"],
        ),
        ("class E(Exception):\n    def __str__(self): 1 / 0\nraise E", ["E"]),
        ("print('\0')", ["null bytes"]),
        ("raise KeyboardInterrupt", ["KeyboardInterrupt"]),
    ],
)
def test_failure_answers_with_trimmed_traceback(client: SandboxClient, code: str, lines: list[str]) -> None:
    answer = client.call("python", {"code": code})
    assert answer.status == "error"
    for line in lines:
        assert line in answer.text
    assert "tools_sandbox" not in answer.text


def test_library_frames_are_left_out_of_traceback(client: SandboxClient) -> None:
    answer = client.call("python", {"code": "import json\njson.loads('{')"})
    assert answer.text.count("File ") == 1
    assert "json.loads('{')" in answer.text
    assert answer.text.endswith("line 1 column 2 (char 1)")


def test_calls_start_with_fresh_state(client: SandboxClient) -> None:
    client.call("python", {"code": "import builtins, math\nbuiltins.left = 1; math.pi = 3; open('left', 'w').close()"})
    answer = client.call(
        "python", {"code": "import builtins, math, os\nhasattr(builtins, 'left'), math.pi, os.listdir()"}
    )
    assert answer.text == "(False, 3.141592653589793, [])"


def test_calls_draw_different_random_numbers(client: SandboxClient) -> None:
    draws = {client.call("python", {"code": "import random; random.random()"}).text for _ in range(3)}
    assert len(draws) == 3


def test_process_that_code_forks_draws_other_random_numbers(client: SandboxClient) -> None:
    code = "import os, random\nif os.fork(): os.wait()\nprint(random.random())"
    answer = client.call("python", {"code": code})
    assert answer.status == "ok"
    assert len(set(answer.text.split())) == 2


def test_end_of_process_that_code_forks_does_not_end_call(client: SandboxClient) -> None:
    code = "import os\nif os.fork(): os.wait(); print('parent', flush=True)\nelse: print('child', flush=True)"
    assert client.call("python", {"code": code}).text == "child\nparent"


def test_generators_of_preloaded_modules_differ_between_calls() -> None:
    modules = ("numpy.random", "sympy.core.random")
    with python_pool(Limits(), preload=modules) as run:
        for name in modules:
            assert len({run(f"import {name} as module; module.uniform(0, 1)").text for _ in range(3)}) == 3


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=50))
def test_any_printed_text_is_returned_unchanged(client: SandboxClient, text: str) -> None:
    answer = client.call("python", {"code": f"import sys\nsys.stdout.write({text!r} + '|')\nNone"})
    assert (answer.status, answer.text) == ("ok", text + "|")


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.characters(), max_size=30))  # lone surrogates included
def test_any_code_gets_an_answer(client: SandboxClient, code: str) -> None:
    assert client.call("python", {"code": code}, timeout_s=5).status in ("ok", "error")
