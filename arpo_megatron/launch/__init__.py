"""The processes of a job: where they run, how they are supervised, and the phases of a job on one machine.

May import `plan`, `trainer`, the packages below them, and `tools_sandbox` (its config, its isolation check, its
helpers).
"""
