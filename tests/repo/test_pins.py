"""pyproject.toml, the lock files and the image pin the versions that `arpo doctor` checks for."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from arpo_megatron.actor.cpu_platform import CHECKED_MEGATRON_CORE
from arpo_megatron.hardware.transformer_engine import CHECKED_TRANSFORMER_ENGINE
from arpo_megatron.launch.preflight.machine import PINS, ROUTER_PIN

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WANTED = {**PINS, "sglang-router": ROUTER_PIN}


def pinned(texts: list[str]) -> dict[str, str]:
    """Return name -> version of the requirements with `==`."""
    found = [Requirement(text) for text in texts]
    return {item.name: str(item.specifier)[2:] for item in found if str(item.specifier).startswith("==")}


def locked(file: str) -> dict[str, str]:
    """Return canonical name -> version of the packages of a lock file."""
    found = re.findall(r"^([\w.-]+)==(\S+)", (ROOT / file).read_text(), re.MULTILINE)
    return {canonicalize_name(name): pin for name, pin in found}


def test_pyproject_has_the_doctors_pins() -> None:
    extras = PROJECT["optional-dependencies"]
    on_gpus = pinned([*PROJECT["dependencies"], *extras["gpu"]])
    assert {name: on_gpus.get(name) for name in WANTED} == WANTED
    assert pinned(extras["cpu"])["sglang-router"] == ROUTER_PIN
    assert PINS["megatron-core"] == CHECKED_MEGATRON_CORE
    assert on_gpus["transformer-engine"] == CHECKED_TRANSFORMER_ENGINE
    assert pinned(extras["emulation"])["transformer-engine"] == CHECKED_TRANSFORMER_ENGINE


def test_lock_file_has_pins_of_doctor() -> None:
    """torch is left out: its build depends on the machine."""
    ours = locked("requirements.lock")
    assert {name: ours.get(name) for name in WANTED if name != "torch"} == {
        name: pin for name, pin in WANTED.items() if name != "torch"
    }


def test_image_has_pins_of_doctor_and_versions_of_the_lock_file() -> None:
    ours, image = locked("requirements.lock"), locked("slurm/container/requirements.lock")
    assert {name: image.get(name) for name in WANTED} == WANTED
    odd = {name for name in ours.keys() & image.keys() if ours[name] != image[name]}
    assert odd == {"numpy", "protobuf", "triton"}, "packages for CUDA need other versions of these only"
    needed = [canonicalize_name(Requirement(text).name) for text in PROJECT["dependencies"]]
    assert not set(needed) - image.keys()
    assert image["transformer-engine"] == ours["transformer-engine"] == CHECKED_TRANSFORMER_ENGINE
    extension = f"transformer-engine-torch=={image['transformer-engine']}\n"
    assert extension in (ROOT / "slurm/container/Dockerfile").read_text()
