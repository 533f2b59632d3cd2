"""The addresses of the page's data, and the answer to each: the server and the exported file use the same."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arpo_megatron.errors import UserError
from arpo_megatron.jobs import resolve
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.monitor.tree_store import read_row
from arpo_megatron.view.grow import Grower, Growth, grow, with_growths
from arpo_megatron.view.run_page import run_page, services
from arpo_megatron.view.runs import FileCache
from arpo_megatron.view.tree_page import decoder, step_trees, task_steps, tree, tree_file


@dataclass(frozen=True, slots=True)
class Pages:
    """Answers requests for data of some runs. Safe for several threads."""

    runs: Mapping[str, RunDirectory]
    """Run directories by name."""
    cache: FileCache = field(default_factory=FileCache)
    grower: Grower | None = None
    """The agent that grows branches again; None: there is none."""
    growths: dict[tuple[Path, int, int], list[Growth]] = field(default_factory=dict)
    """Its continuations, by tree: file, time of the file (a resumed run replaces it) and number."""

    def answer(self, *address: str) -> Any:
        """Return the JSON value at an address.

        Args:
            address: () for the list of runs; then (RUN,), (RUN, "services"), (RUN, "trees", STEP),
                (RUN, "trees", STEP, NUMBER) or (RUN, "task", ID).

        Raises:
            UserError: there is nothing at the address, or a file is damaged.
        """
        if not address:
            return {"runs": list(self.runs), "export": None, "grow": self.grower is not None}
        name, *rest = address
        run = self._run(name)
        match rest:
            case []:
                return run_page(run, self.cache, time.time())
            case ["services"]:
                return services(run)
            case ["trees", step]:
                return step_trees(run, step, self.cache)
            case ["trees", step, number] if number.isdecimal():
                return self._tree(run, step, int(number))
            case ["task", *parts] if parts:  # an id may contain slashes
                return task_steps(run, "/".join(parts), self.cache)
        raise UserError(f"nothing at {'/'.join(address)}")

    def grow(self, name: str, step: str, number: int, *, segment: int, count: int) -> Any:
        """Sample continuations at the end of a segment, and return the tree with them.

        Raises:
            UserError: there is no agent or no such place, or the agent fails.
        """
        if self.grower is None:
            raise UserError("nothing can be grown: start arpo view with --grow")
        run = self._run(name)
        file, decode = tree_file(run, step), decoder(run, self.cache)
        if decode is None:
            raise UserError("the tokenizer of the run cannot be read here")
        job = self.cache.get(run.config, resolve.load)
        stored, key = read_row(file, number), _key(file, number)
        found = grow(self.grower, stored, job, decode, segment=segment, count=count)
        self.growths.setdefault(key, []).append(found)
        return self._tree(run, step, number)

    def _run(self, name: str) -> RunDirectory:
        if name not in self.runs:
            raise UserError(f"no run {name!r} is shown here; restart arpo view with its directory")
        return self.runs[name]

    def _tree(self, run: RunDirectory, step: str, number: int) -> Any:
        found = tree(run, step, number, self.cache)
        growths = self.growths.get(_key(tree_file(run, step), number))
        return with_growths(found, growths, decoder(run, self.cache)) if growths else found


def _key(file: Path, number: int) -> tuple[Path, int, int]:
    return file, file.stat().st_mtime_ns, number


def to_json(value: Any) -> bytes:
    """Return JSON that is ASCII only and has no `<`, so that it can stand in an HTML file."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c").encode()
