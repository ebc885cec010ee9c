"""What makes two runs comparable, and dtypes by name."""

from __future__ import annotations

import os

import torch

__all__ = ["DTYPES", "make_comparable"]

DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}


def make_comparable() -> None:
    """Deterministic operations, full float32 products (no TensorFloat-32) and full sums in products
    of bfloat16 and float16. Before the first use of a GPU."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
