"""Policy and programs: the scheduler (host Python), the static programs it dispatches, the sampler,
``LLM`` and ``generate``."""
