"""PyTorch reference: the same decomposed models, written a second time to check the first.

Here live the PyTorch model, its paged cache, its tensor parallelism over ``torch.distributed`` and
its decode loop with optional CUDA graphs. All of it reads the canonical checkpoint on its own and
shares no code with ``deinfer_jax`` or ``deinfer_kernels``: nothing here imports them, and they
import nothing from here. The two meet as processes that exchange files (``deinfer crosscheck``).
Needs the extra ``torch``.
"""
