"""A job on a Slurm cluster: profile and recipe -> one allocation, whose role supervisor starts every role as a step.

| file | what |
| --- | --- |
| `profile.py` | what a cluster wants to be told (slurm/clusters/*.yaml) |
| `code.py` | the code that runs is the code that was submitted |
| `submit.py` | all of that -> nemo-run -> sbatch |
| `submissions.py` | what was submitted of a run, and what is still in the queue |
| `job.py` | the first process of the allocation: doctor, preparation, training, the way a job ends |
| `site.py` | a role becomes an `srun` of that allocation |
| `rank.py` | a trainer rank learns from Slurm who it is |
| `commands.py` | `arpo status`, `logs`, `cancel`, `resume` |
| `over_ssh.py` | the same commands on a login node that is elsewhere |
| `slurm.py` | the few Slurm commands that all of these use |
"""
