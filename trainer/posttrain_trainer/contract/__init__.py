"""What service and trainer agree on: arguments, rows, records, the run directory, errors, locks, processes.

Pure pydantic and standard library. `errors`, `rundir`, `locks` and `proc` are standard library alone, since the shim
loads them. The service enters the trainer here and nowhere else. This package re-exports nothing.
"""

CONTRACT_VERSION = 1
"""Raised when a record, file name or argument changes its meaning; the service refuses a trainer of another version."""
