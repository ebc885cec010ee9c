"""GPU kernels of DeInfer-JAX, one folder an op.

Each folder holds the same files: ``api.py`` validates and dispatches, ``reference.py`` is plain jnp
and the definition of the op, ``mosaic_gpu.py`` (where a kernel exists) is the Pallas kernel for
Hopper and newer, ``shapes.py`` names real shapes.
"""

from deinfer_kernels.dispatch import Implementation as Implementation
from deinfer_kernels.paged_attention.api import paged_attention as paged_attention
