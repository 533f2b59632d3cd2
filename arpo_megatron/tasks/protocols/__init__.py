"""Call protocols: how the policy writes a tool call, and how its result is inserted.

`base` has the interface, `hermes` one protocol, `tasks.tags` ARPO's, and `engine.template_protocol` that of a model's
chat template. May import the rest of `tasks`, `registry`, `config`, `utils` and `errors`.
"""
