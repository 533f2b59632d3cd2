"""Benchmarks, for `arpo bench`: each prints its progress to standard error and returns figures for one JSON line."""
