"""What must never be in the source: NVLink multicast, and paths of one machine."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
THIS = Path(__file__).resolve().relative_to(ROOT)

# Multicast can take the GPUs of a whole host out of service, and the switches of NCCL, PyTorch and
# NVSHMEM do not reach what XLA does. Our own collectives use peer pointers and plain semaphores.
MULTICAST = re.compile(
    r"multimem_(store|load_reduce|red)|multicast_ref|semaphore_signal_multicast"
    r"|(all_gather|reduce_scatter)_mgpu"
)
MACHINE_PATH = re.compile(r"(?<![\w.~}\])-])/(work|root|tmp|home|Users)/")


def _text_files() -> dict[Path, str]:
    """All files of the project that are text: tracked, or new and not ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode:
        pytest.skip(f"git lists no files here: {listed.stderr.strip()}")
    texts = {}
    for name in filter(None, listed.stdout.split("\0")):
        try:
            texts[Path(name)] = (ROOT / name).read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError, IsADirectoryError):
            continue  # binary, or deleted and not yet committed, or a link to a folder
    return texts


def _hits(pattern: re.Pattern[str], texts: dict[Path, str]) -> list[str]:
    return [
        f"{path}:{number}: {line.strip()}"
        for path, text in texts.items()
        for number, line in enumerate(text.splitlines(), start=1)
        if pattern.search(line)
    ]


@pytest.mark.parametrize("folder", ["deinfer_jax", "kernels", "reference_torch", "bench"])
def test_source_never_uses_nvlink_multicast(folder: str) -> None:
    # Without git: what is ignored could still be run.
    paths = sorted((ROOT / folder).rglob("*.py"))
    texts = {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in paths}
    assert _hits(MULTICAST, texts) == []


def test_no_file_names_a_path_of_one_machine() -> None:
    texts = _text_files()
    assert THIS in texts
    assert _hits(MACHINE_PATH, texts) == []


# The names are put together here, or this file would be a hit itself.
@pytest.mark.parametrize("line", ["plgpu.multi" + "cast_ref(x)", "import all_gather" + "_mgpu"])
def test_multicast_pattern_matches(line: str) -> None:
    assert MULTICAST.search(line)


@pytest.mark.parametrize("top", ["work", "root", "tmp", "home"])
def test_machine_path_pattern_matches(top: str) -> None:
    assert MACHINE_PATH.search(f'open("/{top}/model/config.json")')
    assert not MACHINE_PATH.search(f"https://example.org/{top}/model")
