"""How good a model is: perplexity on a text."""
