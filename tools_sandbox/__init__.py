"""The tool service: isolated Python, local search and a result cache behind HTTP, with its own server and client.

Start it with ``python -m tools_sandbox --host 127.0.0.1 --port 0`` and talk to it through `tools_sandbox.client`.
The package needs nothing of the trainer, and this module imports nothing: the process that runs foreign code
imports the package too, and whatever it loads is paid for (and exposed) in every call.
"""
