"""The names in the table of metrics of docs/reference/run-directory.md."""

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "run-directory.md"


def documented_metrics() -> set[str]:
    """Return every metric that the page explains. AssertionError: one is explained twice."""
    _, _, section = PAGE.read_text().partition("\n## Metrics\n")
    names = re.findall(r"^\| `([\w/]+)` \|", section, re.MULTILINE)
    assert len(names) == len(set(names))
    return set(names)
