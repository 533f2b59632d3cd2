"""The addresses of the page's data, and the answer to each: the server and the exported file use the same."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from arpo_megatron.errors import UserError
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.view.run_page import roles, run_page
from arpo_megatron.view.runs import FileCache
from arpo_megatron.view.tree_page import step_trees, task_steps, tree


@dataclass(frozen=True, slots=True)
class Pages:
    """Answers requests for data of some runs. Safe for several threads."""

    runs: Mapping[str, RunDirectory]
    """Run directories by name."""
    cache: FileCache = field(default_factory=FileCache)

    def answer(self, *address: str) -> Any:
        """Return the JSON value at an address.

        Args:
            address: () for the list of runs; then (RUN,), (RUN, "roles"), (RUN, "trees", STEP),
                (RUN, "trees", STEP, NUMBER) or (RUN, "task", ID).

        Raises:
            UserError: there is nothing at the address, or a file is damaged.
        """
        if not address:
            return {"runs": list(self.runs), "export": None}
        name, *rest = address
        if name not in self.runs:
            raise UserError(f"no run {name!r} is shown here; restart arpo view with its directory")
        run = self.runs[name]
        match rest:
            case []:
                return run_page(run, self.cache, time.time())
            case ["roles"]:
                return roles(run)
            case ["trees", step]:
                return step_trees(run, step, self.cache)
            case ["trees", step, number] if number.isdecimal():
                return tree(run, step, int(number), self.cache)
            case ["task", task]:
                return task_steps(run, task, self.cache)
        raise UserError(f"nothing at {'/'.join(address)}")


def to_json(value: Any) -> bytes:
    """Return JSON that is ASCII only and has no `<`, so that it can stand in an HTML file."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c").encode()
