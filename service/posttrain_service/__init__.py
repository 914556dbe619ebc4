"""The post-training service: HTTP API, queue, supervisor. Never loads torch."""

__version__ = "0.1.0"
