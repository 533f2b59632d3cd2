"""Methods: branch policies, advantage estimators, policy losses, replay buffers, and the credit of each token.

May import `rewards`, `tasks`, `registry`, `config`, `tree` and `errors`, never an engine or a trainer; torch only
inside functions.
"""
