"""Decode attention over full keys and latent values, without rebuilding the values."""
