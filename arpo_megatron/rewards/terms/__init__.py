"""What may be added to a reward: one file a method or kind of measure; each gives a number per trajectory."""
