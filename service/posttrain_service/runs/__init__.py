"""What is on disk: a run's records, logs and checkpoints, and uploaded bytes. No database, no HTTP."""
