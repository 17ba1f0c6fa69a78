"""Public code beside ours: the same model, samples and batches, in turn, by processor seconds and peak memory.

Nothing of the public code is here: adapters import it from checkouts that the user has (`python -m benchmarks.peers`).
"""
