"""Evaluation of models on benchmarks and held-out tasks: answers from an engine or a server, scores, and tables.

May import `launch` and the layers below it, and `tools_sandbox.client` and `.config`; not `bench`, `studies` or
`cluster`.
"""
