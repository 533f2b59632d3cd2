"""The tool service: isolated Python, search, browse and plug-in tools behind HTTP, with a server and clients.

Start it with ``python -m tools_sandbox --host 127.0.0.1 --port 0`` and call it through `tools_sandbox.client`.
The package needs nothing of the trainer. This module imports nothing: the processes that run foreign code import the
package too, and everything it loads would be paid for, and exposed, in every call.
"""
