"""The entropy kernel against float64: on a GPU if there is one, otherwise in Triton's interpreter."""

import json
import os
import subprocess
import sys

import pytest
import torch

PROGRAM = """
import json, torch
from arpo_megatron.engine.server.entropy_kernel import fused_entropy_nats

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
logits = 5 * torch.randn(5, 20001)
logits[1, :9000] = -torch.inf  # a whole block, and the first one
logits[2, 5] = 300.0
logits[3] = 7.0
logits[4, 1:] = -torch.inf
temperatures = torch.tensor([1.0, 0.7, 2.0, 1.3, 1.0])
right = torch.special.entr((logits.double() / temperatures[:, None].double()).softmax(-1)).sum(-1)
wide = torch.zeros(5, 20480)
wide[:, :20001] = logits
found = fused_entropy_nats(wide.to(device)[:, :20001], temperatures.to(device)).cpu().double()
half = fused_entropy_nats(logits.bfloat16().to(device), temperatures.to(device)).cpu().double()
rounded = torch.special.entr((logits.bfloat16().double() / temperatures[:, None].double()).softmax(-1)).sum(-1)
print(json.dumps([(found - right).abs().max().item(), (half - rounded).abs().max().item()]))
"""


def test_one_pass_gives_the_entropies_of_float64() -> None:
    pytest.importorskip("triton")
    environment = dict(os.environ)
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert max(json.loads(done.stdout)) < 1e-4
