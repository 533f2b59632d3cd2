"""One step of RL: rollouts, scores, batches, updates, pushes, and what a checkpoint and the metrics hold.

May import the packages below it: rollout, actor, weights, monitor, jobs, engine, packing, algorithms, rewards, tasks.
"""
