"""Read Megatron's distributed checkpoints without running what is in them.

The `.metadata` of a checkpoint is a pickle, and so is every object in it. torch and Megatron unpickle both without
limits: a checkpoint of another person could run any code. Here the metadata can hold only the classes that a checkpoint
needs, and objects only tensors and plain values. The states that Transformer Engine unpickles are checked before.
"""

import io
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies import torch as megatron_torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load_state_dict

from arpo_megatron.errors import UserError

_METADATA = "torch.distributed.checkpoint.metadata"
_CLASSES = frozenset(
    {
        *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
        *((_METADATA, name) for name in ("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")),
        (_METADATA, "_MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        ("pathlib", "PosixPath"),
    }
)
"""Module and name of all that a `.metadata` may refer to, besides number formats."""
_RECIPES = "transformer_engine.common.recipe"
_RECIPE_CLASSES = frozenset(
    {
        *("DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling", "Float8BlockScaling", "NVFP4BlockScaling"),
        *("Format", "_FormatHelper", "MMParams", "QParams"),
    }
)
"""Classes of an FP8 recipe in Transformer Engine 2; calling one runs no code of its arguments."""
_MORE = "it holds more than tensors and plain values"
_REASON_CHARS = 200


class RestrictedLoad(megatron_torch.TorchDistLoadShardedStrategy):  # type: ignore[misc]  # Megatron has no types
    """Megatron's way to load a checkpoint (`TorchDistLoadShardedStrategy.load`), with the limits of this module.

    One instance loads from one checkpoint, whose metadata it reads once.
    """

    _reader: "_Reader | None" = None

    def load(self, sharded_state_dict: Any, checkpoint_dir: Path) -> Any:
        """Fill the template. Raises UserError if the checkpoint holds anything but tensors and plain values."""
        by_key, flat, renamed = megatron_torch._replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        tensors = [base for bases in by_key.values() for base in bases if isinstance(base, ShardedTensor)]
        planner = _Planner(
            shapes_validation_sharded_tensors=[each for each in tensors if not each.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={each.key: each for each in tensors if each.allow_shape_mismatch},
        )
        target = megatron_torch.mcore_to_pyt_state_dict(by_key, True)
        reader = self._reader = self._reader or _Reader(checkpoint_dir)
        reader.read_metadata()  # on every rank: below an error would arrive wrapped
        try:
            with warnings.catch_warnings(action="ignore", category=FutureWarning):  # Megatron uses this function, too
                load_state_dict(target, reader, planner=planner)
        except CheckpointException as error:
            refused = [failure for failure, _ in error.failures.values() if isinstance(failure, UserError)]
            raise (refused[0] if refused else error) from None
        loaded = {key: megatron_torch._unwrap_pyt_sharded_tensor(value) for key, value in target.items()}
        loaded = megatron_torch._replace_sharded_keys_with_state_dict_keys(loaded, flat, renamed)
        megatron_torch._restore_dict_types(loaded, sharded_state_dict)
        return loaded


class _Reader(FileSystemReader):
    """Reads `.metadata` once, with `_MetadataUnpickler`."""

    _metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            path = Path(self.path, ".metadata")
            try:
                with path.open("rb") as file:
                    metadata = _MetadataUnpickler(file).load()
                if not isinstance(metadata, Metadata):
                    raise pickle.UnpicklingError(f"it is a {type(metadata).__name__}")
            except OSError:
                raise
            except Exception as error:  # a damaged pickle can raise anything
                raise _refusal(path, str(error)) from None
            self._metadata = metadata
            self._metadata.storage_meta = self._metadata.storage_meta or StorageMeta()
            self._metadata.storage_meta.load_id = self.load_id
        return self._metadata


class _Unpickler(pickle._Unpickler):
    """Refuses to set attributes of classes and functions, which would change this process.

    Only the unpickler that is written in Python can be given another operation.
    """

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)
    stack: list[Any]

    def _set_attributes(self) -> None:
        if callable(self.stack[-2]):
            raise pickle.UnpicklingError(f"it changes {self.stack[-2]!r}")
        set_attributes: Any = pickle._Unpickler.dispatch[pickle.BUILD[0]]
        set_attributes(self)

    dispatch[pickle.BUILD[0]] = _set_attributes


class _MetadataUnpickler(_Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        is_format = module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype)
        if is_format or (module_name, global_name) in _CLASSES:
            return super().find_class(module_name, global_name)
        raise pickle.UnpicklingError(f"it refers to {module_name}.{global_name}")


class _Planner(megatron_torch.MCoreLoadPlanner):  # type: ignore[misc]  # Megatron has no types
    """Unpickles objects with torch's restricted unpickler."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        set_element(self.original_state_dict, self.mappings[key], _load(key, value))


def load_common(path: Path) -> dict[str, Any]:
    """Read the state that is not sharded. Raises UserError if it holds anything but tensors and plain values."""
    state: dict[str, Any] = _load(path, io.BytesIO(path.read_bytes()), map_location="cpu")
    return state


def _load(where: Path | str, content: io.BytesIO, map_location: str | None = None) -> Any:
    try:
        return torch.load(content, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError:  # its text advises to load without limits
        raise _refusal(where, _MORE) from None
    except Exception as error:  # a damaged archive can raise anything
        raise _refusal(where, str(error)) from None


def check_module_states(state: Mapping[str, Any], *, fp8: bool) -> None:
    """Check the extra states of a chunk's modules. Transformer Engine unpickles those that are not empty.

    Only a model with FP8 layers has such states.

    Raises:
        UserError: a state holds more than tensors, plain values and a recipe, or a model without FP8 layers has one.
    """
    for name, value in state.items():
        if not name.endswith("_extra_state") or not isinstance(value, torch.Tensor) or not value.numel():
            continue
        if not fp8:
            raise _refusal(name, "only a model with FP8 layers has this state")
        try:
            _ModuleStateUnpickler(io.BytesIO(value.cpu().numpy().tobytes())).load()
        except Exception as error:  # a damaged pickle can raise anything
            raise _refusal(name, str(error)) from None


class _ModuleStateUnpickler(_Unpickler):
    """Refuses what `get_extra_state` of Transformer Engine does not write. Its result is not used."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        if module_name == _RECIPES and global_name in _RECIPE_CLASSES:
            return _Recipe  # the check must not need the package
        if (module_name, global_name) == ("torch.storage", "_load_from_bytes"):  # a pickle within the pickle
            return _load_storage
        if (module_name, global_name) in (("torch._utils", "_rebuild_tensor_v2"), ("collections", "OrderedDict")):
            return super().find_class(module_name, global_name)
        raise pickle.UnpicklingError(f"it refers to {module_name}.{global_name}")


class _Recipe:
    """Stands for any class of a recipe."""

    def __new__(cls, *_values: Any) -> Self:
        return super().__new__(cls)


def _load_storage(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), weights_only=True)


def _refusal(where: Path | str, why: str) -> UserError:
    """`why` may contain text from the checkpoint, which must not reach a terminal as it is."""
    one_line = " ".join(why[: 2 * _REASON_CHARS].split())
    why = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in one_line)[:_REASON_CHARS]
    return UserError(f"the checkpoint's {where} is damaged or may run code: {why}. Use a checkpoint that arpo wrote")
