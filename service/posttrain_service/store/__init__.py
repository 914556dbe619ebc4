"""Rows: the only place with SQL. Everything goes through `store.store.Store`; one guarded UPDATE moves a job."""
