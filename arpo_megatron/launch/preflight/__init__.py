"""Checks before GPU hours are spent: `arpo doctor`, and the first step of every submitted job.

`check.py` has the result of a check, `machine.py` the checks of one machine, `allreduce.py` the check of the network.
`cluster/preflight.py` runs them on the nodes of a job.
May import `plan` and the layers below it, and `tools_sandbox.check`; not `trainer`.
"""
