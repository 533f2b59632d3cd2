"""Report banned phrases in prose: `python scripts/check_prose.py [PATH ...]` prints `file:line: why: text`.

It reads docstrings, comments and string literals of Python files, and the whole text of all others: the text files that
git tracks, or the paths given. The exit code is 1 if it reports anything, 0 otherwise.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

PHRASES: dict[str, str] = {
    r"(?<!user\s)\bnobody\b": "say 'no one', or name who",
    r"\banybody\b": "say 'anyone', or name who",
    r"\bwhoever\b": "name who",
    r"\banew\b": "say 'again'",
    r"\blikewise\b": "repeat the noun",
    r"\bso many\b": "say 'N' or 'as many'",
    r"\bunder way\b": "say 'in flight' or 'running'",
    r"\bgo(es|ing)? on\b(?! (a|the) )|\bwent on\b|\bgone on\b": "say 'continue' or 'resume'",
    r"\btold\b|\btells?\b": "say 'log', 'report', 'receive' or 'show'",
    r"\bhears\b|\bheard\b": "say 'receive'",
    r"\bsa(ys|id)\b": "say 'states', 'reports', 'prints' or 'names'",
    r"\bharvest\w*": "say 'collect'",
    r"[.;]\s(?-i:What)\b(?![^.]*\?)": "begin the sentence with a noun",
    r"\([^()]* before\)": "leave out how it was before",
    r"\bmend(s|ed|ing)?\b": "say 'fix'",
    r"\bbeside\b": "say 'next to', 'besides' or 'in addition to'",
    r"\bbehind (it|them|the|a|an|every|each|this|that|one)\b(?! (proxy|firewall|router|\S*\s?endpoint|interface))": (
        "say 'after'; only proxies have a behind"
    ),
    r"\bto be had\b": "say 'available'",
    r"\bput(s|ting)? up with\b": "say 'accept' or 'tolerate'",
    r"\blets? go of\b": "say 'release' or 'free'",
    r"\bone of one's own\b": "say 'your own'",
    r"\bas ever\b": "say 'as before'",
    r"\b(hence|thus|thereby|thereof|whereby|wherein|albeit|upon)\b": "use a plain word: so, by which, of it, on",
    r"\bof course\b|\bobviously\b|\bsimply\b": "leave it out",
    r"\bin vain\b": "say 'without effect' or 'needlessly'",
    r"\bleaders?\b": "say 'controller', or name the process",
}
OPENERS = ("Of ", "As ", "Likewise", "Whoever", "What ")
"""First words that leave the first line of a docstring without a verb or a noun."""

SKIPPED = (".png", "LICENSE", ".lock", ".parquet", ".svg", ".jsonl", "check_prose.py")
"""Ends of the paths of files that are data, or that list the phrases and test the list."""
_PATTERNS = [(re.compile(pattern.replace(" ", r"\s+"), re.IGNORECASE), why) for pattern, why in PHRASES.items()]

Chunk = tuple[int, int, str]
"""The first and the last line of a text, and the text."""


def literals(tree: ast.Module) -> Iterator[Chunk]:
    """Yield string literals as Python joins them, with {} for each expression; a literal of one word is not prose."""
    parts = set[int]()
    for node in ast.walk(tree):  # an f-string comes before its parts
        if isinstance(node, ast.JoinedStr):
            parts.update(map(id, node.values))
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            text = node.value
        else:
            continue
        if len(text.split()) > 1:
            yield node.lineno, node.end_lineno or node.lineno, text


def comments(source: str) -> Iterator[Chunk]:
    """Yield blocks of comments; those on consecutive lines are one block."""
    start, block = 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if block and token.start[0] != start + len(block):
            yield start, start + len(block) - 1, "\n".join(block)
            block = []
        start = start if block else token.start[0]
        block.append(token.string.lstrip("# "))
    if block:
        yield start, start + len(block) - 1, "\n".join(block)


def docstring_faults(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the description of each fault in the form of a docstring, attribute docstrings included."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            continue
        text = str(node.value.value)
        if text.lstrip().startswith(OPENERS):
            yield node.lineno, f"begin the docstring with an imperative or a noun phrase: {text[:40]!r}"
        if re.search(r"^ *Attributes:$", text, re.MULTILINE):
            yield node.lineno, "document attributes by a docstring below each, not by a list"


def faults(path: str, text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the description of each fault of one file."""
    lines = text.splitlines()
    if path.endswith(".py"):
        tree = ast.parse(text)
        yield from docstring_faults(tree)
        chunks = [*literals(tree), *comments(text)]
    else:
        # Without comment signs a phrase is found that a line break divides; the lines keep their numbers.
        chunks = [(1, len(lines), re.sub(r"^[ \t]*#+", "", text, flags=re.MULTILINE))]
    for first, last, chunk in chunks:
        for pattern, why in _PATTERNS:
            for found in pattern.finditer(chunk):
                line = min(first + chunk.count("\n", 0, found.start()), last)
                yield line, f"{' '.join(found[0].split())!r}: {why}: {lines[line - 1].strip()}"


def main(paths: list[str]) -> int:
    """Check the given paths, or every tracked file; return the exit code."""
    if not paths:
        paths = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.splitlines()
    count = 0
    for path in paths:
        file = Path(path)
        if path.endswith(SKIPPED) or file.is_symlink() or not file.is_file():
            continue
        for line, fault in sorted(faults(path, file.read_text(encoding="utf-8"))):
            print(f"{path}:{line}: {fault}")
            count += 1
    print(f"{count} faults" if count else "no faults", file=sys.stderr)
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
