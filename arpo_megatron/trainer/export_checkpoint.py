"""Export a checkpoint as a Hugging Face directory, on all ranks.

Run as `python -m arpo_megatron.trainer.export_checkpoint RUN_DIR STEP|newest OUT`.
"""

import sys
from pathlib import Path

from arpo_megatron.actor.checkpoint import CheckpointStore, find_damage
from arpo_megatron.errors import UserError
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.trainer.setup import ActorSession, actor_session
from arpo_megatron.utils.atomic import explain_disk_errors
from arpo_megatron.utils.rank_main import rank_main
from arpo_megatron.weights.export import export_hf


def load_checkpoint(session: ActorSession, step: str) -> None:
    """Load the checkpoint of a step, or the newest whole one.

    Raises:
        UserError: there is none, or that step's is damaged.
    """
    if step == "newest":
        if session.load_newest() is None:
            raise UserError(f"{session.directory.path} has no checkpoint")
        return
    path = session.checkpoints.root / f"step_{step}"
    if phrases := find_damage(path):
        raise UserError(f"{path} cannot be used: {phrases[0]}")
    session.actor.load(CheckpointStore.actor_directory(path))


@rank_main
def main() -> None:
    """Export the checkpoint that the command line names; every rank runs this."""
    run, step, out = RunDirectory(Path(sys.argv[1])), sys.argv[2], Path(sys.argv[3])
    with actor_session(run, "train", training=False) as session:
        load_checkpoint(session, step)
        with explain_disk_errors(out, "make room and give the command again"):
            export_hf(session.actor.chunks, session.actor.spec, session.start, out)


if __name__ == "__main__":
    main()
