"""Small test sets in the formats of the released files."""

import base64
import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest


def xor(text: str, key: str) -> str:
    data = text.encode()
    return base64.b64encode(bytes(byte ^ key.encode()[i % len(key)] for i, byte in enumerate(data))).decode()


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a file for six of the thirteen benchmarks, one of each format."""
    directory = tmp_path_factory.mktemp("benchmarks")
    write_lines(
        directory / "aime24.jsonl",
        [{"problem": f"What is {n} plus {n}?", "answer": f"{2 * n:03d}"} for n in range(1, 7)],
    )
    write_lines(
        directory / "gsm8k.jsonl",
        [{"question": "Ann has 3 bags of 400 nuts. How many nuts?", "answer": "3*400=<<3*400=1200>>\n#### 1,200"}],
    )
    write_lines(
        directory / "math.jsonl",
        [{"problem": "Solve $x^2=4$ for $x>0$, halved.", "solution": "It is $x=2$, so $\\boxed{\\frac{2}{2}}$."}],
    )
    rows = [
        {"id": "dev_0", "question": "Who wrote it?", "golden_answers": ["Jane Austen", "Austen"]},
        {"id": "dev_1", "question": "Are both novels?", "golden_answers": ["no"]},
    ]
    pq.write_table(pa.Table.from_pylist(rows), directory / "hotpotqa.parquet")
    write_lines(
        directory / "metadata.jsonl",
        [
            {"Question": "Which city?", "Final answer": "Lima", "file_name": ""},
            {"Question": "What does the table say?", "Final answer": "3", "file_name": "table.xlsx"},
        ],
    )
    with (directory / "DeepSearch-2505.csv").open("w", encoding="utf-8-sig", newline="") as file:
        table = csv.DictWriter(file, ["id", "prompt", "answer", "canary"])
        table.writeheader()
        table.writerow({"id": 1, "prompt": xor("哪座山更高?", "k3y"), "answer": xor("珠峰", "k3y"), "canary": "k3y"})
    return directory
