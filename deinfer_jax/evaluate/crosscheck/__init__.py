"""Cross-check of JAX against the PyTorch reference.

Two processes answer the same job, a checkpoint and token ids in a folder (``job``): the JAX side
(``jax_side``, with ``trace``) through the machinery that serves requests, and ``python -m
reference_torch probe``, which shares no code with it. A third, the caller's, starts them (``run``,
``sides``, ``processes``), compares what they wrote (``compare``), judges it (``verdict``) and tells
(``report``). Settings that make the runs comparable: ``flags``. Models without a checkpoint:
``variants``.
"""

from deinfer_jax.evaluate.crosscheck.report import CrosscheckReport as CrosscheckReport
from deinfer_jax.evaluate.crosscheck.run import crosscheck as crosscheck
