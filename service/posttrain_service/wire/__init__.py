"""Requests and responses of the faces as schemas, and the pure translations to and from them. No HTTP, no I/O."""
