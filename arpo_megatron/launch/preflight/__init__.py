"""Checks before GPU hours are spent: `arpo doctor`, and the first step of every submitted job.

| module | content |
| --- | --- |
| `check` | the result of a check |
| `machine` | the checks of one machine |
| `gpu_health` | faults that its GPUs have reported |
| `exposure` | hosts that reach a job's ports |
| `allreduce` | whether the ranks of a job reach each other |
| `bandwidth` | speeds of the network and of the disk |
| `image` | the check of a container image |

`cluster/preflight.py` runs them on the nodes of a job.
May import `plan` and the layers below it, and `tools_sandbox.check`; not `trainer`.
"""
