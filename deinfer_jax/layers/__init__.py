"""Maths of the blocks: linears (dense and low-rank), norm, RoPE, attention, MLP, embedding and
head."""
