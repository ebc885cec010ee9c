"""What makes two runs comparable, and dtypes by name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

__all__ = ["DTYPES", "attention_kernels", "make_comparable"]

DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}


@contextmanager
def attention_kernels(dtype: torch.dtype) -> Iterator[None]:
    """In float32 and float64, attention by plain products and a softmax: fused kernels on a GPU may
    cut float32 into pieces of TensorFloat-32. In half precision whatever torch takes."""
    if dtype in (torch.float32, torch.float64):
        with sdpa_kernel(SDPBackend.MATH):
            yield
    else:
        yield


def make_comparable() -> None:
    """Deterministic operations, full float32 products (no TensorFloat-32) and full sums in products
    of bfloat16 and float16. Before the first use of a GPU."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
