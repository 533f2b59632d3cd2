"""Methods: branch policies, advantage estimators, policy losses, replay buffers, and the credit of each token.

Pure functions of trees and numbers. This package may import `rewards`, `tasks`, `config` and `registry`, never an
engine or a trainer; torch is not imported at module level.
"""
