"""Judging the memory of a job's processes."""

import subprocess
import sys

import pytest

from arpo_megatron.bench.soak import judge, memory_by_program, program_of

MIB = 2**20


def test_growing_program_is_not_flat_and_constant_program_is() -> None:
    steps = range(1, 91)
    samples = {
        "trainer": {step: (800 + 5 * step) * MIB for step in steps},
        "engine": {step: (900 + step % 7) * MIB for step in steps},
        "warm": {step: min(400 + 20 * step, 900) * MIB for step in steps},  # all its growth is within the warm-up
        "cold start": {1: 500 * MIB},
    }
    found = judge(samples, warm_up=30)
    assert set(found) == {"trainer", "engine", "warm"}
    assert found["trainer"]["mib_per_step"] == 5 and not found["trainer"]["flat"]
    assert found["engine"]["flat"] and found["warm"]["flat"]


def test_judging_needs_steps_after_warm_up() -> None:
    with pytest.raises(ValueError, match="use more steps"):
        judge({"trainer": {1: MIB, 2: MIB}}, warm_up=1)


def test_program_is_the_module_of_a_process_or_its_name() -> None:
    assert program_of(["python", "-u", "-m", "arpo_megatron.train", "runs/x"], "python") == "arpo_megatron.train"
    assert program_of(["sglang::scheduler"], "sglang::schedul") == "sglang::schedul"


def test_memory_of_descendants_is_counted_by_program() -> None:
    code = "import sys; block = bytearray(b'x' * 2**26); print(1, flush=True); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with child:
        assert child.stdout is not None
        child.stdout.readline()
        found = memory_by_program()
        child.communicate(b"")
    assert found["command line"] > 0
    assert max(size for program, size in found.items() if program != "command line") >= 64 * MIB
