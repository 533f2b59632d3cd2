"""The kernels of the output head against float64 autograd: on a GPU if there is one, else in Triton's interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from arpo_megatron.config import ParallelConfig
from arpo_megatron.models.known import KNOWN_MODELS
from arpo_megatron.plan.kernels import head_bytes

QWEN3_8B = KNOWN_MODELS["Qwen/Qwen3-8B"]
PROGRAM = """
import json, torch
from arpo_megatron.actor.head_kernel import softmax_statistics, write_gradient

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
off = []
for dtype in (torch.float32, torch.bfloat16):
    logits = (4 * torch.randn(4, 20001)).to(dtype)
    logits[1, 9000:] -= 80.0
    logits[2, 5] = 300.0
    exact = logits.double().requires_grad_()
    targets, temperature = torch.tensor([3, 15000, 5, 20000]), 0.7
    by_logprob, by_entropy = torch.randn(2, 4)
    log_p = (exact / temperature).log_softmax(-1)
    logprobs, entropies = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    (logprobs @ by_logprob.double() + entropies @ by_entropy.double()).backward()
    whole, gradients = [], []
    for first, last in ((0, 12000), (12000, 20001)):  # two vocabulary-parallel ranks
        shard = logits[:, first:last].contiguous().to(device)
        whole.append(softmax_statistics(shard, (targets - first).to(device), temperature).cpu().double())
        normalisers, found_entropies = (v.detach().float().to(device) for v in (
            (exact / temperature).logsumexp(-1), entropies))
        write_gradient(shard, (targets - first).to(device), normalisers, found_entropies,
                       by_logprob.to(device), by_entropy.to(device), temperature)
        gradients.append(shard.cpu().double())
    top = torch.maximum(whole[0][0], whole[1][0])
    total = sum(s[1] * (s[0] - top).exp() for s in whole)
    weighted = sum((s[2] + (s[0] - top) * s[1]) * (s[0] - top).exp() for s in whole)
    chosen = whole[0][3] + whole[1][3]
    found = torch.cat(gradients, 1)
    off.append([
        (chosen - top - total.log() - logprobs).abs().max().item(),
        (total.log() - weighted / total - entropies).abs().max().item(),
        ((found - exact.grad).norm(dim=1) / exact.grad.norm(dim=1).clamp(min=1e-3)).max().item(),
    ])
print(json.dumps(off))
"""


def test_kernels_give_the_values_and_gradients_of_float64() -> None:
    pytest.importorskip("triton")
    environment = dict(os.environ)
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    single, half = json.loads(done.stdout)
    assert max(single) < 2e-5
    assert max(half[:2]) < 2e-5 and half[2] < 2**-8, "only the gradient is rounded to bfloat16"


def test_kernels_read_and_write_the_logits_once() -> None:
    """docs/reference/performance.md has these figures."""
    pytest.importorskip("triton")
    script = [sys.executable, "-m", "tests.actor.head_traffic"]
    done = subprocess.run(script, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    counts = {(row["pass"], row["by"]): (row["launches"], row["bytes_per_logit"]) for row in rows}
    assert counts == {
        ("forward", "torch"): (15, 54),
        ("forward", "kernel"): (1, 2),
        ("backward", "torch"): (20, 100),
        ("backward", "kernel"): (1, 4),
    }
    forward, both = (head_bytes(QWEN3_8B, ParallelConfig(), 2, 2, backward=backward) for backward in (False, True))
    assert (forward, both - forward) == (2 * QWEN3_8B.vocabulary, 4 * QWEN3_8B.vocabulary), "the planner's bytes"
