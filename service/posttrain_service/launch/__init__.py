"""Starting runs, seeing them, stopping them: the backend protocol, the local backend and its shim, the trainer's tools."""
