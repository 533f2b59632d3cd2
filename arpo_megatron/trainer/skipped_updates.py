"""Updates that were skipped because something was not finite: counted, dumped for replay, and no more than three.

A dump is one .npz: all packs of the minibatch (a cut tree's packs inherit from each other, so one alone says nothing),
their old log-probs, and what was known when it was written. `arpo replay-pack FILE` computes it again.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args
from zipfile import BadZipFile

import numpy as np

from arpo_megatron.algorithms.credit import Loss
from arpo_megatron.config import JobConfig
from arpo_megatron.errors import UserError
from arpo_megatron.jobs.fingerprint import fingerprint
from arpo_megatron.jobs.inputs import model_path
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.monitor.events import EventLog
from arpo_megatron.packing.layout import TreePack, new_pack
from arpo_megatron.tree import Float32Array
from arpo_megatron.utils.atomic import atomic_write

MAX_SKIPPED_UPDATES = 3
"""Updates that may be skipped in a row before the run stops."""


@dataclass(frozen=True, slots=True)
class SkippedUpdate:
    """A minibatch whose update was skipped.

    Attributes:
        phase: of the job, "train" or "sft"; its checkpoints are where a replay gets the weights.
        step: finished steps (updates, in the cold start) before it.
        loss: of `Actor.update`.
        suspects: indices of the packs whose loss was not finite; none: the gradient was not, with finite losses.
        packs: the whole minibatch.
        old_logprobs: float32[m] a pack, in nats; None: the policy of the update itself.
        reference_logprobs: likewise; None: no KL penalty.
        made_by: `identity.fingerprint` of the run.
    """

    phase: Literal["train", "sft"]
    step: int
    loss: Loss
    suspects: Sequence[int]
    packs: Sequence[TreePack]
    old_logprobs: Sequence[Float32Array] | None
    reference_logprobs: Sequence[Float32Array] | None = None
    made_by: Mapping[str, str] = field(kw_only=True)

    @property
    def told(self) -> str:
        """What was not finite, in words."""
        if not self.suspects:
            return f"the gradient was not finite, the loss of all {len(self.packs)} packs was"
        return f"the loss of pack {', '.join(map(str, self.suspects))} of {len(self.packs)} was not finite"


def save_bad_update(folder: Path, bad: SkippedUpdate) -> Path:
    """Write `folder/<phase>_<step>[-K].npz`, the next free name, wholly or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    stem, number = f"{bad.phase}_{bad.step:06d}", 1
    while (path := folder / f"{stem}{f'-{number}' if number > 1 else ''}.npz").exists():
        number += 1
    arrays: dict[str, Any] = {"about": np.array(json.dumps(_about(bad)))}
    for index, pack in enumerate(bad.packs):
        arrays |= {f"{index}/{f.name}": np.asarray(getattr(pack, f.name)) for f in fields(TreePack)}
        arrays |= {f"{index}/{name}": values[index] for name, values in _logprobs(bad).items()}
    with atomic_write(path) as partial, partial.open("wb") as file:
        np.savez_compressed(file, **arrays)
    return path


def load_bad_update(path: Path) -> SkippedUpdate:
    """Inverse of `save_bad_update`.

    Raises:
        ValueError: the file is no such dump.
    """
    try:
        with np.load(path) as stored:
            about = json.loads(str(stored["about"]))
            count, known = about.pop("packs"), about.pop("logprobs")
            packs = [_pack({f.name: stored[f"{i}/{f.name}"] for f in fields(TreePack)}) for i in range(count)]
            logprobs = {
                name: [stored[f"{i}/{name}"] for i in range(count)] if name in known else None for name in _LOGPROBS
            }
    except (OSError, KeyError, ValueError, EOFError, BadZipFile) as error:
        raise ValueError(f"{path} is no dump of a skipped update ({type(error).__name__})") from None
    try:
        if about["loss"] not in get_args(Loss):
            raise TypeError
        return SkippedUpdate(packs=packs, **about | logprobs)
    except TypeError:
        raise ValueError(f"{path} was dumped by another version of this program") from None


def not_finite(bad: SkippedUpdate, index: int) -> list[str]:
    """Inputs of one pack that are not finite, a phrase each (unknown sampling log-probs are NaN by design)."""
    pack = bad.packs[index]
    arrays = {name: getattr(pack, name) for name in ("positive", "negative", "weight")}
    arrays |= {name: values[index] for name, values in _logprobs(bad).items()}
    counts = {name: int((~np.isfinite(values)).sum()) for name, values in arrays.items()}
    return [f"{name}: {count} of {len(arrays[name])} not finite" for name, count in counts.items() if count]


def dump_if_skipped(
    bad: SkippedUpdate | None,
    skipped_in_a_row: int,
    folder: Path,
    events: EventLog,
    *,
    broadcast: Callable[[str], str] = lambda text: text,
) -> int:
    """Count a skipped update and dump it, on all ranks after every update (rank 0, whose `events` are enabled, writes).

    Args:
        bad: the update; None: it was taken.
        skipped_in_a_row: before it.
        folder: for dumps.
        events: where it is told.
        broadcast: gives every rank what the controller passes in (`parallel.broadcast_object`).

    Returns:
        the updates skipped in a row now.

    Raises:
        UserError: `MAX_SKIPPED_UPDATES` in a row.
    """
    if bad is None:
        return 0
    replayed = "arpo replay-pack shows what is not finite"
    if events.enabled:
        try:
            replayed = f"what is not finite shows: arpo replay-pack {save_bad_update(folder, bad)}"
        except OSError as error:
            replayed = f"it could not be dumped: {error}"
    replayed = broadcast(replayed)  # whichever rank's error is shown, it names the dump
    events.emit("note", text=f"an update was skipped: {bad.told}; {replayed}")
    if skipped_in_a_row + 1 < MAX_SKIPPED_UPDATES:
        return skipped_in_a_row + 1
    raise UserError(
        f"{MAX_SKIPPED_UPDATES} updates in a row were skipped because loss or gradient was not finite; the last: "
        f"{bad.told}; {replayed}"
    )


def _about(bad: SkippedUpdate) -> dict[str, Any]:
    plain = {name: getattr(bad, name) for name in ("phase", "step", "loss", "made_by")}
    return {**plain, "suspects": list(bad.suspects), "packs": len(bad.packs), "logprobs": list(_logprobs(bad))}


_LOGPROBS = ("old_logprobs", "reference_logprobs")


def _logprobs(bad: SkippedUpdate) -> dict[str, Sequence[Float32Array]]:
    return {name: values for name in _LOGPROBS if (values := getattr(bad, name)) is not None}


def _pack(arrays: dict[str, Any]) -> TreePack:
    return new_pack(**{name: int(values) if values.ndim == 0 else values for name, values in arrays.items()})


def check_dump(bad: SkippedUpdate, file: Path, config: JobConfig, run: RunDirectory) -> None:
    """Raises UserError where a dumped update cannot be one of this run."""
    spec = ModelSpec.from_hf(model_path(config, run))
    for name, value in fingerprint(config, spec).items():
        if bad.made_by.get(name) != value:
            raise UserError(
                f"{file} was dumped by a run with another {name} than {run.path} has: name its own with --run DIR"
            )
    for index, pack in enumerate(bad.packs):
        strange = pack.token_ids[(pack.token_ids < 0) | (pack.token_ids >= spec.vocabulary)]
        if len(strange):
            raise UserError(
                f"{file} is damaged: token {strange[0]} of pack {index} is not in the model's vocabulary of "
                f"{spec.vocabulary}"
            )
