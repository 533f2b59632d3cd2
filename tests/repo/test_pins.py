"""pyproject.toml, the lock file and the image pin the versions that `arpo doctor` checks for."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from arpo_megatron.actor.cpu_platform import CHECKED_MEGATRON_CORE
from arpo_megatron.launch.preflight.machine import PINS, ROUTER_PIN, TE_VERSIONS

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WANTED = {**PINS, "sglang-router": ROUTER_PIN}


def pinned(texts: list[str]) -> dict[str, str]:
    """Return name -> version of the requirements with `==`."""
    found = [Requirement(text) for text in texts]
    return {item.name: str(item.specifier)[2:] for item in found if str(item.specifier).startswith("==")}


def image() -> dict[str, str]:
    """Return name -> version of the packages that the Dockerfile pins."""
    return dict(re.findall(r"([\w-]+)(?:\[\w+\])?==([\w.]+)", (ROOT / "slurm/container/Dockerfile").read_text()))


def test_pyproject_has_the_doctors_pins() -> None:
    extras = PROJECT["optional-dependencies"]
    on_gpus = pinned([*PROJECT["dependencies"], *extras["gpu"]])
    assert {name: on_gpus.get(name) for name in WANTED} == WANTED
    assert pinned(extras["cpu"])["sglang-router"] == ROUTER_PIN
    assert PINS["megatron-core"] == CHECKED_MEGATRON_CORE
    (engine,) = (item for item in map(Requirement, extras["gpu"]) if item.name == "transformer-engine")
    first, below = (".".join(map(str, numbers)) for numbers in TE_VERSIONS)
    assert {str(part) for part in engine.specifier} == {f">={first}", f"<{below}"}


def test_lock_file_has_pins_of_doctor() -> None:
    """torch is left out: its build depends on the machine."""
    locked = pinned(re.findall(r"^[\w.-]+==\S+", (ROOT / "requirements.lock").read_text(), re.MULTILINE))
    assert {name: locked.get(name) for name in WANTED if name != "torch"} == {
        name: pin for name, pin in WANTED.items() if name != "torch"
    }


def test_image_has_pins_of_doctor() -> None:
    """Other packages come with the project's requirements."""
    named, text = image(), (ROOT / "slurm/container/Dockerfile").read_text()
    assert {name: named.get(name) for name in WANTED if name != "transformers"} == {
        name: pin for name, pin in WANTED.items() if name != "transformers"
    }
    assert f"startswith('{PINS['torch']}')" in text
    engine = Version(named["transformer-engine"]).release
    assert TE_VERSIONS[0] <= engine < TE_VERSIONS[1]
