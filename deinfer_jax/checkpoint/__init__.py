"""Reading checkpoints: Hugging Face safetensors directories and GGUF files behind one interface."""

from deinfer_jax.checkpoint.source import Checkpoint as Checkpoint
from deinfer_jax.checkpoint.source import open_checkpoint as open_checkpoint
from deinfer_jax.checkpoint.source import tokenizer_sha256 as tokenizer_sha256
