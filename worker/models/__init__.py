"""Models: one decoder that is described by data, its layers, and how config.json becomes that description."""
