"""What code may use: every limit ends the call with an answer that says so."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from tools_sandbox.client import SandboxClient
from tools_sandbox.config import PythonConfig


@pytest.mark.parametrize("code", ["import time; print('before'); time.sleep(60)", "print('before')\nwhile True: pass"])
def test_the_time_limit_of_the_call_ends_it(client: SandboxClient, code: str) -> None:
    began = time.monotonic()
    answer = client.call("python", {"code": code}, timeout_s=0.5)
    assert answer.status == "timeout"
    assert "0.5 s" in answer.text
    assert answer.text.endswith("before")
    assert 0.5 <= answer.seconds < 2
    assert time.monotonic() - began < 3


def test_memory_is_limited(client: SandboxClient) -> None:
    answer = client.call("python", {"code": "x = bytearray(1 << 30)"})
    assert answer.status == "error"
    assert "MemoryError" in answer.text
    assert "512 MiB" in answer.text
    slow = client.call("python", {"code": "x = []\nwhile True: x.append(bytearray(1 << 20))"})
    # Taken bit by bit it meets the bound of the process or that of the call.
    assert (slow.status, "512 MiB" in slow.text) == ("error", True)


def test_file_size_is_limited(client: SandboxClient) -> None:
    answer = client.call("python", {"code": "open('big', 'wb').write(bytes(2 << 20))"})
    assert (answer.status, "File too large" in answer.text) == ("error", True)


def test_long_output_is_cut_with_a_note_and_does_not_block(client: SandboxClient) -> None:
    answer = client.call("python", {"code": "print('x' * 20_000_000)"})
    assert answer.status == "ok"
    assert answer.text.startswith("x" * 1000 + "\n[output truncated: 20000001 bytes")
    assert len(answer.text) < 1200


def test_a_long_trace_keeps_its_end(client: SandboxClient) -> None:
    answer = client.call(
        "python", {"code": "import sys\nsys.stderr.write('y' * 100_000)\nraise ValueError('the reason')"}
    )
    assert answer.status == "error"
    assert answer.text.endswith("ValueError: the reason")
    assert len(answer.text) < 1200


def test_processes_descriptors_and_cpu_time_are_limited(start_service: Callable[..., Any]) -> None:
    service = start_service({"limits": {"cpu_s": 1, "processes": 8, "open_files": 32, "time_s": 20}})
    with SandboxClient(service.url) as client:
        cpu = client.call("python", {"code": "while True: pass"}, timeout_s=20)
        assert (cpu.status, "CPU time" in cpu.text) == ("timeout", True)
        # No process of these uses a second of its own.
        spin = "import os, time\nos.fork(); os.fork(); os.fork()\nwhile time.process_time() < 0.6: pass\ntime.sleep(60)"
        together = client.call("python", {"code": spin}, timeout_s=20)
        assert (together.status, "CPU time" in together.text) == ("timeout", True)
        files = client.call("python", {"code": "x = [open('/dev/null') for _ in range(40)]"})
        assert "Too many open files" in files.text
        bomb = client.call("python", {"code": "import os\nwhile True: os.fork()"}, timeout_s=5)
        assert bomb.status == "error"


def test_a_request_cannot_ask_for_more_time_than_configured(start_service: Callable[..., Any]) -> None:
    service = start_service({"limits": {"time_s": 0.3, "code_chars": 100}})
    with SandboxClient(service.url) as client:
        assert client.call("python", {"code": "import time; time.sleep(9)"}, timeout_s=9).status == "timeout"
        long = client.call("python", {"code": "#" * 101})
        assert (long.status, '"code"' in long.text, "100" in long.text) == ("error", True, True)


def test_preloaded_modules_are_there_at_once_and_draw_their_own_numbers(start_service: Callable[..., Any]) -> None:
    """With the default, which other tests leave out: it takes two seconds at the start of a service."""
    service = start_service({"python": {"preload": list(PythonConfig().preload)}, "limits": {"memory_mb": 512}})
    with SandboxClient(service.url) as client:
        loaded = "import sys; [name in sys.modules for name in ('numpy', 'sympy', 'scipy.stats', 'pandas')]"
        assert client.call("python", {"code": loaded}).text == "[True, True, True, True]"
        assert "threads run in the process that calls are forked from" not in service.stderr()
        work = """
import numpy as np, pandas as pd, scipy.integrate, scipy.optimize, scipy.stats, sympy
table = pd.DataFrame({"key": ["a", "b"] * 50, "value": np.arange(100.0)})
table.to_csv("t.csv", index=False)
print(pd.read_csv("t.csv").groupby("key")["value"].mean().round(2).to_dict())
print(round(float(scipy.stats.norm.cdf(0)), 3), round(scipy.integrate.quad(np.sin, 0, np.pi)[0], 3))
print(sympy.solve("x**2 - 4", "x"), round(float(np.linalg.det(np.eye(300))), 3))
print(table["key"].str.upper().unique().tolist())
"""
        answer = client.call("python", {"code": work})
        assert answer.text == "{'a': 49.0, 'b': 50.0}\n0.5 2.0\n[-2, 2] 1.0\n['A', 'B']"
        draws = {client.call("python", {"code": "import numpy; numpy.random.rand()"}).text for _ in range(3)}
        assert len(draws) == 3
