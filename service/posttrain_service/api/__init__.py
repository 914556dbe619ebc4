"""The HTTP faces: thin routes over the use cases in `work`. The only place that knows statuses, headers and streams."""
