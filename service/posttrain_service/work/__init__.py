"""Use cases and the three loops. HTTP shapes stay in `wire`, SQL in `store`, processes in `launch`."""
