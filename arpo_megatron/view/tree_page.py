"""The data of the tree pages: what a step stored, one whole tree, and one task in all steps, as JSON values."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from arpo_megatron.errors import UserError
from arpo_megatron.jobs import resolve
from arpo_megatron.jobs.run_directory import RunDirectory, start_model
from arpo_megatron.monitor.tree_store import held_out_file, read_row, read_summaries, step_file, steps_in
from arpo_megatron.rollout.limits import LIMIT, REPEATED
from arpo_megatron.view.rows import Row
from arpo_megatron.view.runs import FileCache

Decode = Callable[[list[int]], str]
_SUMMARY = (
    *("task_id", "leaves", "forks", "rewards", "unique_tokens", "flat_tokens", "grow_seconds", "dropped", "replayed"),
    *(f"segments.list.element.{name}" for name in ("finish", "tool.status", "tool.seconds")),
)
HELD_OUT = "held-out-"
"""Precedes the step of an evaluation in an address."""
_NO_ERROR = ("ok", LIMIT, REPEATED)
"""Statuses of tool calls that did not fail: the last two were not made."""
_REPLACEMENT = "\ufffd"
"""Stands at the end of a text whose last character is not complete yet."""


def train_steps(run: RunDirectory) -> list[int]:
    """Return the steps with stored trees, ascending."""
    return steps_in(run.trees)


def held_out_steps(run: RunDirectory) -> list[int]:
    """Return the steps whose evaluation stored the trajectories of the held-out tasks, ascending."""
    return steps_in(run.held_out)


def tree_file(run: RunDirectory, step: str) -> Path:
    """Return the file of `N`, the trees of step N, or of `held-out-N`. Raises UserError for another text."""
    kind, number = step.rpartition("-")[::2]
    if kind not in ("", "held-out") or not number.isdecimal():
        raise UserError(f"no trees of {step!r}: give a step, or held-out-STEP")
    return held_out_file(run, int(number)) if kind else step_file(run, int(number))


def step_trees(run: RunDirectory, step: str, cache: FileCache) -> list[Row]:
    """Return a summary of every tree of a step, in stored order; of a damaged one its number and `damaged`, the reason.

    Raises UserError if the file cannot be read.
    """
    rows: list[Row] = cache.get(tree_file(run, step), _read_summary)
    return rows


def whole_trees(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of `step_trees` that are summaries."""
    return [row for row in rows if "damaged" not in row]


def _read_summary(path: Path) -> list[Row]:
    rows = enumerate(read_summaries(path, _SUMMARY))
    return [{"number": at, "damaged": fault} if (fault := _fault(row)) else _summary(at, row) for at, row in rows]


def _fault(row: Row) -> str:
    """Return why a row has no summary; "" if it has one."""
    for name, value in row.items():
        if value is None and name != "dropped":
            return f"{name} is null"
        if isinstance(value, list) and None in value:
            return f"{name} has a null"
    tools = [each["tool"] for each in row.get("segments", ()) if each["tool"] is not None]
    return "a tool has no seconds" if any(tool["status"] and tool["seconds"] is None for tool in tools) else ""


def _summary(number: int, row: Row) -> Row:
    segments = row["segments"]
    tools = [each["tool"] for each in segments if each["tool"] is not None and each["tool"]["status"] is not None]
    return {
        "number": number,
        "task": row["task_id"],
        "leaves": len(row["leaves"]),
        "rewards": [rounded(reward) for reward in row["rewards"]],
        "forks": row["forks"],
        "unique_tokens": row["unique_tokens"],
        "flat_tokens": row["flat_tokens"],
        "seconds": rounded(row["grow_seconds"]),
        "dropped": row["dropped"],
        "replayed": row["replayed"],
        "finish": Counter(each["finish"] for each in segments if each["finish"] is not None),
        "tools": Counter(tool["status"] for tool in tools),
        "tool_errors": sum(tool["status"] not in _NO_ERROR for tool in tools),
        "tool_seconds": rounded(sum(tool["seconds"] for tool in tools)),
    }


def tree_counts(run: RunDirectory, cache: FileCache) -> dict[str, int]:
    """Return the number of stored trees of each step, those of evaluations included; damaged ones do not count."""
    return {step: len(_tasks(run, step, cache)) for step in _all_steps(run)}


def task_steps(run: RunDirectory, task: str, cache: FileCache) -> list[Row]:
    """Return the stored trees of one task: step, number in the step, and mean reward. Damaged ones are left out."""
    return [
        {"step": step, "tree": number, "reward": reward}
        for step in _all_steps(run)
        for number, other, reward in _tasks(run, step, cache)
        if other == task
    ]


def _all_steps(run: RunDirectory) -> list[str]:
    """Return every step with stored trees, in the form that `tree_file` reads."""
    return [*map(str, train_steps(run)), *(f"{HELD_OUT}{step}" for step in held_out_steps(run))]


def _tasks(run: RunDirectory, step: str, cache: FileCache) -> list[tuple[int, str, float | None]]:
    try:
        rows: list[tuple[int, str, float | None]] = cache.get(tree_file(run, step), _read_tasks)
    except UserError:
        return []
    return rows


def _read_tasks(path: Path) -> list[tuple[int, str, float | None]]:
    """Return number, task and mean reward of each tree; fast enough for the files of a thousand steps."""
    rows = read_summaries(path, ("task_id", "rewards"))
    return [
        (number, row["task_id"], rounded(fmean(row["rewards"])) if row["rewards"] else None)
        for number, row in enumerate(rows)
        if not _fault(row)
    ]


def tree(run: RunDirectory, step: str, number: int, cache: FileCache) -> Row:
    """Return one stored tree with the text of every sampled token.

    Args:
        run: the run.
        step: as in `tree_file`.
        number: the tree's number in the file, from 0.
        cache: keeps the tokenizer.

    Raises:
        UserError: there is no such tree, or its file is damaged.
    """
    row = read_row(tree_file(run, step), number)
    decode = decoder(run, cache)
    return {
        "step": step,
        "number": number,
        "task": row["task_id"],
        "prompt": row["prompt"],
        "truth": " or ".join([row["ground_truth"], *(row["aliases"] or ())]),
        "source": row["source"],
        "begun_in_step": row["begun_in_step"],
        "seconds": rounded(row["grow_seconds"]),
        "dropped": row["dropped"],
        "replayed": row["replayed"],
        "forks": row["forks"],
        "unique_tokens": row["unique_tokens"],
        "flat_tokens": row["flat_tokens"],
        "leaves": [_leaf(row, place) for place in range(len(row["leaves"]))],
        "segments": [segment_row(each, decode) for each in row["segments"]],
    }


def _leaf(row: Row, place: int) -> Row:
    """Return the scores of one leaf; a dropped tree that was not finished has none."""

    def at(name: str) -> Any:
        return rounded(row[name][place]) if place < len(row[name] or ()) else None

    terms = {term["name"]: rounded(term["values"][place]) for term in row["terms"] if place < len(term["values"])}
    return {
        "segment": row["leaves"][place],
        "reward": at("rewards"),
        "accuracy": at("accuracies"),
        "format_ok": at("format_ok"),
        "answer": at("answers"),
        "format_fault": at("format_faults"),
        "terms": terms,
        "advantages": [rounded(value) for value in at("advantages") or ()],
        "replayed": place >= len(row["leaves"]) - row["replayed"],
    }


def segment_row(stored: Row, decode: Decode | None) -> Row:
    """Return what a page shows of a stored segment."""
    sampled = stored["role"] == "model"
    return {
        "role": stored["role"],
        "parent": stored["parent"],
        "text": stored["text"],
        "tokens": len(stored["token_ids"]),
        "token_ids": stored["token_ids"] if sampled else None,
        "pieces": token_texts(stored["token_ids"], decode) if sampled and decode is not None else None,
        "logprobs": _numbers(stored["logprobs"]),
        "trainer_logprobs": _numbers(stored["trainer_logprobs"]),
        "entropies": _numbers(stored["entropies"]),
        "policy_version": stored["policy_version"],
        "finish": stored["finish"],
        "branch": stored["branch"],
        "tool": stored["tool"],
        "ended_s": rounded(stored["ended_s"]),
    }


def _numbers(values: Sequence[float] | None) -> list[Any] | None:
    return None if values is None else [rounded(value) for value in values]


def rounded(value: Any) -> Any:
    """Return a number with five significant digits, None for NaN or infinity, and other values unchanged."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return value


def token_texts(ids: Sequence[int], decode: Decode) -> list[str]:
    """Return the text of each token; their concatenation is the text of all.

    A character that several tokens make is the text of the last of them, and the others are empty.
    """
    texts, begin, end = [], 0, 0  # ids[begin:end] is decoded as context, because a token's text may depend on it
    for index in range(len(ids)):
        known, more = decode(list(ids[begin:end])), decode(list(ids[begin : index + 1]))
        if len(more) > len(known) and not more.endswith(_REPLACEMENT):
            texts.append(more[len(known) :])
            begin, end = end, index + 1
        else:
            texts.append("")
    if ids and end < len(ids):
        texts[-1] = decode(list(ids[begin:]))[len(decode(list(ids[begin:end]))) :]
    return texts


def decoder(run: RunDirectory, cache: FileCache) -> Decode | None:
    """Return the decoder of the run's tokenizer; None if its file or the config cannot be read on this machine."""
    from tokenizers import Tokenizer

    try:
        job = cache.get(run.config, resolve.read)
        tokenizer = cache.get(start_model(job, run, "sft") / "tokenizer.json", _load_tokenizer)
    except (UserError, OSError):
        return None
    assert isinstance(tokenizer, Tokenizer)
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))


def _load_tokenizer(path: Path) -> Any:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises this class itself
        raise OSError(f"{path} is not a tokenizer: {error}") from None
