"""Matrix products of training on a CPU, through oneDNN in both passes, and sums of weight gradients."""

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from arpo_megatron.hardware.onednn import product
from arpo_megatron.hardware.transformer_engine import extension_installed, is_emulated


def weight_gradient(gradient: Tensor, inputs: Tensor) -> Tensor:
    """Return gradient.T @ inputs, [n, k], for gradient [tokens, n] and inputs [tokens, k]."""
    # Both orders need one transposed copy; the narrower side's is the cheaper.
    if gradient.shape[1] > inputs.shape[1]:
        return product(inputs.t(), gradient.t()).t()
    return product(gradient.t(), inputs.t())


def uses_transformer_engine(dtype: torch.dtype) -> bool:
    """Return whether a model of this dtype uses TE's layers on this machine."""
    return dtype == torch.bfloat16 and (is_emulated() or (torch.cuda.is_available() and extension_installed()))


class WeightGradient:
    """The sum of `weight_gradient` over several calls, in a wider type.

    Args:
        weight: [n, k].
        dtype: type of the sum.
    """

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        self._engine = uses_transformer_engine(weight.dtype)
        # On a CPU the longer side is last: both products of `weight_gradient` are then added in the order of memory.
        self._transposed = not self._engine and weight.shape[0] > weight.shape[1]
        self._sum = torch.zeros_like(weight.t() if self._transposed else weight, dtype=dtype).contiguous()

    def add(self, gradient: Tensor, inputs: Tensor) -> None:
        """Add gradient.T @ inputs for gradient [tokens, n] and inputs [tokens, k]."""
        if self._engine:
            from transformer_engine.pytorch.cpp_extensions import general_gemm

            # The product adds to its float32 output.
            general_gemm(
                inputs, gradient, out_dtype=self._sum.dtype, layout="NT", out=self._sum, accumulate=True, grad=True
            )
        elif self._transposed:
            self._sum += product(inputs.t(), gradient.t())
        else:
            self._sum += product(gradient.t(), inputs.t())

    @property
    def total(self) -> Tensor:
        """The sum so far, [n, k], of dtype `dtype`."""
        return self._sum.t() if self._transposed else self._sum


def linear(inputs: Tensor, weight: Tensor) -> Tensor:
    """Return inputs [..., k] @ weight.T for weight [n, k], as [..., n]; differentiable in both."""
    result: Tensor = _Linear.apply(inputs, weight)  # type: ignore[no-untyped-call]  # untyped in torch
    return result


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        return product(inputs.flatten(0, -2), weight).view(*inputs.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        inputs, weight = ctx.saved_tensors
        gradient = gradients[0].flatten(0, -2)
        grad_inputs = product(gradient, weight.t()).view_as(inputs)
        return grad_inputs, weight_gradient(gradient, inputs.flatten(0, -2))


def _forward(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, *, allreduce_dgrad: bool, sequence_parallel: bool, group: Any
) -> Tensor:
    """Apply a linear layer like linear_with_grad_accumulation_and_async_allreduce of Megatron, collectives included."""
    if sequence_parallel:
        inputs = tensor_parallel.gather_from_sequence_parallel_region(inputs, group=group)
    elif allreduce_dgrad:
        inputs = tensor_parallel.copy_to_tensor_model_parallel_region(inputs, group=group)
    outputs = linear(inputs, weight)
    return outputs if bias is None else outputs + bias


class CpuColumnParallelLinear(ColumnParallelLinear):  # type: ignore[misc]  # Megatron has no types
    """Megatron's layer with the products of this module."""

    def _forward_impl(
        self,
        input: Tensor,  # noqa: A002  (Megatron's name)
        weight: Tensor,
        bias: Tensor | None,
        *,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: Any,
        **_: Any,
    ) -> Tensor:
        return _forward(
            input, weight, bias, allreduce_dgrad=allreduce_dgrad, sequence_parallel=sequence_parallel, group=tp_group
        )


class CpuRowParallelLinear(RowParallelLinear):  # type: ignore[misc]  # Megatron has no types
    """Megatron's row-parallel layer with the products of this module."""

    def _forward_impl(
        self,
        input: Tensor,  # noqa: A002  (Megatron's name)
        weight: Tensor,
        bias: Tensor | None,
        **_: Any,
    ) -> Tensor:
        return _forward(input, weight, bias, allreduce_dgrad=False, sequence_parallel=False, group=None)
