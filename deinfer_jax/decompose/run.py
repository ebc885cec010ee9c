"""``decompose``: from a dense checkpoint to a canonical low-rank one."""

from __future__ import annotations

import dataclasses
import logging
import resource
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from deinfer_jax.checkpoint.canonical import MODEL_DTYPES, CanonicalWriter, partial_of
from deinfer_jax.checkpoint.factors import bias_name, low_rank_of, u_name, v_name
from deinfer_jax.checkpoint.parameters import all_finite
from deinfer_jax.checkpoint.source import Checkpoint, open_checkpoint, tokenizer_sha256
from deinfer_jax.config_hf import low_rank_block
from deinfer_jax.decompose import allocation as allocations
from deinfer_jax.decompose.groups import Group, find_blocks, form_groups, is_in_layer, layer_of
from deinfer_jax.decompose.measure import CalibrationLike, Measurement, PathLike
from deinfer_jax.decompose.report import ModuleReport, Report
from deinfer_jax.decompose.spectra import SpectrumStore
from deinfer_jax.engine.llm import show_progress

__all__ = ["decompose"]

logger = logging.getLogger(__name__)


def decompose(
    src: PathLike,
    dst: PathLike,
    *,
    keep: float = 0.6,
    method: str = "fisher",
    ranks: Mapping[str, int] | None = None,
    allocation: str = "loss",
    multiple_of: int = 1,
    groups: str | Sequence[Sequence[str]] = "shared",
    calibration: CalibrationLike = None,
    calibration_tokens: int | None = None,
    label_samples: int = 1,
    seed: int = 0,
    dtype: str | None = None,
    spectra: PathLike | None = None,
    progress: bool | None = None,
) -> Report:
    """Decomposes all linears of a dense model's layers, W ≈ u v, and writes the canonical form.

    Works a layer at a time, but for a calibration that the model writes itself: for that it is
    loaded first, in float32, with a cache for 32 sequences. On the device are a layer or two, the
    embeddings and one window's activations and logits, all float32; on the host, besides, the
    residual stream of the calibration tokens (4 · tokens · D · (L + 2) bytes for ``fisher``,
    8 · tokens · D otherwise) and a layer's moments in float64. On disk, next to ``dst``, are until
    the end the decompositions of full rank, as large as the dense weights in float32, and a moment
    of each group, [n, n] float64 with n the smaller of out and in.

    An interrupted run goes on where it was when it is started again with the same arguments; until
    it is through, nothing at ``dst`` exists.

    Args:
        src: a dense checkpoint, as for :func:`deinfer_jax.load`.
        dst: the directory to make; must not exist.
        keep: parameters of factors (a shared v once) and of linears left dense over the dense
            parameters of the same linears; embeddings and head count in neither. Met within
            +0 / −0.5 %.
        method: ``"svd"`` knows the weights, ``"whitened"`` also the inputs (least output error),
            ``"fisher"`` also the gradients (least estimated loss).
        ranks: by module, or by group (``model.layers.0.self_attn.q_k_v``), in the place of ``keep``
            and ``allocation``; modules not named stay dense.
        allocation: ``"loss"``, singular directions by what they are worth a parameter, or
            ``"uniform"``, the same fraction of every group.
        multiple_of: ranks are multiples of it.
        groups: projections that share a first factor: ``"shared"`` ({q,k,v} and {gate,up}),
            ``"shared-kv"`` ({k,v} and {gate,up}), ``"separate"``, or short names by group.
        calibration: a text file, or several, which give equal parts, windows spread evenly over
            each; or token ids [windows, window]; None = the model writes its own, plain text and
            chats. Unused by ``svd``.
        calibration_tokens: how many, in windows of 512 (of the largest power of two that the
            model's context holds, where that is less), which must come out even; None = 8,192, or
            as many as the ids that are given.
        label_samples: of ``fisher``, label sequences drawn for each window of calibration. Each
            costs a pass backwards; docs/quality.md has what more of them bring.
        seed: of labels and of text that the model writes.
        dtype: of what is written, ``"float32"``, ``"bfloat16"`` or ``"float16"``; None = the
            checkpoint's.
        spectra: a folder to keep the decompositions of full rank in, so that another ``keep`` of
            the same model, method, groups and calibration needs no calibration again; None = they
            are deleted at the end.
        progress: bars; None = where stderr is a terminal.

    Returns:
        Ranks, errors, estimated loss and bytes of every module; also written to
        ``dst/report.json``.

    Raises:
        ValueError: an argument or the checkpoint is wrong, the calibration text is too short, or
            something is not finite (the module is named).
        FileExistsError: ``dst`` exists.
        OSError: it cannot be written, e.g. the disk is full; finished parts are kept.
    """
    checkpoint = open_checkpoint(src)
    config = checkpoint.config
    if config.low_rank:
        raise ValueError(f"{checkpoint.path}: expected a dense model, got a decomposed one")
    dst = Path(dst)
    if dst.exists():
        raise FileExistsError(f"{dst}: expected a directory to make, but this exists")
    folder = None if spectra is None else Path(spectra)
    if folder is not None:
        for taken in (dst, partial_of(dst)):
            if folder.resolve().is_relative_to(taken.resolve()):
                raise ValueError(f"spectra: expected a folder outside of {taken}, got {spectra}")
    keep = float(keep)
    all_groups = form_groups(find_blocks(config), groups)
    if ranks is None:
        allocations.check(all_groups, keep, allocation=allocation, multiple_of=multiple_of)
    else:
        ranks = {name: allocations.whole(f"ranks: {name}", rank) for name, rank in ranks.items()}
        allocations.explicit(all_groups, ranks)
    dtype = config.dtype if dtype is None else dtype
    if dtype not in MODEL_DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(MODEL_DTYPES)} or None, got {dtype!r}")
    measurement = Measurement(
        checkpoint,
        all_groups,
        method=method,
        calibration=calibration,
        calibration_tokens=calibration_tokens,
        label_samples=label_samples,
        seed=seed,
        progress=show_progress(progress),
    )
    options = {
        "keep": keep if ranks is None else None,
        "allocation": allocation if ranks is None else "explicit",
        "multiple_of": allocations.whole("multiple_of", multiple_of),
        "ranks": None if ranks is None else dict(ranks),
        "dtype": dtype,
    }
    with ExitStack() as stack:
        # The given folder first: if it is of something else, nothing else has begun.
        store = None if folder is None else SpectrumStore(folder, measurement.fingerprint)
        stack.callback(lambda: None if store is None else store.close())
        writer = stack.enter_context(CanonicalWriter(dst, measurement.fingerprint | options))
        if store is None:
            store = SpectrumStore(writer.partial / "spectra", measurement.fingerprint)
        description = measurement.take(store)
        chosen = _ranks(
            writer,
            store,
            all_groups,
            ranks,
            keep=keep,
            allocation=allocation,
            multiple_of=multiple_of,
        )
        started = time.perf_counter()
        modules = _write_layers(
            checkpoint,
            writer,
            store,
            dict(zip(all_groups, chosen, strict=True)),
            wanted=ranks or {},
            fisher=method == "fisher",
            dtype=dtype,
            progress=show_progress(progress),
        )
        store.close()  # it may lie in what publishing deletes
        report = Report(
            modules=tuple(modules),
            method=method,
            allocation=options["allocation"],
            groups=groups if isinstance(groups, str) else "+".join(map(_braced, groups)),
            keep_asked=options["keep"],
            keep=allocations.kept(all_groups, chosen),
            calibration=description,
            seconds=measurement.seconds | {"factors": time.perf_counter() - started},
            peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )
        tokenizer = _tokenizer(checkpoint)
        block = low_rank_block(
            low_rank_of(
                (group.modules, rank)
                for group, rank in zip(all_groups, chosen, strict=True)
                if rank is not None
            ),
            method=method,
            keep=report.keep if ranks is not None else keep,
            allocation=report.allocation,
            groups=report.groups,
            base_model=measurement.base_model,
            calibration=description,
            seed=seed,
            tokenizer_sha256=None if tokenizer is None else tokenizer_sha256(tokenizer),
        )
        hf_config = checkpoint.hf_config() | {"dtype": dtype, "low_rank": block}
        hf_config.pop("torch_dtype", None)
        writer.publish(
            hf_config,
            tokenizer,
            checkpoint.generation_config(),
            records={"report.json": report.to_json()},
        )
    logger.info("%s: keep %.4f, %d groups", dst, report.keep, len(all_groups))
    return report


def _ranks(
    writer: CanonicalWriter,
    store: SpectrumStore,
    groups: Sequence[Group],
    ranks: Mapping[str, int] | None,
    *,
    keep: float,
    allocation: str,
    multiple_of: int,
) -> list[int | None]:
    """The ranks, chosen once: layers that an interrupted run has finished have them already, and
    energies may have been measured anew since."""
    if writer.has_record("ranks"):
        return writer.read_record("ranks")
    if ranks is not None:
        chosen = allocations.explicit(groups, ranks)
    else:
        energies = [store.energies(group) for group in groups]
        chosen = allocations.allocate(
            groups, energies, keep, allocation=allocation, multiple_of=multiple_of
        )
    writer.write_record("ranks", chosen)
    return chosen


def _write_layers(
    checkpoint: Checkpoint,
    writer: CanonicalWriter,
    store: SpectrumStore,
    ranks: Mapping[Group, int | None],
    *,
    wanted: Mapping[str, int],
    fisher: bool,
    dtype: str,
    progress: bool,
) -> list[ModuleReport]:
    """Writes what lies outside of the layers, then layer by layer; finished ones are kept."""
    layers = range(checkpoint.config.num_layers)
    names: dict[int | None, list[str]] = {None: []} | {layer: [] for layer in layers}
    for name in checkpoint.shapes():
        names[layer_of(name) if is_in_layer(name) else None].append(name)
    if not writer.has("0-outer"):
        outer = {name: _cast(name, t, dtype) for name, t in checkpoint.tensors(names[None])}
        writer.write("0-outer", outer)
    reports: list[ModuleReport] = []
    for layer in tqdm(layers, desc="factors", unit="layer", disable=not progress):
        piece = f"layer-{layer}"
        if not writer.has(piece):
            dense = dict(checkpoint.tensors(names[layer]))
            tensors: dict[str, np.ndarray] = {}
            rows: list[dict[str, Any]] = []
            for group, rank in ranks.items():
                if group.layer != layer:
                    continue
                found, about = _group(group, rank, dense, store, wanted, fisher, dtype)
                tensors |= found
                rows += about
            tensors |= {name: _cast(name, tensor, dtype) for name, tensor in dense.items()}
            writer.write_record(piece, rows)  # before the piece, which says that all is there
            writer.write(piece, tensors)
        reports += [
            ModuleReport(**row | {"shape": tuple(row["shape"])})
            for row in writer.read_record(piece)
        ]
    return reports


def _group(
    group: Group,
    rank: int | None,
    dense: dict[str, np.ndarray],
    store: SpectrumStore,
    wanted: Mapping[str, int],
    fisher: bool,
    dtype: str,
) -> tuple[dict[str, np.ndarray], list[dict[str, Any]]]:
    """A group's tensors, whose weights and biases are taken out of ``dense``, and its report."""
    tensors: dict[str, np.ndarray] = {}
    note, tail = "", 0.0
    if rank is None:
        errors: list[float | None] = [0.0] * len(group.modules)
        asked = wanted.get(group.name, wanted.get(group.modules[0]))
        note = "" if asked is None else f"dense: rank {asked} is above break-even"
    else:
        known = store.read(group)
        tail = known.spectrum.tail(rank)
        weights = [dense[f"{module}.weight"].astype(np.float64) for module in group.modules]
        u, v = known.spectrum.factors(rank)
        tensors[v_name(group.modules)] = _cast(v_name(group.modules), v, dtype)
        ends = np.cumsum(group.outputs)
        for module, end, width in zip(group.modules, ends, group.outputs, strict=True):
            tensors[u_name(module)] = _cast(u_name(module), u[end - width : end], dtype)
            del dense[f"{module}.weight"]
            if f"{module}.bias" in dense:
                bias = dense.pop(f"{module}.bias")
                tensors[bias_name(module)] = _cast(bias_name(module), bias, dtype)
        stored = np.concatenate([tensors[u_name(module)] for module in group.modules])
        errors = known.relative_errors(
            weights, stored.astype(np.float64), tensors[v_name(group.modules)].astype(np.float64)
        )
    size = jnp.dtype(dtype).itemsize
    rows = []
    for index, (module, width) in enumerate(zip(group.modules, group.outputs, strict=True)):
        whole = width * group.in_features
        stored_here = whole if rank is None else rank * width
        if rank is not None and index == 0:
            stored_here += rank * group.in_features
        loss = tail / 2 if fisher and index == 0 else None
        row = ModuleReport(
            module=module,
            group=group.name,
            layer=group.layer,
            projection=module.rpartition(".")[2],
            shape=(width, group.in_features),
            rank=rank,
            break_even=group.break_even,
            relative_error=errors[index],
            loss=loss,
            parameters=stored_here,
            dense_parameters=whole,
            bytes=stored_here * size,
            dense_bytes=whole * size,
            note=note,
        )
        rows.append(dataclasses.asdict(row))
    return tensors, rows


def _cast(name: str, array: np.ndarray, dtype: str) -> np.ndarray:
    """In the dtype of the checkpoint to be; what does not fit it is an error, not an infinity."""
    with np.errstate(over="ignore"):
        cast = array.astype(jnp.dtype(dtype))
    if not all_finite(cast):
        raise ValueError(f"{name}: not all values are finite in {dtype}")
    return cast


def _tokenizer(checkpoint: Checkpoint) -> Any:
    try:
        return checkpoint.tokenizer()
    except FileNotFoundError:
        logger.warning("%s has no tokenizer; none is written", checkpoint.path)
        return None


def _braced(names: Sequence[str]) -> str:
    return "{" + ",".join(names) + "}"
