"""Names and shapes of the factors of decomposed linears.

A linear W [out, in] of module ``m`` that is decomposed, W ≈ u v, has ``m.u.weight`` [out, rank],
``m.u.bias`` [out] where it has a bias, and the v [rank, in] that its slice names: its own
``m.v.weight``, or one that it shares, ``model.layers.0.self_attn.q_k_v.v.weight``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from deinfer_jax.config import LowRank, ModelConfig, Slice

__all__ = ["bias_name", "factor_problems", "low_rank_of", "shared_v_name", "u_name", "v_name"]


def u_name(module: str) -> str:
    """Tensor name of a module's second factor u [out, rank]."""
    return f"{module}.u.weight"


def bias_name(module: str) -> str:
    """Tensor name of a decomposed module's bias [out]."""
    return f"{module}.u.bias"


def shared_v_name(parent: str, members: Sequence[str]) -> str:
    """Tensor name of the first factor v [rank, in] of projections of one input.

    Args:
        parent: e.g. ``model.layers.0.self_attn``.
        members: e.g. ``("q_proj", "k_proj", "v_proj")``, which gives
            ``model.layers.0.self_attn.q_k_v.v.weight``. One member keeps its name:
            ``model.layers.0.self_attn.q_proj.v.weight``.
    """
    if not members:
        raise ValueError(f"{parent}: expected at least one member of a group, got none")
    if len(members) == 1:
        return f"{parent}.{members[0]}.v.weight"
    return f"{parent}.{'_'.join(member.removesuffix('_proj') for member in members)}.v.weight"


def v_name(modules: Sequence[str]) -> str:
    """As :func:`shared_v_name`, of full module names of one parent."""
    parents = {module.rpartition(".")[0] for module in modules}
    if len(parents) != 1:
        raise ValueError(f"a group: expected modules of one parent, got {', '.join(modules)}")
    return shared_v_name(parents.pop(), [module.rpartition(".")[2] for module in modules])


def low_rank_of(groups: Iterable[tuple[Sequence[str], int]]) -> LowRank:
    """The slices of a model whose groups have a v each.

    Args:
        groups: full names of the modules that share a v, and its rank; a group of one is a pair of
            its own. Modules in no group stay dense.

    Raises:
        ValueError: a module is in two groups, a group's modules read different inputs, or a rank is
            below 1.
    """
    slices = []
    for modules, rank in groups:
        piece = Slice(v=v_name(modules), offset=0, rank=rank)
        slices += [(module, piece) for module in modules]
    return LowRank(tuple(slices))


def factor_problems(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """What is wrong with the linears of a decomposed model, in words; empty where all is well.

    Every linear must be there once, dense or as factors, as ``config.low_rank`` says.

    Args:
        config: of the model.
        shapes: of the checkpoint's tensors by name.
    """
    problems: list[str] = []
    known: set[str] = set()

    def expect(module: str, tensor: str, shape: tuple[int, ...], why: str) -> None:
        known.add(tensor)
        if tensor not in shapes:
            problems.append(f"module {module}: expected {tensor} {list(shape)} ({why}), got none")
        elif tuple(shapes[tensor]) != shape:
            problems.append(
                f"module {module}: expected {tensor} {list(shape)} ({why}), "
                f"got {list(shapes[tensor])}"
            )

    def refuse(module: str, tensor: str, why: str) -> None:
        known.add(tensor)
        if tensor in shapes:
            problems.append(f"module {module}: {why}, got {tensor} {list(shapes[tensor])}")

    rows = config.low_rank.factors()
    for module, linear in config.linears().items():
        piece = config.low_rank.get(module)
        weight, v, u = f"{module}.weight", f"{module}.v.weight", u_name(module)
        shape = (linear.out_features, linear.in_features)
        if piece is None:
            expect(module, weight, shape, "low_rank does not name it, so it is dense")
            for factor in (v, u):
                refuse(module, factor, "low_rank does not name it, expected no factors")
        else:
            refuse(module, weight, "expected factors, as low_rank says, and not a dense weight too")
            if piece.v != v:
                refuse(module, v, f"expected no v of its own, it reads {piece.v}")
            expect(module, u, (shape[0], piece.rank), f"rank {piece.rank} in low_rank")
            rank = rows[piece.v]
            expect(module, piece.v, (rank, shape[1]), f"low_rank reads {rank} rows of it")
        places = {name: f"{module}.{name}" for name in ("bias", "v.bias", "u.bias")}
        right = ("bias" if piece is None else "u.bias") if linear.bias else None
        for name, tensor in places.items():
            if name == right:
                expect(module, tensor, (shape[0],), "config.json gives it one")
            else:
                where = "no bias" if right is None else f"its bias as {places[right]}"
                refuse(module, tensor, f"expected {where}")
    for tensor, shape in shapes.items():
        if tensor.endswith((".u.weight", ".v.weight", ".u.bias", ".v.bias")):
            if tensor not in known and not tensor.startswith("lm_head."):
                problems.append(f"tensor {tensor} {list(shape)} is read by no module of low_rank")
    return list(dict.fromkeys(problems))
