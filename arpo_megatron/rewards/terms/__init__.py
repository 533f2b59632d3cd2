"""Terms that may be added to a reward: a value per trajectory, one file per method."""
