"""Runs the pages of docs/tutorials: writes the files that a page shows, runs its commands, and compares their output.

- A fenced block with `title="NAME"` is the file NAME, relative to the reader's directory.
- In a `console` block a line after `$ ` is a command for the shell. The lines below it stand in its output, in this
  order, among others; `...` stands for any text.
- A comment above a console block decides when it runs: `<!-- trains: ... -->` in the campaigns, with everything after
  it; `<!-- not run: REASON -->` never. The word `fails` after `console` expects an exit code other than 0.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(r"(?:<!-- (trains|not run)[^>]*-->\n)?^```(\w+)([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_TITLE = re.compile(r'title="([^"]+)"')


@dataclass(frozen=True, slots=True)
class Command:
    """A command with the lines that its output must have."""

    text: str
    expected: tuple[str, ...]
    fails: bool


@dataclass(frozen=True, slots=True)
class Block:
    """A file to write or commands to run."""

    when: str
    """"" for always, "trains" or "not run"."""
    file: str
    """Name of the file; empty for commands."""
    content: str
    fails: bool

    def commands(self) -> Iterator[Command]:
        """Yield the commands of a console block."""
        for part in re.split(r"^\$ ", self.content, flags=re.MULTILINE)[1:]:
            text, *expected = part.rstrip("\n").split("\n")
            yield Command(text, tuple(line for line in expected if line.strip() != "..."), self.fails)


def blocks(page: str) -> list[Block]:
    """Return the files and console blocks of a page, in its order."""
    found = []
    for when, language, rest, content in _BLOCK.findall(page):
        title = _TITLE.search(rest)
        if title is not None or language == "console":
            found.append(Block(when, title[1] if title else "", content, "fails" in rest))
    return found


def run_page(page: str, folder: Path, *, train: bool) -> int:
    """Follow a page in `folder`; stop before the first block that trains unless `train`. Return the commands run.

    Raises:
        AssertionError: a command ends unlike the page, or its output lacks a line of the page.
    """
    environment = _environment(folder)
    ran = 0
    for block in blocks(page):
        if block.when == "trains" and not train:
            break
        if block.file:
            path = folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.content, encoding="utf-8")
        elif block.when != "not run":
            for command in block.commands():
                _run(command, folder, environment)
                ran += 1
    return ran


def _environment(folder: Path) -> Mapping[str, str]:
    """Return the environment of a reader whose installed packages go to `folder` and not into the tests' packages."""
    packages = folder / "installed"
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(packages),
        "PIP_TARGET": str(packages),
        "PIP_NO_DEPS": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip reads the value of a negated option the other way round
        "COLUMNS": "200",
    }


def _run(command: Command, folder: Path, environment: Mapping[str, str]) -> None:
    done = subprocess.run(
        ["bash", "-c", command.text],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1500,
    )
    output = done.stdout
    assert (done.returncode != 0) is command.fails, f"$ {command.text}\nexit code {done.returncode}\n{output[-4000:]}"
    lines = iter([" ".join(line.split()) for line in output.splitlines()])
    for expected in command.expected:
        pattern = re.compile(".*".join(map(re.escape, re.split(r" ?\.\.\. ?", " ".join(expected.split())))))
        found = any(pattern.fullmatch(line.strip()) or pattern.fullmatch(_without_time(line)) for line in lines)
        assert found, f"$ {command.text}\nno line {expected!r} in\n{output[-3000:]}"


def _without_time(line: str) -> str:
    """Return a line of a job's progress without the minutes and seconds at its beginning."""
    return re.sub(r"^\d+:\d\d ", "", line)
