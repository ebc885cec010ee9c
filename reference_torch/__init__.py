"""PyTorch reference: the same decomposed models, written a second time to check the first.

It reads the canonical checkpoint on its own and shares no code with ``deinfer_jax`` or
``deinfer_kernels``: nothing here imports them, and they import nothing from here. The two meet as
processes that exchange files (``deinfer crosscheck``). Needs the extra ``torch``.

To be read in this order:

    linear.py       a decomposed linear on several ranks: the paper's way, and its baseline
    pages.py        the paged cache, and how latents become keys and values again
    model.py        the Llama family
    strategies.py, shares.py, group.py      who has which part; the collectives
    session.py      prefill, decode, CUDA graphs, greedy continuations
    opening.py, config.py, checkpoint.py, loading.py, rope.py
    ranks.py        ranks as processes, watched
    probe.py, perturb.py, numerics.py       the other half of a cross-check

From Python::

    from reference_torch import Session, greedy, launch, load

    def work(group, path):                  # in a module that new processes can import
        model = load(path, group, max_context=512, strategy="low_rank")
        session = Session(model, batch=1, context=512, kv_cache="latent")
        return greedy(session, [[1, 5, 9]], 16, chunk=128).tokens.tolist()

    launch(work, 2, path)

From the command line: ``python -m reference_torch generate PATH 1 5 9 --ranks 2``.
"""

from reference_torch.group import Group as Group
from reference_torch.model import Model as Model
from reference_torch.numerics import make_comparable as make_comparable
from reference_torch.opening import load as load
from reference_torch.ranks import RankError as RankError
from reference_torch.ranks import launch as launch
from reference_torch.session import Session as Session
from reference_torch.session import greedy as greedy
