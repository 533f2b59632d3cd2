"""Agents that answer questions: a checkpoint in an engine, a server that speaks OpenAI's format, or an oracle.

May import `journal`, `prompts`, `questions` and `response` of `evaluation`, `rollout` and the layers below it, and
`tools_sandbox.client`.
"""
