"""GPU kernels of DeInfer-JAX, one folder an op.

Each folder holds the same files: ``api.py`` validates and dispatches, ``reference.py`` is plain jnp
and the definition of the op, ``mosaic_gpu.py`` (where a kernel exists) is the Pallas kernel for
Hopper and newer, ``shapes.py`` names real shapes.
"""

from deinfer_kernels.absorbed_attention import api as _absorbed_attention
from deinfer_kernels.absorbed_attention.api import absorbed_attention as absorbed_attention
from deinfer_kernels.dispatch import Implementation as Implementation
from deinfer_kernels.dispatch import check_implementation
from deinfer_kernels.latent_reconstruct import api as _latent_reconstruct
from deinfer_kernels.latent_reconstruct.api import latent_reconstruct as latent_reconstruct
from deinfer_kernels.paged_attention import api as _paged_attention
from deinfer_kernels.paged_attention.api import paged_attention as paged_attention
from deinfer_kernels.paged_compact import api as _paged_compact
from deinfer_kernels.paged_compact.api import paged_compact as paged_compact

OPS = {
    "absorbed_attention": _absorbed_attention.IMPLEMENTATIONS,
    "latent_reconstruct": _latent_reconstruct.IMPLEMENTATIONS,
    "paged_attention": _paged_attention.IMPLEMENTATIONS,
    "paged_compact": _paged_compact.IMPLEMENTATIONS,
}


def check_available(implementation: str | None) -> None:
    """Raises unless every op has ``implementation``, so that it is known before anything runs.

    Raises:
        ValueError: the name is unknown.
        NotImplementedError: an op does not have it.
    """
    check_implementation(implementation)
    for op, implementations in OPS.items():
        if implementation is not None and implementation not in implementations:
            raise NotImplementedError(
                f"implementation: {op} has {', '.join(map(repr, implementations))}, "
                f"got {implementation!r}"
            )
