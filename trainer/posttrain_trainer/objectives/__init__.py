"""Objectives: what one micro-batch is asked for. The loop says when, an objective says what."""
