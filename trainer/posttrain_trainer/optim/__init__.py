"""Optimizers with their parameter groups, and the learning rate as a pure function of the step."""
