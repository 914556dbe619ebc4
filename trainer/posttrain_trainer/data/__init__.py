"""From a file of rows to micro-batches: read, render, mask, cache, pack, batch, step by step."""
