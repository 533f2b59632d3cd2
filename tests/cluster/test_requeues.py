"""Jobs that Slurm or their user ends: they save, are requeued or continued by another job, and continue exactly."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.onebox import LIVE, Job, Onebox
from tests.cluster.training import EXACT, Undisturbed, failed, is_whole, start, trains

pytestmark = [pytest.mark.timeout(1800), pytest.mark.slurm_campaign]


def test_cancelled_job_leaves_no_process(box: Onebox, calm: Undisturbed) -> None:
    job = start(box, calm, "cancelled")
    trains(job)
    assert "cancelled job" in box.arpo("cancel", str(job.run))
    assert job.end() == "CANCELLED"
    assert job.nothing_is_left()
    assert "no waiting or running job" in box.arpo("cancel", str(job.run), ok=False)
    # A supervisor removes it unless it is killed, and these nodes share /tmp: so this is left by a KILL.
    left = Path(f"/tmp/arpo-{job.id}")
    left.mkdir(exist_ok=True)
    is_whole(box.resume(job), calm)
    assert not left.exists(), "the next job removes what is left on its nodes"


def preempts(box: Onebox, job: Job, calm: Undisturbed) -> None:
    """Take the nodes of a job for an urgent one, and check that the job saves before and completes after it."""
    urgent = box.slurm("sbatch", "--parsable", "-p", "urgent", "-N2", "--exclusive", "-o/dev/null", "--wrap=sleep 3")
    job.wait_for("requeue", lambda: job.shown("Restarts") == "1")
    assert "asked to end: " in job.log()
    is_whole(job, calm)
    assert job.state(urgent.strip()) == "COMPLETED"


def test_preempted_job_saves_and_is_requeued(box: Onebox, calm: Undisturbed) -> None:
    job = start(box, calm, "preempted")
    trains(job)
    preempts(box, job, calm)


@pytest.fixture
def plain_box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Onebox]:
    """A Slurm that sends TERM to preempted jobs, as most do.

    Without cgroups, which need root of a whole machine. Like with cgroups, the steps' sruns get no signal.
    """
    slurm = Onebox.start(tmp_path_factory.mktemp("plain"), PROCTRACK="pgid", WARNING="")
    yield slurm
    slurm.stop()


def test_job_preempted_with_term_saves_in_its_grace_time(plain_box: Onebox, calm: Undisturbed) -> None:
    job = start(plain_box, calm, "term")
    trains(job)
    preempts(plain_box, job, calm)
    assert re.search(r"Slurm's TERM, \d+ s before the end: the trainer saves and ends", job.log())


def test_job_is_requeued_even_if_it_cannot_save(box: Onebox, calm: Undisturbed) -> None:
    """With proctrack/linuxproc, TERM reaches all processes, including the steps' sruns."""
    job = start(box, calm, "all-term")
    trains(job)
    box.slurm("scancel", "--signal=TERM", job.id)
    job.wait_for("requeue", lambda: job.shown("Restarts") == "1")
    is_whole(job, calm)


@pytest.mark.parametrize("requeue", [True, False])
def test_job_without_requeue_has_saved(box: Onebox, calm: Undisturbed, requeue: bool) -> None:
    """The profile has requeue=false, or Slurm refuses a requeue."""
    name = "refused" if requeue else "forbidden"
    job = start(box, calm, name, profile=box.profile(name, requeue=requeue))
    if requeue:
        box.slurm("scontrol", "update", f"JobId={job.id}", "Requeue=0")
    assert job.shown("Requeue") == "0"
    trains(job)
    box.slurm("scancel", "--signal=USR1", job.id)
    output = failed(job, "75:0")
    assert "`arpo resume` continues the run" in output and "Traceback" not in output
    assert ("scontrol requeue" in output) is requeue
    is_whole(box.resume(job), calm)


def test_training_continues_exactly_after_the_time_limit(box: Onebox, calm: Undisturbed) -> None:
    """One to two minutes after its start, a job is continued by the next one of its chain, or is requeued.

    Both run at the same time, on one node each. Their training would take longer than the time limit.
    """
    endless, profile = 100_000, box.profile("short", time="00:03:00", signal_s=60)
    chain = start(box, calm, "chain", updates=endless, profile=profile, nodes=1, chain=2)
    alone = start(box, calm, "alone", updates=endless, profile=profile, nodes=1)
    first, second = chain.ids
    chain.wait_for("the end of the first link", lambda: chain.state(first) not in LIVE, dead=True)
    assert chain.state(first) == "COMPLETED", str(chain)
    assert f"saved; job {second} continues the run" in chain.log()
    alone.wait_for("requeue", lambda: alone.shown("Restarts") == "1")
    assert alone.log().count("Slurm's warning: the trainer saves and ends") == 1
    # All rows at the requeue are of the first run.
    done = {job.run.name: len(job.rows("sft_metrics.jsonl")) for job in (chain, alone)}
    for job, last in ((chain, second), (alone, alone.id)):
        more = done[job.run.name] + 10
        job.wait_for("more", lambda job=job, more=more: len(job.rows("sft_metrics.jsonl")) >= more, dead=True)
        assert job.state(last) in LIVE
        box.arpo("cancel", str(job.run))
        assert job.end(last) == "CANCELLED"
        assert job.nothing_is_left()
    rows = {job.run.name: job.rows("sft_metrics.jsonl") for job in (chain, alone)}
    whole = start(box, calm, "endless", updates=endless)
    wanted = max(len(each) for each in rows.values())
    whole.wait_for("as many updates", lambda: len(whole.rows("sft_metrics.jsonl")) >= wanted)
    box.arpo("cancel", str(whole.run))
    assert whole.end() == "CANCELLED"
    undisturbed = whole.rows("sft_metrics.jsonl")
    for each in rows.values():
        assert [row["step"] for row in each] == list(range(1, len(each) + 1))
        assert [[row[name] for name in EXACT] for row in each] == [
            [row[name] for name in EXACT] for row in undisturbed[: len(each)]
        ]


def test_unneeded_jobs_of_a_chain_are_cancelled(box: Onebox, calm: Undisturbed) -> None:
    job = start(box, calm, "unneeded", chain=3)
    is_whole(job, calm)
    assert [job.end(link) for link in job.ids] == ["COMPLETED", "CANCELLED", "CANCELLED"]
