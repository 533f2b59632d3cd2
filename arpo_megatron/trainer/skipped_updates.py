"""Updates that were skipped because a loss or gradient was not finite: counted, and dumped to be computed again.

A dump is one .npz file with all packs of the batch (packs of a cut tree inherit from each other, so one alone is not
enough) and their log-probs. `arpo recompute-update FILE` computes the update again.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from arpo_megatron.algorithms.credit import LossForm
from arpo_megatron.errors import UserError
from arpo_megatron.jobs.run_directory import Phase
from arpo_megatron.packing.layout import TreePack, new_pack
from arpo_megatron.tree import Float32Array
from arpo_megatron.utils.atomic import atomic_write

_LOGPROBS = ("old_logprobs", "reference_logprobs")


@dataclass(frozen=True, slots=True)
class SkippedUpdate:
    """A batch whose update was skipped."""

    phase: Phase
    """Phase of the job. The computation takes the weights from its checkpoints."""
    step: int
    """Finished steps before it (updates, in supervised training)."""
    loss: LossForm
    suspects: Sequence[int]
    """Indices of the packs whose loss was not finite; empty if only the gradient was not."""
    packs: Sequence[TreePack]
    old_logprobs: Sequence[Float32Array] | None
    """float32[m] for each pack, in nats; None: those of the policy that is updated."""
    reference_logprobs: Sequence[Float32Array] | None = None
    """float32[m] for each pack, in nats; None without a KL penalty."""

    @property
    def reason(self) -> str:
        """A phrase that names what was not finite."""
        if not self.suspects:
            return f"the gradient was not finite, the loss of all {len(self.packs)} packs was"
        return f"the loss of pack {', '.join(map(str, self.suspects))} of {len(self.packs)} was not finite"

    def logprobs(self) -> dict[str, Sequence[Float32Array]]:
        """Return the log-probs that the update has, by field name."""
        return {name: values for name in _LOGPROBS if (values := getattr(self, name)) is not None}


def save_skipped_update(folder: Path, update: SkippedUpdate) -> Path:
    """Write `folder/<phase>_<step>[-N].npz` with the first free N and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    stem, number = f"{update.phase}_{update.step:06d}", 1
    while (path := folder / f"{stem}{f'-{number}' if number > 1 else ''}.npz").exists():
        number += 1
    about = {name: getattr(update, name) for name in ("phase", "step", "loss")}
    about |= {"suspects": list(update.suspects), "packs": len(update.packs), "logprobs": list(update.logprobs())}
    arrays: dict[str, Any] = {"about": np.array(json.dumps(about))}
    for index, pack in enumerate(update.packs):
        arrays |= {f"{index}/{f.name}": np.asarray(getattr(pack, f.name)) for f in fields(TreePack)}
        arrays |= {f"{index}/{name}": values[index] for name, values in update.logprobs().items()}
    with atomic_write(path) as partial, partial.open("wb") as file:
        np.savez_compressed(file, **arrays)
    return path


def load_skipped_update(path: Path) -> SkippedUpdate:
    """Read what `save_skipped_update` wrote.

    Raises:
        UserError: the file is not such a dump.
    """
    try:
        with np.load(path) as stored:
            about = json.loads(str(stored["about"]))
            count, known = about.pop("packs"), about.pop("logprobs")
            packs = [_pack({f.name: stored[f"{i}/{f.name}"] for f in fields(TreePack)}) for i in range(count)]
            logprobs = {
                name: [stored[f"{i}/{name}"] for i in range(count)] if name in known else None for name in _LOGPROBS
            }
        return SkippedUpdate(packs=packs, **about | logprobs)
    except (OSError, KeyError, ValueError, TypeError, EOFError, BadZipFile) as error:
        raise UserError(f"{path} is no dump of a skipped update ({type(error).__name__})") from None


def nonfinite_inputs(update: SkippedUpdate, index: int) -> list[str]:
    """Return a phrase for each input of a pack that is not finite (unknown sampling log-probs are NaN by design)."""
    pack = update.packs[index]
    arrays = {name: getattr(pack, name) for name in ("positive", "negative", "weight")}
    arrays |= {name: values[index] for name, values in update.logprobs().items()}
    counts = {name: int((~np.isfinite(values)).sum()) for name, values in arrays.items()}
    return [f"{name}: {count} of {len(arrays[name])} not finite" for name, count in counts.items() if count]


def _pack(arrays: dict[str, Any]) -> TreePack:
    return new_pack(**{name: int(values) if values.ndim == 0 else values for name, values in arrays.items()})
