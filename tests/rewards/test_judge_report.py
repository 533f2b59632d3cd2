"""`arpo judge-report`: agreement of a judge with labels, and attacks on it."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from arpo_megatron.errors import UserError
from arpo_megatron.rewards.judge.report import report
from tests.rewards.judge_server import chat_server, part, verdict
from tests.rewards.test_judge import NO_SERVER, config, slow


def test_judge_report_counts_agreement_chance_rules_and_attacks(tmp_path: Path) -> None:
    rows = [
        ("Ada Lovelace", "Lady Lovelace", True),
        ("Ada", "Ms Lovelace", False),
        ("42", "41", False),
        ("7", "seven", True),
    ]
    labels = tmp_path / "labels.jsonl"
    keys = ("question", "truth", "answer", "correct")
    labels.write_text("".join(json.dumps(dict(zip(keys, ("q?", *row), strict=True))) + "\n" for row in rows))

    def gullible(text: str) -> str:
        given = part(text, "given answer")
        return verdict(text, "CORRECT" if "Lovelace" in given or "Ignore all" in given else "INCORRECT")

    with chat_server(gullible) as server:
        found = report(config(server), labels)
    assert found == {
        "rows": 4,
        "without_verdict": 0,
        "judge_agreement": 0.5,
        "kappa": 0.0,
        "false_positives": 1,
        "false_negatives": 1,
        "f1_agreement": 0.75,
        "math_verify_agreement": 0.5,
        "attacks": 10,
        "attacks_that_fooled": 0.5,  # four of five with "Lovelace" in them, and one that it obeys
    }


@pytest.mark.parametrize("mark", ["\u2028", "\x85"])
def test_label_ends_at_its_line_end(tmp_path: Path, mark: str) -> None:
    labels = tmp_path / "labels.jsonl"
    row = {"question": "q?", "truth": "Ada", "answer": f"Ada{mark}Lovelace", "correct": True}
    labels.write_text(json.dumps(row, ensure_ascii=False) + "\r\n", encoding="utf-8")
    with chat_server(lambda text: verdict(text, "CORRECT")) as server:
        assert report(config(server), labels)["rows"] == 1


@pytest.mark.parametrize(
    "text", ["", '{"question": "q"}\n', "no json\n", '{"question":1,"truth":"","answer":"","correct":true}']
)
def test_invalid_labels_are_refused_in_one_line(text: str, tmp_path: Path) -> None:
    labels = tmp_path / "labels.jsonl"
    labels.write_text(text)
    with pytest.raises(UserError, match=r"labels\.jsonl"):
        report(config(NO_SERVER), labels)
    with pytest.raises(UserError, match="does not answer"):
        labels.write_text('{"question":"q","truth":"t","answer":"a","correct":true}')
        report(config(NO_SERVER), labels)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_process_ends_at_once_with_requests_in_flight(tmp_path: Path, number: signal.Signals) -> None:
    labels = tmp_path / "labels.jsonl"
    labels.write_text('{"question":"q","truth":"t","answer":"a","correct":true}')
    with chat_server(slow) as server:
        arguments = [f"reward.judge.url={server.url}", "reward.judge.model=examiner"]
        command = [
            sys.executable,
            "-m",
            "arpo_megatron",
            "judge-report",
            "quickstart",
            "--labels",
            str(labels),
            *arguments,
        ]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
            while not server.asked:
                assert process.poll() is None
                time.sleep(0.02)
            process.send_signal(number)
            begun = time.monotonic()
            try:
                _, output = process.communicate(timeout=50.0)
            finally:
                process.kill()  # where it has not ended
    assert time.monotonic() - begun < 30.0  # about 1 s, on a busy machine more; the answer takes 60 s
    assert process.returncode == 130
    assert output == "arpo: interrupted\n"
