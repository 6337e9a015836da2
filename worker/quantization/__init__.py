"""Quantised checkpoints: what config.json says of them, and how each format's tensors become canonical weights."""
