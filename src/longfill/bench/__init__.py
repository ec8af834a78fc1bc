"""Measurements: each kernel against this machine's ceilings, and prefill against other engines."""
