"""Losses: pure functions of hidden states or logits and labels that return sums and counts."""
