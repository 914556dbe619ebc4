"""What a run tells while it goes on: measuring steps, and the sinks that points and events go to."""
