"""Evaluation of models on benchmarks and held-out tasks: answers from an engine or a server, scores, and tables.

It uses the run's engine, tools and rewards (`launch`, `rollout`, `rewards`, `tools_sandbox.client` and `.config`), and
does not import `bench` or `studies`.
"""
