"""Jobs on a Slurm cluster: submission, and the supervisor that starts every process as a step of the allocation.

May import `launch`, `plan`, the layers below, and `tools_sandbox.config`; only `cli` and `bench` may import it.

| module | content |
| --- | --- |
| `profile`, `profiles/` | the values that describe a cluster; `profiles` is a link to slurm/clusters |
| `code_snapshot` | the code of the working tree, packed with the job |
| `submit` | recipe, profile and code -> nemo-run -> sbatch |
| `files_before` | the files of a run before a submission |
| `packager` | the archive of the code that nemo-run sends with the job |
| `submit_run` | `arpo submit` as a Python function |
| `executor` | nemo-run's executor for a profile |
| `submission` | a job that is ready to be submitted |
| `dry_run` | the demands of a job on its cluster, for `arpo submit --dry-run` |
| `submissions` | the records of a run's submissions, and its jobs in the queue |
| `commands` | `arpo eval` and `arpo export` as jobs of their own |
| `supervise` | the first process of the allocation: checks, preparation, training, and how a job ends |
| `mounts` | paths on the nodes and in the container |
| `measure`, `measure_node` | speeds of a cluster, measured by a job of their own and kept in the profile |
| `restarts` | whether a failed job starts again, and without which node |
| `preflight`, `preflight_node` | the checks of all nodes, as the first step of a job |
| `prepare` | the preparation, as a step |
| `backend` | srun commands for the processes of a job |
| `executor_tasks` | a job that the tasks of a nemo-run executor start together, and its requeues |
| `rank` | a trainer rank's environment from Slurm's variables |
| `runs` | `arpo status`, `logs`, `health` and `cancel` |
| `ssh` | the same commands on a login node that is reached over SSH |
| `ssh_page` | a page of the login node at a local address, for `arpo view` |
| `slurm`, `slurm_checks` | Slurm's commands, and the checks of a cluster from its login node |
"""
