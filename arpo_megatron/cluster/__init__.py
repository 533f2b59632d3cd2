"""A job on a Slurm cluster: profile and recipe -> one allocation, whose role supervisor starts every role as a step.

| file | what |
| --- | --- |
| `cli.py` | the commands: `arpo submit`, `status`, `logs`, `cancel`, `resume`, `doctor` |
| `profile.py` | what a cluster wants to be told (slurm/clusters/*.yaml) |
| `code.py` | the code that runs is the code that was submitted |
| `submit.py` | all of that -> nemo-run -> sbatch |
| `submissions.py` | what was submitted of a run, and what is still in the queue |
| `job.py` | the first process of the allocation: doctor, preparation, training, the way a job ends |
| `prepare.py` | the preparation as a step, where the packages are |
| `backend.py` | a role becomes an `srun` of that allocation |
| `rank.py` | a trainer rank learns from Slurm who it is |
| `commands.py` | what `arpo status`, `logs`, `health` and `cancel` do |
| `over_ssh.py` | the same commands on a login node that is elsewhere |
| `slurm.py` | the few Slurm commands that all of these use |
"""
