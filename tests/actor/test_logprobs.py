"""Log-probs of targets: chunked, vocabulary-parallel, and equal to a plain log-softmax."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from arpo_megatron.actor import logprobs
from arpo_megatron.actor.logprobs import target_logprobs


@pytest.fixture
def problem():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(13, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    return hidden, weight, torch.randint(0, 11, (13,), generator=generator)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_elements", [1, 44, 1 << 20])
def test_values_and_gradients_equal_those_of_log_softmax(problem, temperature, chunk_elements, monkeypatch):
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", chunk_elements)
    hidden, weight, targets = problem
    actual, entropies = target_logprobs(hidden, weight, targets, temperature=temperature)
    table = torch.log_softmax(hidden @ weight.t() / temperature, -1)
    expected = table.gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropies, -(table.exp() * table).sum(-1), rtol=1e-12, atol=1e-12)
    weights = torch.linspace(-1, 2, 13, dtype=torch.float64)
    both = (actual * weights - entropies * weights.flip(0)).sum()
    exact = (expected * weights + (table.exp() * table).sum(-1) * weights.flip(0)).sum()
    for mine, theirs in zip(
        torch.autograd.grad(both, (hidden, weight), retain_graph=True),
        torch.autograd.grad(exact, (hidden, weight), retain_graph=True),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)
    for mine, theirs in zip(
        torch.autograd.grad((actual * weights).sum(), (hidden, weight)),
        torch.autograd.grad((expected * weights).sum(), (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_fp32_logits_are_not_rounded_and_have_the_same_gradient():
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(64, 32, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(100, 32, generator=generator).bfloat16().requires_grad_()
    targets = torch.randint(0, 100, (64,), generator=generator)
    exact = torch.log_softmax(hidden.double() @ weight.double().t(), -1).gather(1, targets[:, None])[:, 0]
    errors, gradients = {}, {}
    for fp32 in (False, True):
        values, _ = target_logprobs(hidden, weight, targets, fp32_logits=fp32)
        errors[fp32] = (values - exact).abs().max()
        gradients[fp32] = torch.autograd.grad(values.sum(), (hidden, weight))
    assert errors[True] < 1e-5 < 1e-3 < errors[False]
    for rounded, wide in zip(gradients[False], gradients[True], strict=True):
        torch.testing.assert_close(wide, rounded, rtol=0.05, atol=0.05)


def test_extreme_logits_stay_finite(problem):
    hidden, weight, targets = problem
    values, entropies = target_logprobs(hidden * 1e4, weight, targets)
    assert values.isfinite().all() and entropies.isfinite().all() and (entropies >= 0).all()


def test_no_targets_give_zero_gradients(problem):
    hidden, weight, targets = problem
    values, _ = target_logprobs(hidden[:0], weight, targets[:0])
    values.sum().backward()
    assert len(values) == 0 and not weight.grad.any()


class LargestResult(TorchDispatchMode):
    """Remembers the size of the largest tensor that any operation made."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_logits_are_never_held_for_all_tokens(monkeypatch):
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 1 << 23)
    tokens, vocabulary, width = 500, 151_936, 16
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(tokens, width, generator=generator, requires_grad=True)
    weight = torch.randn(vocabulary, width, generator=generator, requires_grad=True)
    with LargestResult() as seen:
        values, entropies = target_logprobs(hidden, weight, torch.arange(tokens))
        (values.sum() + entropies.sum()).backward()
    assert seen.elements <= logprobs.CHUNK_ELEMENTS < tokens * vocabulary / 8
    assert weight.grad.isfinite().all() and hidden.grad.isfinite().all()
