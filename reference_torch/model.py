"""The Llama family: Llama, Mistral, Qwen2 and Qwen3, dense or decomposed.

    model = Model(config, Checkpoint(directory), get_strategy("low_rank", Group()), ...)

Activations are [B, T, …]: T new tokens of each of B sequences, all of whose keys and values are in
the cache. Norms, RoPE, softmax and logits are computed in float32, or in float64 if the model is.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import (
    embedding,
    gelu,
    linear,
    relu,
    rms_norm,
    scaled_dot_product_attention,
    silu,
)

from reference_torch.config import Config
from reference_torch.loading import Loader, Tensors
from reference_torch.pages import FullPool, LatentPool, LayerCache, Pages, Step, View
from reference_torch.rope import Rope, Turns
from reference_torch.strategies import Strategy

__all__ = ["KV_CACHES", "Model"]

KV_CACHES = ("full", "latent", "full+latent")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "relu": relu,
    "gelu": gelu,
    "gelu_new": lambda x: gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: gelu(x, approximate="tanh"),
}
Q, K, V = range(3)


class Norm:
    """RMSNorm over the last axis; torch computes it in float32 at least."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.eps = weight, eps

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention:
    """Norm, q k v, RoPE, attention over the cache, o."""

    def __init__(self, name: str, window: int | None, load: Loader) -> None:
        config = load.config
        inner, width = f"{name}.self_attn", config.head_dim
        self.norm = Norm(
            load.tensor(f"{name}.input_layernorm.weight", config.hidden_size), config.eps
        )
        self.qkv = load.expand(
            {
                f"{inner}.q_proj": (config.heads * width, load.heads.queries),
                f"{inner}.k_proj": (config.kv_heads * width, load.heads.kv),
                f"{inner}.v_proj": (config.kv_heads * width, load.heads.kv),
            },
            config.hidden_size,
        )
        self.o = load.contract(f"{inner}.o_proj", config.heads * width, load.heads.queries)
        norms = [load.optional(f"{inner}.{short}_norm.weight", width) for short in "qk"]
        self.q_norm, self.k_norm = (
            None if weight is None else Norm(weight, config.eps) for weight in norms
        )
        self.window, self.width = window, width
        # Whether k and v read the same latent, so that one pool serves both.
        slices = [config.slices.get(f"{inner}.{short}_proj") for short in "kv"]
        self.one_latent = slices[0] is not None and slices[0] == slices[1]

    def __call__(self, x: Tensor, view: View, cache: LayerCache) -> Tensor:
        h = self.norm(x)
        z = self.qkv.latents(h)
        q = self._heads(self.qkv.output(Q, h, z))
        if self.q_norm is not None:
            q = self.q_norm(q)
        q = view.turns.rotate(q)

        keys = cache.keys.extended(
            view,
            heads=lambda: self._key(self.qkv.output(K, h, z), view.turns),
            latent=lambda: self._latent(K, z),
            rebuild=lambda c: self._key(self.qkv.second(K, c), view.live_turns),
        )
        values = cache.values.extended(
            view,
            heads=lambda: self._heads(self.qkv.output(V, h, z)),
            latent=lambda: self._latent(V, z),
            rebuild=lambda c: self._heads(self.qkv.second(V, c)),
        )
        out = attend(q, keys, values, view.masks[self.window], self.width**-0.5)
        return self.o(out.flatten(-2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.width))

    def _key(self, k: Tensor, turns: Turns) -> Tensor:
        k = self._heads(k)
        return turns.rotate(k if self.k_norm is None else self.k_norm(k))

    def _latent(self, index: int, z: object) -> Tensor:
        c = self.qkv.latent(index, z)
        assert c is not None
        return c


def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Grouped-query attention.

    Args:
        q: [B, T, N, H]; keys, values: [B, C, K, H].
        mask: [B, 1, N/K · T, C], added to the scores.

    Returns:
        [B, T, N, H]. Query heads of one kv head are rows of one product, so K and V are not
        repeated.
    """
    kv_heads, tokens = keys.shape[2], q.shape[1]
    grouped = q.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)  # [B, K, N/K, T, H]
    out = scaled_dot_product_attention(
        grouped.flatten(2, 3),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=mask,
        scale=scale,
    )
    return out.unflatten(2, (-1, tokens)).permute(0, 3, 1, 2, 4).flatten(2, 3)


class MLP:
    """Norm, gate and up, activation, down."""

    def __init__(self, name: str, load: Loader) -> None:
        config = load.config
        self.norm = Norm(
            load.tensor(f"{name}.post_attention_layernorm.weight", config.hidden_size), config.eps
        )
        width, inner = config.intermediate_size, f"{name}.mlp"
        outputs = {f"{inner}.{short}_proj": (width, load.units) for short in ("gate", "up")}
        self.gate_up = load.expand(outputs, config.hidden_size)
        self.down = load.contract(f"{inner}.down_proj", width, load.units)
        self.activation = ACTIVATIONS[config.activation]

    def __call__(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        z = self.gate_up.latents(h)
        gate, up = self.gate_up.output(0, h, z), self.gate_up.output(1, h, z)
        return self.down(self.activation(gate) * up)


class Model:
    """A model's weights on one rank, and its forward pass.

    Args:
        config: of the checkpoint.
        tensors: its tensors.
        strategy: how they are split over ranks.
        dtype: of weights, cache and activations.
        max_context: longest sequence, in tokens.

    Raises:
        ValueError: an unknown activation or RoPE, or what the tensors' source raises.
    """

    def __init__(
        self,
        config: Config,
        tensors: Tensors,
        strategy: Strategy,
        *,
        dtype: torch.dtype,
        max_context: int,
    ) -> None:
        if config.activation not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise ValueError(f"hidden_act: expected one of {known}, got {config.activation!r}")
        self.config, self.group, self.dtype = config, strategy.group, dtype
        load = Loader(tensors, config, strategy, dtype)
        self.rope = Rope(
            config.rope,
            config.head_dim,
            config.max_position,
            max_context,
            dtype=torch.promote_types(dtype, torch.float32),
            device=load.device,
        )
        self.embedding = load.words("model.embed_tokens.weight")
        self.layers = [
            (Attention(name, window, load), MLP(name, load))
            for name, window in (
                (f"model.layers.{i}", window) for i, window in enumerate(config.windows)
            )
        ]
        self.norm = Norm(load.tensor("model.norm.weight", config.hidden_size), config.eps)
        self.head = self.embedding if config.tied else load.words("lm_head.weight")
        self.kv_heads = len(load.heads.kv.pieces)  # of this rank
        self.queries = len(load.heads.queries.pieces) // self.kv_heads  # of each of them

    def cache(self, pages: Pages, kind: str) -> list[LayerCache]:
        """Empty pools of all layers.

        Args:
            kind: ``"full"``, ``"latent"``, or ``"full+latent"`` (K full, V latent). What is not
                decomposed is cached in full.
        """
        if kind not in KV_CACHES:
            raise ValueError(f"kv_cache: expected one of {', '.join(KV_CACHES)}, got {kind!r}")
        return [self._layer_cache(attention, pages, kind) for attention, _ in self.layers]

    def _layer_cache(self, attention: Attention, pages: Pages, kind: str) -> LayerCache:
        def pool(width: int | None) -> FullPool | LatentPool:
            shape = (self.kv_heads, self.config.head_dim) if width is None else (width,)
            data = torch.zeros(
                pages.count, pages.size, *shape, dtype=self.dtype, device=self.group.device
            )
            return FullPool(data) if width is None else LatentPool(data)

        latent = (kind == "latent", kind != "full")
        keys, values = (
            pool(attention.qkv.latent_width(index) if wanted else None)
            for index, wanted in zip((K, V), latent, strict=True)
        )
        if attention.one_latent and isinstance(keys, LatentPool):
            values = LatentPool(keys.data, writes=False)
        return LayerCache(keys, values)

    def __call__(
        self,
        tokens: Tensor,
        step: Step,
        caches: list[LayerCache],
        residuals: list[Tensor] | None = None,
    ) -> Tensor:
        """Runs new tokens.

        Args:
            tokens: int64 [B, T].
            step: where they go.
            caches: one a layer; gets their keys and values.
            residuals: gets the residual stream after the embedding and after each layer.

        Returns:
            The residual stream after the last layer [B, T, D].
        """
        view = View(step, self.rope, self.config.windows, self.queries, self.dtype)
        x = self._embed(tokens)
        if residuals is not None:
            residuals.append(x)
        for (attention, mlp), cache in zip(self.layers, caches, strict=True):
            self.group.beat()
            x = x + attention(x, view, cache)
            x = x + mlp(x)
            if residuals is not None:
                residuals.append(x)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Of the next token [..., W], in float32 or float64."""
        self.group.beat()
        h, table = self.norm(x), self.head
        if h.is_cuda and h.dtype in (torch.bfloat16, torch.float16):
            # The sums of a product of bfloat16 as they are, not rounded to bfloat16.
            part = torch.mm(h.flatten(0, -2), table.T, out_dtype=torch.float32)
            part = part.unflatten(0, h.shape[:-1])
        else:
            part = linear(_wide(h), _wide(table))
        return self.group.all_gather(part)[..., : self.config.vocab_size]

    def _embed(self, tokens: Tensor) -> Tensor:
        """Every rank looks up what is in its range, and the sum is all."""
        rows = self.embedding.shape[0]
        local = tokens - self.group.rank * rows
        inside = local.clamp(0, rows - 1)
        own = inside == local
        return self.group.all_reduce(embedding(inside, self.embedding) * own[..., None])


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
