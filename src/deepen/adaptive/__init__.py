"""Depth that is chosen: by a search over programs."""
