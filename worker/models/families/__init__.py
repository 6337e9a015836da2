"""Families of models: how each one's config.json describes its decoder. One file a family, one function an architecture."""
