"""Parts that other servers load into their own process."""
