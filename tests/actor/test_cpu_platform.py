"""The CPU platform layer applies its table and refuses targets that do not fit."""

import os
import subprocess
import sys
from importlib.metadata import version

import pytest

from arpo_megatron.actor import cpu_platform, parallel
from arpo_megatron.config import ParallelConfig
from arpo_megatron.errors import UserError
from arpo_megatron.hardware import patching


def literals(*values: str) -> tuple[object, ...]:
    """A function with string literals to exchange: alone, in a tuple, in a nested function."""

    def inner() -> str:
        return "cuda"

    return ("cuda", "torch.cuda.FloatTensor") if values else ("cuda", inner())


def test_patches_are_applied_once_and_have_a_reason() -> None:
    for table in cpu_platform.TABLES.values():
        targets = [patch.target for patch in table]
        assert len(set(targets)) == len(targets)
        assert all(patch.reason for patch in table)


def test_unchecked_megatron_version_is_refused() -> None:
    found = version("megatron-core")
    with pytest.raises(UserError, match=rf"megatron-core {found} is not checked on a CPU \(only 0\.0\.1 and 0\.0\.2\)"):
        patching.check_version("megatron-core", "0.0.1", "0.0.2")
    assert patching.check_version("megatron-core", "0.0.1", found) == found


def test_retarget_exchanges_literals_in_nested_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patching, "_resolve", lambda target, path: literals)
    patching.Retarget("here:literals", {"cuda": "cpu"}, "a test").apply()
    assert literals() == ("cpu", "cpu")
    assert literals("any") == ("cpu", "torch.cuda.FloatTensor")


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        (
            patching.Retarget("megatron.core.utils:local_multi_tensor_l2_norm", {"tpu": "cpu"}, "-"),
            "'tpu' not found",
        ),
        (patching.Retarget("megatron.core.utils:no_such_thing", {"cuda": "cpu"}, "-"), "no such function"),
        (patching.Replace("torch:cuda.no_such_thing", lambda: None, "-"), "no such function"),
    ],
)
def test_patch_refuses_a_target_that_does_not_fit(patch: patching.Replace | patching.Retarget, message: str) -> None:
    with pytest.raises(UserError, match=message):
        patch.apply()


def test_initialize_refuses_a_wrong_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(UserError, match=r"need 4 trainer ranks, but 1 started: start them with python -m .*ranks 4"):
        parallel.initialize(ParallelConfig(tensor=2, data=2), seed=1)


def test_single_process_initializes_without_launcher_or_output() -> None:
    code = (
        "from arpo_megatron.actor import parallel; from arpo_megatron.config import ParallelConfig\n"
        "from arpo_megatron.actor.cpu_platform import install\n"
        "parallel.destroy(); parallel.initialize(ParallelConfig(), seed=1); install()\n"
        "import megatron.core.optimizer, megatron.core.models.gpt.gpt_layer_specs\n"
        "assert parallel.is_rank_zero() and parallel.broadcast_object([1]) == [1]\n"
        "parallel.destroy(); parallel.destroy(); print('done')"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=400, check=True
    )
    assert (done.stdout, done.stderr) == ("done\n", "")
