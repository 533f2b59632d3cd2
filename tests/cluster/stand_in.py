"""For tests of what is said to Slurm, where a real one is not needed or could not be made to do it."""

from arpo_megatron.cluster.code_snapshot import Code
from arpo_megatron.cluster.profile import ClusterProfile, check_profile
from arpo_megatron.cluster.submit import Submission
from arpo_megatron.errors import UserError

PLAIN = {"account": "research", "runs": "/shared/runs", "gpus_per_node": 8}


def profile(**values: object) -> ClusterProfile:
    return check_profile({**PLAIN, **values}, "here.yaml")


class Queue:
    """A Slurm that takes so many jobs and refuses the next, as one with a limit on submitted jobs does.

    (The real ones of the other files would need accounting for such a limit.)
    """

    def __init__(self, takes: int, *, cancels: bool = True) -> None:
        self.takes, self.cancels = takes, cancels
        self.jobs: dict[str, str] = {}
        self.name = ""
        self.asked: list[str] = []
        self.updates: list[tuple[str, ...]] = []

    def send(self, submission: Submission, code: Code) -> str:
        if len(self.jobs) == self.takes:
            raise UserError("sbatch refused the job: QOSMaxSubmitJobPerUserLimit")
        self.jobs[job := str(4711 + len(self.jobs))], self.name = "PENDING", submission.job_name
        return job

    def call(self, *words: str, check: bool = True, ignore: str | None = None) -> str:
        self.asked.append(words[0])
        if words[0] == "squeue":
            known = [job for job in words[-1].split(",") if job in self.jobs]
            return "".join(f"{job}|{self.jobs[job]}|{self.name}\n" for job in known)
        if words[:2] == ("scontrol", "update"):
            self.updates.append(words[2:])
        if words[0] == "scancel":
            if not self.cancels:
                raise UserError("scancel did not answer for 30 s")
            self.jobs[words[1]] = "CANCELLED"
        return f"JobState={self.jobs[words[-1]]} " if words[:4] == ("scontrol", "-o", "show", "job") else ""
