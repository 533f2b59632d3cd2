"""Measurements for a GPU machine that can be had for minutes at a time: resumable, in order of value, tried dry."""
