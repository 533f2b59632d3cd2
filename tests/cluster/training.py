"""A short supervised training on Slurm that tests disturb, and its result without disturbance."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arpo_megatron.config import ModelConfig
from arpo_megatron.models.random_init import save_random_weights
from arpo_megatron.models.tiny import make_model_directory, train_bpe
from tests.cluster.onebox import Job, Onebox

UPDATES = 600
EXACT = ("loss", "grad_norm", "lr", "tokens")
TEMPLATE = "{% for m in messages %}{{ m['content'] }}<|endoftext|>{% endfor %}"


@dataclass(frozen=True)
class Undisturbed:
    """An undisturbed supervised training: its overrides, and the metrics of each update."""

    overrides: tuple[str, ...]
    rows: list[dict[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> "Undisturbed":
        """Read what `train_undisturbed` has written."""
        overrides, rows = json.loads((folder / "undisturbed.json").read_text())
        return cls(tuple(overrides), rows)


def train_undisturbed(box: Onebox, folder: Path) -> None:
    """Train with two ranks on two nodes, without engines, so that a start takes seconds."""
    talks, model = folder / "talks.jsonl", folder / "model"
    turns = [(f"what is thing {number}?", f"a number, {number * number}") for number in range(64)]
    messages = [[{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in turns]
    talks.write_text("".join(json.dumps({"messages": each}) + "\n" for each in messages))
    tokenizer = train_bpe([talks.read_text()], 400)
    tokenizer.chat_template = TEMPLATE
    make_model_directory(model, ModelConfig(hidden_size=32, layers=2, heads=2, kv_heads=2, ffn_size=64), tokenizer)
    save_random_weights(model, seed=1)
    overrides = (
        f"model.path={model}",
        f"sft.data={talks}",
        "sft.batch=32",
        "sft.save_every=10",
        "model.max_length=128",
    )
    job = box.submit_run("undisturbed", *overrides, f"sft.steps={UPDATES}")
    assert job.end() == "COMPLETED", str(job)
    (folder / "undisturbed.json").write_text(json.dumps([overrides, job.rows("sft_metrics.jsonl")]))


def start(
    box: Onebox,
    calm: Undisturbed,
    name: str,
    *,
    updates: int = UPDATES,
    profile: str = "",
    nodes: int = 2,
    chain: int = 1,
) -> Job:
    options = ("--chain", str(chain)) if chain > 1 else ()
    return box.submit_run(name, *calm.overrides, f"sft.steps={updates}", profile=profile, nodes=nodes, options=options)


def trains(job: Job, update: int = 25) -> None:
    """Wait until `update` updates are done and a checkpoint is saved."""
    job.wait_for(f"update {update}", lambda: len(job.rows("sft_metrics.jsonl")) >= update)
    job.wait_for("a checkpoint", lambda: any((job.run / "sft_checkpoints").glob("step_*[0-9]")))


def is_whole(job: Job, calm: Undisturbed) -> None:
    """Check a completed job: each update once, with the reference metrics, an export, and no process left."""
    assert job.end() == "COMPLETED", str(job)
    rows = job.rows("sft_metrics.jsonl")
    assert [[row[name] for name in EXACT] for row in rows] == [[row[name] for name in EXACT] for row in calm.rows]
    assert [row["step"] for row in rows] == list(range(1, UPDATES + 1))
    assert (job.run / "sft" / "model.safetensors").exists()
    assert job.nothing_is_left()


def failed(job: Job, code: str) -> str:
    assert job.end() == "FAILED", str(job)
    assert job.shown("ExitCode") == code
    assert job.nothing_is_left()
    return job.log()
