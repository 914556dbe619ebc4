"""The dashboard at `/`: static files that talk to the service's own HTTP API, as any other client does."""
