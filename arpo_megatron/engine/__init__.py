"""Everything that knows SGLang: starting servers, requests to them, weight pushes, and the code inside a server.

It may import `hardware`, `config`, `utils`, `tree` and `errors`; no other package imports SGLang.
"""
