"""Rollout trees in the terminal: forks, the policy's uncertainty there, and the rewards."""

import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeGuard

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.text import Text
from rich.tree import Tree

from arpo_megatron.tree import BranchRecord, Finish, Float32Array, Role, RolloutTree, Segment, ToolRecord

Decode = Callable[[list[int]], str]

_BARS = "▁▂▃▄▅▆▇█"
_TAG = re.compile(r"</?(?:think|search|python|result|answer)>|\\boxed\{")
_RESULT_TAGS = re.compile(r"</?result>")
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, line ends, changes of direction, and surrogates."""
LEGEND = "H: entropy of the first tokens in nats, one bar per token; dH: its normalised rise; P: chance of a fork"


def render_tree(
    tree: RolloutTree, decode: Decode, rewards: Sequence[float], *, max_characters: int = 160
) -> RenderableType:
    """Draw one tree with rich.

    A branch of the picture is a run of segments without a fork: model text, tool results, and the reward at its end.

    Args:
        tree: the tree to draw.
        decode: token ids -> text.
        rewards: one per leaf, in the order of `tree.leaves()`; positive ones are drawn as right. Empty for a dropped
            tree.
        max_characters: longer texts are cut in the middle.

    Raises:
        ValueError: the number of rewards differs from that of leaves.
    """
    leaves = tree.leaves()
    if rewards and len(rewards) != len(leaves):
        raise ValueError(f"{len(rewards)} rewards for {len(leaves)} leaves")
    painter = _Painter(tree, decode, dict(zip(leaves, rewards, strict=False)), max_characters)
    root = Tree(painter.text(tree.segments[0], "bold"), guide_style="dim")
    painter.add_below(root, 0)
    right = sum(reward > 0 for reward in rewards)
    summary = (
        f"{printable(tree.task_id)}: {len(leaves)} trajectories, {right} right, "
        f"forks after tool results: {painter.forks}, {tree.unique_tokens} unique of {tree.flat_tokens} flat tokens"
    )
    return Group(Text(summary, "bold"), root, Text(LEGEND, "dim"))


def printable(text: str) -> str:
    """Escape characters that would control a terminal: texts of models, tools and data sets are untrusted."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def save_svg(renderable: RenderableType, path: Path, *, title: str, width: int = 110) -> None:
    """Write a picture of a terminal that shows `renderable`, `width` characters wide, as an SVG file."""
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(renderable)
    path.write_text(console.export_svg(title=title), encoding="utf-8")


class _Painter:
    """Turns the segments of one tree into lines."""

    def __init__(self, tree: RolloutTree, decode: Decode, rewards: dict[int, float], max_characters: int) -> None:
        self._segments = tree.segments
        self._children = tree.children()
        self._decode = decode
        self._rewards = rewards
        self._max_characters = max_characters
        measured = [float(one.entropies.max()) for one in tree.segments if _measured(one.entropies)]
        self._top_entropy = max(measured, default=0.0)
        self.forks = sum(
            max(0, len(below) - 1)
            for index, below in enumerate(self._children)
            if self._segments[index].role is Role.TOOL
        )

    def add_below(self, parent: Tree, index: int) -> None:
        """Add the segments below segment `index`: each child with its chain is one branch of the picture."""
        pending = [(parent, child) for child in self._children[index]]
        while pending:  # not recursive, because a tree may be deeper than Python's stack
            branch, child = pending.pop(0)
            chain = self._chain(child)
            node = branch.add(Group(*self._lines(chain)))
            pending.extend((node, below) for below in self._children[chain[-1]])

    def text(self, segment: Segment, style: str) -> Text:
        """Return the decoded segment on one line, with dimmed tags."""
        text = Text(self._short(self._decode(segment.token_ids.tolist())), style)
        text.highlight_regex(_TAG, "not bold dim cyan")
        return text

    def _chain(self, index: int) -> list[int]:
        """Return `index` and the chain of only children below it."""
        chain = [index]
        while len(self._children[chain[-1]]) == 1:
            chain.append(self._children[chain[-1]][0])
        return chain

    def _lines(self, chain: list[int]) -> list[Text]:
        lines = []
        for index in chain:
            segment = self._segments[index]
            if segment.role is Role.TOOL:
                lines.append(self._tool_line(segment))
                continue
            if _measured(segment.entropies) or segment.branch is not None:
                lines.append(self._uncertainty(segment.entropies, segment.branch))
            lines.append(self.text(segment, "default"))
        if chain[-1] in self._rewards:
            lines.append(_verdict(self._rewards[chain[-1]], self._segments[chain[-1]].finish))
        return lines

    def _uncertainty(self, entropies: Float32Array | None, branch: BranchRecord | None) -> Text:
        """Return the mean entropy with one bar per token, and the branching decision."""
        line = Text()
        if _measured(entropies):
            line.append(f"H {entropies.mean():.2f} ", "yellow")
            for value in entropies.tolist():
                share = value / self._top_entropy if self._top_entropy > 0 else 0.0
                style = "red" if share > 2 / 3 else "yellow" if share > 1 / 3 else "green"
                line.append(_BARS[min(len(_BARS) - 1, int(share * len(_BARS)))], style)
        if branch is not None:
            sign = "<" if branch.draw < branch.probability else "≥"
            decision = (
                f"  dH {branch.dH:+.3f}  P {branch.probability:.2f}  draw {branch.draw:.2f} {sign} P  {branch.why}"
            )
            line.append(decision, "magenta")
        return line

    def _tool_line(self, segment: Segment) -> Text:
        result = _RESULT_TAGS.sub("", self._decode(segment.token_ids.tolist())).strip()
        line = Text("→ ", "blue")
        line.append(self._short(result), "blue")
        line.append(_tool_note(segment.tool), "dim")
        return line

    def _short(self, text: str) -> str:
        text = printable(" ".join(text.split()))
        if len(text) <= self._max_characters:
            return text
        half = self._max_characters // 2
        return f"{text[:half]} … {text[-half:]}"


def _measured(entropies: Float32Array | None) -> TypeGuard[Float32Array]:
    return entropies is not None and entropies.size > 0 and bool(np.isfinite(entropies).all())


def _tool_note(tool: ToolRecord | None) -> str:
    if tool is None:
        return ""
    origin = "from cache" if tool.cached else f"{1000 * tool.seconds:.0f} ms"
    status = "" if tool.status == "ok" else f", {tool.status}"
    return f"  ({printable(tool.name)}, {origin}{status})"


def _verdict(reward: float, finish: Finish | None) -> Text:
    line = Text(f"{'✓' if reward > 0 else '✗'} reward {reward:+.2f}", "bold green" if reward > 0 else "bold red")
    if finish not in (None, Finish.END):
        line.append(f"  ended by {finish.value.replace('_', ' ')}", "dim")
    return line
