"""The command `posttrain`. Everything but `serve` and `openapi` is a client of the HTTP API."""
