"""Kernels of the trainer against those of SGLang's CPU server."""

import json
import subprocess
import sys


def test_kernels_of_trainer_and_engine_differ_by_rounding_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "arpo_megatron", "bench", "kernels", "--tokens", "24"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    kernels = json.loads(done.stdout.splitlines()[-1])["kernels"]
    assert len(kernels) == 12
    for name, found in kernels.items():
        for way, own in found.items():
            assert own["over_largest_element"] < 1e-5, (name, way)  # rounding, no other result
            assert (own["largest"] == 0) == (own["share_that_differs"] == 0), (name, way)
    exact = (
        "embedding",
        "RMS norm of hidden states",
        "RMS norm of queries",
        "rotary embedding",
        "SiLU and product of halves",
    )
    assert [name for name in exact for own in kernels[name].values() if own["largest"]] == []
