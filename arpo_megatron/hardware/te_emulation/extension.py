"""The module that replaces `transformer_engine_torch`: emulated functions, and names that may only be read."""

from types import ModuleType
from typing import Any, NoReturn, Self

from arpo_megatron.hardware.te_emulation import dtypes, kernels, products, quantization

_ENUMS = (
    dtypes.DType,
    dtypes.FP8FwdTensors,
    dtypes.FP8BwdTensors,
    dtypes.Float8BlockScaleTensorFormat,
    dtypes.CommOverlapType,
)
_FUNCTIONS = (
    quantization.quantize,
    quantization.split_quantize,
    quantization.bgrad_quantize,
    quantization.dequantize,
    quantization.fp8_transpose,
    products.generic_gemm,
    products.te_general_grouped_gemm,
    kernels.rmsnorm_fwd,
    kernels.rmsnorm_bwd,
    kernels.fused_rope_forward,
    kernels.fused_rope_backward,
    kernels.fused_multi_row_padding,
    kernels.fused_multi_row_unpadding,
    kernels.multi_tensor_l2norm,
    kernels.multi_tensor_scale,
    kernels.multi_tensor_adam,
)
_CONSTANTS = {
    "get_cublasLt_version": 130000,
    "get_cudnn_version": 91900,
    "get_num_cublas_streams": 4,
    "device_supports_multicast": False,
    "ubuf_built_with_mpi": False,
}
"""Return values of functions without arguments: the libraries of CUDA 13, without TE's own communication."""


_IMPORTED_BY_STAR = ("layernorm_fwd", "layernorm_bwd")
"""Names in TE's tables of kernels, which `import *` must find."""


class NotEmulated:
    """A function, class or enumeration that no model of ours uses: attributes and comparisons work, calls raise."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> "NotEmulated":
        if name.startswith("__"):
            raise AttributeError(name)
        return NotEmulated(f"{self._name}.{name}")

    def __call__(self, *_arguments: object, **_named: object) -> NoReturn:
        raise NotImplementedError(f"transformer_engine_torch.{self._name} is not emulated on a CPU")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NotEmulated) and other._name == self._name

    def __hash__(self) -> int:
        return hash(self._name)

    def __or__(self, _other: object) -> Self:
        return self  # in annotations

    __ror__ = __or__


class _Extension(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return NotEmulated(name)


def _always(value: object) -> Any:
    return lambda *_arguments: value


def make_extension() -> ModuleType:
    """Return a stand-in for the module `transformer_engine_torch`."""
    module = _Extension("transformer_engine_torch", __doc__)
    for item in (*_ENUMS, *_FUNCTIONS):
        setattr(module, item.__name__, item)
    for name, value in _CONSTANTS.items():
        setattr(module, name, _always(value))
    for name in _IMPORTED_BY_STAR:
        setattr(module, name, NotEmulated(name))
    return module
