"""Small checks before GPU hours are spent: `arpo doctor`, and the first step of every submitted job.

`local.py` is the command. `finding.py` is what a check answers; `machine.py` looks at one machine, `slurm.py` at a
cluster from its login node.
`node.py` runs on every node of a job, where the nodes also meet (`meeting.py`), and `job.py` is what reads it there.
"""
