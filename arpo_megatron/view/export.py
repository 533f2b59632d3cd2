"""`arpo view RUN_DIR --html FILE`: the pages of some runs as one HTML file that loads nothing."""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from arpo_megatron.errors import UserError
from arpo_megatron.utils.atomic import atomic_write
from arpo_megatron.view.pages import Pages, to_json
from arpo_megatron.view.rows import Row
from arpo_megatron.view.static_files import single_page
from arpo_megatron.view.tree_page import HELD_OUT, tree_counts, whole_trees


def write_html(pages: Pages, path: Path, *, trees: int) -> int:
    """Write the pages as one file; at any moment the file is the old or the new one.

    Args:
        pages: the runs.
        path: the file.
        trees: most trees per run; the page states how many were left out.

    Returns:
        The file's size in bytes.

    Raises:
        UserError: `path` cannot be written.
    """
    answers: dict[str, Any] = {}
    left_out = 0
    for name in pages.runs:
        page = pages.answer(name)
        chosen = _choose(pages, name, page["tree_steps"], page["held_out_tree_steps"], trees)
        left_out += sum(tree_counts(pages.runs[name], pages.cache).values()) - len(chosen)
        steps = dict.fromkeys(each.step for each in chosen)
        for step in steps:
            answers[_key(name, "trees", step)] = [each.row for each in chosen if each.step == step]
        for each in chosen:
            answers[_key(name, "trees", each.step, str(each.row["number"]))] = each.tree
        kept = {
            key: [step for step in page[key] if prefix + str(step) in steps]
            for key, prefix in (("tree_steps", ""), ("held_out_tree_steps", HELD_OUT))
        }
        answers[_key(name)] = {**page, "path": name, **kept}
        answers[_key(name, "services")] = []
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    answers[_key()] = {"runs": list(pages.runs), "export": {"made": made, "trees_left_out": left_out}}
    text = single_page(to_json(answers))
    try:
        with atomic_write(path) as partial:
            partial.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
    return len(text.encode())


def _key(*address: str) -> str:
    return "/".join(address)


@dataclass(frozen=True, slots=True)
class _Chosen:
    """A tree of the file."""

    step: str
    """Its step in the form of `tree_page.tree_file`."""
    row: Row
    """Its summary."""
    tree: Any


def _choose(pages: Pages, name: str, steps: Sequence[int], held_out: Sequence[int], most: int) -> list[_Chosen]:
    """Return at most `most` trees, mixed rewards first.

    They are those of the last, the first and the middle stored step, and of the last and the first evaluation.
    """
    evaluations = [f"{HELD_OUT}{step}" for step in held_out]
    trained = [str(step) for step in steps]
    middle = trained[len(trained) // 2 :][:1]
    # The most wanted come first: they get the rest of a division.
    wanted = list(dict.fromkeys([*trained[-1:], *evaluations[-1:], *trained[:1], *evaluations[:1], *middle]))
    chosen: list[_Chosen] = []
    for place, step in enumerate(wanted):
        share = math.ceil((most - len(chosen)) / (len(wanted) - place))
        chosen += islice(_readable(pages, name, step), share)
    return sorted(chosen, key=lambda each: int(each.row["number"]))


def _readable(pages: Pages, name: str, step: str) -> Iterator[_Chosen]:
    """Yield the trees of a step that are not damaged, the most interesting first."""
    with suppress(UserError):
        for row in sorted(whole_trees(pages.answer(name, "trees", step)), key=_interest):
            with suppress(UserError):
                yield _Chosen(step, row, pages.answer(name, "trees", step, str(row["number"])))


def _interest(row: Row) -> tuple[bool, int, int]:
    return (len(set(row["rewards"])) < 2, -int(row["forks"]), row["number"])
