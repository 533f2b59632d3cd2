"""Report banned phrases in prose: `python scripts/check_prose.py [PATH ...]` prints `file:line: why: text`.

It reads docstrings, comments and string literals of Python files, and all of Markdown, YAML, shell and TOML files and
Makefiles: those that git tracks, or the paths given. The exit code is 1 if it reports anything, 0 otherwise.
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
    r"(?<!['\"`=])(?<!user\s)\bnobody\b(?!['\"`:])": "say 'no one', or name who",
    r"\banybody\b": "say 'anyone', or name who",
    r"\bwhoever\b": "name who",
    r"\banew\b": "say 'again'",
    r"\blikewise\b": "repeat the noun",
    r"\bso many\b": "say 'N' or 'as many'",
    r"\bunder way\b": "say 'in flight' or 'running'",
    r"\bgo(es|ing)? on\b(?! (a|the) )|\bwent on\b|\bgone on\b": "say 'continue' or 'resume'",
    r"\btold\b|\btells?\b": "say 'log', 'report', 'receive' or 'show'",
    r"\bhears\b|\bheard\b": "say 'receive'",
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
}
OPENERS = ("Of ", "As ", "Likewise", "Whoever", "What ")
"""First words that leave the first line of a docstring without a verb or a noun."""

SUFFIXES = (".py", ".md", ".yaml", ".yml", ".sh", ".toml")
_PATTERNS = [(re.compile(pattern.replace(" ", r"\s+"), re.IGNORECASE), why) for pattern, why in PHRASES.items()]
_TEXT_TOKENS = {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}

Chunk = tuple[int, str]
"""A text and the line on which it begins."""


def python_chunks(source: str) -> Iterator[Chunk]:
    """Yield string literals and blocks of comments; comments on consecutive lines are one chunk."""
    start, block = 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if block and token.start[0] != start + len(block):
                yield start, "\n".join(block)
                block = []
            start = start if block else token.start[0]
            block.append(token.string.lstrip("# "))
        elif token.type in _TEXT_TOKENS:
            yield token.start[0], token.string
    if block:
        yield start, "\n".join(block)


def docstring_faults(source: str, documented: bool) -> Iterator[Chunk]:
    """Yield what is wrong with the form of docstrings.

    Args:
        source: a Python file.
        documented: report public functions whose docstring has fewer than two words, too.
    """
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node)
        if text is None:
            continue
        line, name = node.body[0].lineno, getattr(node, "name", "module")
        if text.startswith(OPENERS):
            yield line, f"docstring of {name}: begin with an imperative or a noun phrase"
        if re.search(r"^Attributes:$", text, re.MULTILINE):
            yield line, f"docstring of {name}: document attributes by a docstring below each, not by a list"
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and function and not name.startswith("_") and len(text.split()) < 2:
            yield line, f"docstring of {name}: it has fewer than two words; drop it or say something"


def faults(path: str, text: str) -> Iterator[Chunk]:
    """Yield the line and the description of each fault of one file."""
    lines = text.splitlines()
    python = path.endswith(".py")
    # Without comment signs a phrase is found that a line break divides; the lines keep their numbers.
    for start, chunk in python_chunks(text) if python else [(1, re.sub(r"^[ \t]*#+", "", text, flags=re.MULTILINE))]:
        for pattern, why in _PATTERNS:
            for found in pattern.finditer(chunk):
                line = start + chunk.count("\n", 0, found.start())
                yield line, f"{' '.join(found[0].split())!r}: {why}: {lines[line - 1].strip()}"
    if python:
        yield from docstring_faults(text, documented=not path.startswith("tests/"))


def main(paths: list[str]) -> int:
    """Check the given paths, or every tracked file; return the exit code."""
    if not paths:
        paths = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.splitlines()
    count = 0
    for path in paths:
        file = Path(path)
        if (
            file.resolve() == Path(__file__).resolve()
            or file.is_symlink()
            or not (path.endswith(SUFFIXES) or file.name == "Makefile")
        ):
            continue
        for line, fault in sorted(faults(path, file.read_text(encoding="utf-8"))):
            print(f"{path}:{line}: {fault}")
            count += 1
    print(f"{count} faults" if count else "no faults", file=sys.stderr)
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
