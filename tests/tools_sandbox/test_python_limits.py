"""Limits of python calls: each one ends the call with an answer that names it."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.tools_sandbox.helpers.services import python_pool
from tools_sandbox.client import SandboxClient
from tools_sandbox.config import Limits, PythonConfig, ToolServiceConfig
from tools_sandbox.python_tool.tool import PythonArguments, PythonTool


@pytest.mark.parametrize("code", ["import time; print('before'); time.sleep(60)", "print('before')\nwhile True: pass"])
def test_time_limit_ends_call(client: SandboxClient, code: str) -> None:
    began = time.monotonic()
    answer = client.call("python", {"code": code}, timeout_s=0.5)
    assert answer.status == "timeout"
    assert "0.5 s" in answer.text
    assert answer.text.endswith("before")
    assert 0.5 <= answer.seconds < 30
    assert time.monotonic() - began < 30


def test_memory_is_limited(client: SandboxClient) -> None:
    answer = client.call("python", {"code": "x = bytearray(1 << 30)"})
    assert answer.status == "error"
    assert "MemoryError" in answer.text
    assert "512 MiB" in answer.text
    slow = client.call("python", {"code": "x = []\nwhile True: x.append(bytearray(1 << 20))"})
    # In small steps it hits the limit of the process or that of the call.
    assert (slow.status, "512 MiB" in slow.text) == ("error", True)


def test_file_size_is_limited(client: SandboxClient) -> None:
    answer = client.call("python", {"code": "open('big', 'wb').write(bytes(2 << 20))"})
    assert (answer.status, "File too large" in answer.text) == ("error", True)


def test_long_output_is_cut_with_note(client: SandboxClient) -> None:
    answer = client.call("python", {"code": "print('x' * 20_000_000)"})
    assert answer.status == "ok"
    assert answer.text.startswith("x" * 1000 + "\n[output truncated: 20000001 bytes")
    assert len(answer.text) < 1200


def test_long_traceback_keeps_its_end(client: SandboxClient) -> None:
    answer = client.call(
        "python", {"code": "import sys\nsys.stderr.write('y' * 100_000)\nraise ValueError('the reason')"}
    )
    assert answer.status == "error"
    assert answer.text.endswith("ValueError: the reason")
    assert len(answer.text) < 1200


def test_processes_descriptors_and_cpu_time_are_limited() -> None:
    with python_pool(Limits(cpu_s=1, processes=8, open_files=32)) as run:
        cpu = run("while True: pass")
        assert (cpu.status, "CPU time" in cpu.text) == ("timeout", True)
        # No process of these uses a second alone.
        spin = "import os, time\nos.fork(); os.fork(); os.fork()\nwhile time.process_time() < 0.6: pass\ntime.sleep(60)"
        together = run(spin)
        assert (together.status, "CPU time" in together.text) == ("timeout", True)
        assert "Too many open files" in run("x = [open('/dev/null') for _ in range(40)]").text
        assert run("import os\nwhile True: os.fork()", 5.0).status == "error"


def test_configured_limits_bound_requests() -> None:
    config = ToolServiceConfig(limits=Limits(time_s=0.3, code_chars=100), python=PythonConfig(preload=()))

    async def run() -> None:
        tool = PythonTool(config)
        await tool.start()
        try:
            slow = await tool.run(PythonArguments(code="import time; time.sleep(9)"), 9.0)
            long = await tool.run(PythonArguments(code="#" * 101), 9.0)
        finally:
            await tool.stop()
        assert slow.status == "timeout"
        assert (long.status, '"code"' in long.text, "100" in long.text) == ("error", True, True)

    asyncio.run(run())


def test_preloaded_modules_work_and_draw_fresh_numbers(caplog: pytest.LogCaptureFixture) -> None:
    """Test the default preload, which other tests leave out because it takes two seconds."""
    with python_pool(Limits(memory_mib=512), preload=PythonConfig().preload) as run:
        loaded = "import sys; [name in sys.modules for name in ('numpy', 'sympy', 'scipy.stats', 'pandas')]"
        assert run(loaded).text == "[True, True, True, True]"
        assert "threads run in the process that calls are forked from" not in caplog.text
        work = """
import numpy as np, pandas as pd, scipy.integrate, scipy.optimize, scipy.stats, sympy
table = pd.DataFrame({"key": ["a", "b"] * 50, "value": np.arange(100.0)})
table.to_csv("t.csv", index=False)
print(pd.read_csv("t.csv").groupby("key")["value"].mean().round(2).to_dict())
print(round(float(scipy.stats.norm.cdf(0)), 3), round(scipy.integrate.quad(np.sin, 0, np.pi)[0], 3))
print(sympy.solve("x**2 - 4", "x"), round(float(np.linalg.det(np.eye(300))), 3))
print(table["key"].str.upper().unique().tolist())
"""
        assert run(work).text == "{'a': 49.0, 'b': 50.0}\n0.5 2.0\n[-2, 2] 1.0\n['A', 'B']"
        assert len({run("import numpy; numpy.random.rand()").text for _ in range(3)}) == 3
