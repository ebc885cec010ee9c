"""Keys or values of cached tokens, rebuilt from their latents."""
