"""Matrix products of SGLang's CPU server."""

import json
import subprocess
import sys

import pytest
import torch

PROGRAM = """
import json, sys, types
sys.modules["megatron"] = None
from arpo_megatron.engine.server import cpu
cpu.install_stubs()
cpu.register_hooks()
from sglang.srt.plugins import load_plugins
load_plugins()
import torch
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from torch.profiler import profile

torch.manual_seed(1)
results = []
for size in (512, 64):
    weight, bias, x = torch.randn(size, 512), torch.randn(size), torch.randn(2, 3, 512)
    with profile() as profiled:
        y = UnquantizedLinearMethod().apply(types.SimpleNamespace(weight=weight), x, bias)
    names = {event.key for event in profiled.key_averages()}
    expected = x.double() @ weight.double().t() + bias.double()
    results.append([list(y.shape), float((y - expected).abs().max()), "mkldnn::_linear_pointwise" in names])
print(json.dumps(results))
"""


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_large_linear_layers_use_onednn_and_compute_the_product() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (large_shape, large_gap, large), (small_shape, small_gap, small) = json.loads(done.stdout.splitlines()[-1])
    assert (large_shape, small_shape) == ([2, 3, 512], [2, 3, 64])
    assert max(large_gap, small_gap) < 1e-4
    assert (large, small) == (True, False)
