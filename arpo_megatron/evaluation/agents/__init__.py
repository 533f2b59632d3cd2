"""Agents that answer questions: a checkpoint in an engine, a server that speaks OpenAI's format, or an oracle."""
