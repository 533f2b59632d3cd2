"""Everything that knows SGLang: starting servers, requests to them, weight pushes, and the code inside a server.

May import `tasks`, `hardware`, `config`, `utils`, `tree`, `errors` and `tools_sandbox.utils`; no other package imports
SGLang.
"""
