"""The package as a user gets it: what the wheel holds and needs, what importing it drags in."""

import ast
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "deinfer_jax": ROOT / "deinfer_jax",
    "deinfer_kernels": ROOT / "kernels" / "deinfer_kernels",
    "reference_torch": ROOT / "reference_torch",
}

# Imports every module of the two packages, with `block` as if torch were absent; prints how many.
IMPORT_ALL = """
import importlib, importlib.util, pkgutil, sys
if "block" in sys.argv:
    sys.modules["torch"] = None  # importing it now raises
optional = {"deinfer_jax.evaluate.lm_eval"} if importlib.util.find_spec("lm_eval") is None else ()
count = 0
for package in ("deinfer_jax", "deinfer_kernels"):
    module = importlib.import_module(package)
    for info in pkgutil.walk_packages(module.__path__, package + "."):
        if not info.name.endswith("__main__") and info.name not in optional:
            importlib.import_module(info.name)
            count += 1
print(count)
"""


def _run(*command: object, cwd: Path, timeout: float = 120) -> str:
    """Run a command outside the project's folder, with nothing of the project on the path."""
    assert not cwd.is_relative_to(ROOT)
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=env | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the tree with the hatchling of this environment."""
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT]
    _run(*command, cwd=out)
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bin` of an environment with the wheel, which borrows the dependencies of ours."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "env", with_pip=False)
    scripts = folder / "env" / "bin"
    pip = [sys.executable, "-m", "pip", "--python", scripts / "python"]
    _run(*pip, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    # In a folder added by a .pth file others are ignored, so our own editable install stays out.
    site = sysconfig.get_path("purelib", vars={"base": str(folder / "env")})
    (Path(site) / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return scripts


def test_wheel_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")}
    tops = {name.partition("/")[0] for name in names}
    (dist_info,) = (top for top in tops if top.endswith(".dist-info"))
    assert tops == {*PACKAGES, dist_info}
    assert f"{dist_info}/licenses/LICENSE" in names


@pytest.mark.parametrize("package", PACKAGES)
def test_wheel_holds_every_file_of(package: str, wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    source = PACKAGES[package]
    expected = {
        f"{package}/{path.relative_to(source).as_posix()}"
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert f"{package}/py.typed" in names
    assert {name for name in names if name.startswith(f"{package}/")} == expected


@pytest.mark.parametrize("package", ["deinfer_jax", "deinfer_kernels"])
def test_installed_wheel_imports(package: str, installed: Path, tmp_path: Path) -> None:
    where = f"import {package}; print({package}.__file__)"
    file = _run(installed / "python", "-c", where, cwd=tmp_path)
    assert Path(file).is_relative_to(installed.parent)


def test_installed_wheel_has_the_command(installed: Path, tmp_path: Path) -> None:
    assert "usage: deinfer" in _run(installed / "deinfer", "--help", cwd=tmp_path)


def test_version_of_the_wheel_is_the_modules(installed: Path, tmp_path: Path) -> None:
    code = (
        "import deinfer_jax, importlib.metadata as m;"
        "print(deinfer_jax.__version__, m.version('deinfer-jax'))"
    )
    ours, theirs = _run(installed / "python", "-c", code, cwd=tmp_path).split()
    assert ours == theirs


def test_import_does_not_import_torch(installed: Path, tmp_path: Path) -> None:
    code = "import deinfer_jax, sys; print('torch' in sys.modules)"
    assert _run(installed / "python", "-c", code, cwd=tmp_path) == "False"


def test_every_module_imports_where_there_is_no_torch(installed: Path, tmp_path: Path) -> None:
    assert int(_run(installed / "python", "-c", IMPORT_ALL, "block", cwd=tmp_path)) > 0


@pytest.mark.full
@pytest.mark.timeout(800)
def test_real_install_needs_no_torch(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=True)
    scripts = tmp_path / "env" / "bin"
    _run(scripts / "python", "-m", "pip", "install", wheel, cwd=tmp_path, timeout=780)
    find = "import importlib.util as u; print(u.find_spec('torch'))"
    assert _run(scripts / "python", "-c", find, cwd=tmp_path) == "None"
    assert int(_run(scripts / "python", "-c", IMPORT_ALL, cwd=tmp_path)) > 0
    assert "usage: deinfer" in _run(scripts / "deinfer", "--help", cwd=tmp_path)


def _module_file(module: str) -> Path | None:
    """File of one of our modules; None for another's, and for what is no module."""
    top, _, rest = module.partition(".")
    if top not in PACKAGES:
        return None
    path = PACKAGES[top].joinpath(*rest.split(".")) if rest else PACKAGES[top]
    candidates = (path.with_suffix(".py"), path / "__init__.py")
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def _is_type_checking(node: ast.If) -> bool:
    return ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _walk_executed(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below `node`, in functions too, but what only type checkers read."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and _is_type_checking(child):
            children: list[ast.AST] = list(child.orelse)
        else:
            children = [child]
        for each in children:
            yield each
            yield from _walk_executed(each)


def _imports(module: str, file: Path) -> Iterator[str]:
    """Absolute names of the modules that a module imports.

    `from a.b import c` is a.b.c where that is a module of ours and a.b otherwise. The packages
    around a module do not count: Python runs deinfer_jax/__init__.py whatever one imports, and
    that one does import jax.
    """
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    for node in _walk_executed(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *filter(None, [node.module])])
            for alias in node.names:
                below = f"{source}.{alias.name}"
                yield below if _module_file(below) else source


@pytest.mark.parametrize(
    "module",
    [
        "deinfer_jax.engine.scheduler",
        "deinfer_jax.cache.allocator",
        "deinfer_jax.cache.preparation",
    ],
)
def test_host_code_imports_no_jax(module: str) -> None:
    chains = {module: [module]}
    todo = [module]
    while todo:
        current = todo.pop()
        file = _module_file(current)
        assert file is not None, f"no module {current}"
        for name in _imports(current, file):
            chain = [*chains[current], name]
            assert name.partition(".")[0] not in ("jax", "jaxlib", "flax"), " -> ".join(chain)
            if name not in chains and _module_file(name):
                chains[name] = chain
                todo.append(name)
