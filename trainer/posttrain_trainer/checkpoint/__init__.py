"""Checkpoints: writing, verifying and reading them, the export that people load, and which of them stay."""
