"""Inference for low-rank decomposed (and dense) language models in JAX."""

from deinfer_jax.checkpoint.inspect import Decomposition as Decomposition
from deinfer_jax.checkpoint.inspect import Inspection as Inspection
from deinfer_jax.checkpoint.inspect import inspect as inspect
from deinfer_jax.config import LowRank as LowRank
from deinfer_jax.config import ModelConfig as ModelConfig
from deinfer_jax.config import RopeConfig as RopeConfig
from deinfer_jax.config import Slice as Slice

# The function takes the name of the package that it lives in; `deinfer_jax.decompose.run` is still
# imported by that name.
from deinfer_jax.decompose.report import ModuleReport as ModuleReport
from deinfer_jax.decompose.report import Report as Report
from deinfer_jax.decompose.run import decompose as decompose
from deinfer_jax.engine.completion import Completion as Completion
from deinfer_jax.engine.completion import Increment as Increment
from deinfer_jax.engine.completion import Timing as Timing
from deinfer_jax.engine.engine import Engine as Engine
from deinfer_jax.engine.generate import generate as generate
from deinfer_jax.engine.llm import LLM as LLM
from deinfer_jax.engine.load import load as load
from deinfer_jax.engine.memory import OutOfDeviceMemory as OutOfDeviceMemory
from deinfer_jax.engine.request import TokenLogprob as TokenLogprob
from deinfer_jax.engine.runner import RecompilationError as RecompilationError
from deinfer_jax.evaluate.crosscheck import CrosscheckReport as CrosscheckReport
from deinfer_jax.evaluate.crosscheck import crosscheck as crosscheck
from deinfer_jax.evaluate.perplexity import Perplexity as Perplexity
from deinfer_jax.evaluate.perplexity import perplexity as perplexity
from deinfer_jax.parallel.strategies import WholeResidual as WholeResidual
from deinfer_jax.parallel.strategies import register_strategy as register_strategy
from deinfer_jax.parallel.strategy import Split as Split
from deinfer_jax.parallel.strategy import Strategy as Strategy
from deinfer_jax.planner import Link as Link
from deinfer_jax.planner import Plan as Plan
from deinfer_jax.planner import plan as plan

__version__ = "0.1.0"
