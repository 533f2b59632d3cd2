"""A model as a judge of answers: its prompts, a cache of its replies, and a report on its reliability.

May import `rewards.math`, `rewards.qa`, `tasks`, `config`, `utils` and `errors`.
"""
