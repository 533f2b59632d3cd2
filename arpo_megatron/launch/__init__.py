"""The processes of a job: where they run, how they are supervised, and the phases of a job on one machine.

May import `plan` and the layers below it, and of `tools_sandbox` the config, the isolation check and `utils`.
"""
