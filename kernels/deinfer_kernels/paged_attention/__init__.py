"""Decode attention over a paged cache of full K and V."""
