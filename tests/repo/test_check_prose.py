"""`scripts/check_prose.py` finds a banned phrase in every place where prose stands."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "check_prose.py"


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("a.py", '"""Nobody reads this."""\n', 1),
        ("a.py", 'X = 1\n"""Of both ends."""\n', 2),
        ("a.py", 'X = (\n    "it goes "\n    f"on with {3}"\n)\n', 2),
        ("a.py", "X = 1  # a step under\n# way\n", 1),
        ("Dockerfile", "FROM scratch\n# Mended in the next layer.\n", 2),
        ("run", "#!/bin/sh\n# starts anew\n", 2),
        ("a.md", "# Page\n\nThe leader of course waits.\n", 3),
    ],
    ids=[
        "after quotes",
        "attribute docstring",
        "joined literals",
        "comment over two lines",
        "no suffix",
        "shell",
        "page",
    ],
)
def test_check_prose_reports_phrase(tmp_path: Path, name: str, text: str, line: int) -> None:
    (tmp_path / name).write_text(text)
    done = subprocess.run([sys.executable, SCRIPT, name], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.startswith(f"{name}:{line}: ")) == (1, True), done.stdout + done.stderr
