"""What two implementations may differ by."""

from __future__ import annotations

from dataclasses import dataclass

from deinfer_jax.config import ModelConfig
from deinfer_jax.evaluate.crosscheck.compare import Comparison, Greedy

__all__ = ["Tolerance", "tolerance"]

# Each layer adds a rounding error to the residual stream, 2^-24 of it times the root of the length
# of its sums, and those of all layers add up. A few layers of a few dozen columns come to some
# 1e-6, 30 layers of 576 columns (SmolLM2-135M) to some 1e-5.
TINY = 4096  # layers times width
RELATIVE_TINY, RELATIVE = 1e-5, 5e-5
# Of the logits' range. Rounding moves a logit of a float32 model by some 1e-6 of it.
MARGIN_FLOAT32 = 1e-4
# Of a single position, in units of the limit above: most are near the mean, but a residual stream
# can be a hundred times as long at the first position as at the others, and would hide them.
WORST = 10
# Significant bits, the hidden one included.
BITS = {"bfloat16": 8, "float16": 11}
# In nats, of bfloat16. Both sides round weights and activations alike; the sums between roundings
# are in another order. A divergence goes with the square of the rounding.
KL_MEAN, KL_P99 = 1e-3, 1e-2
MARGIN_STEPS = 4  # of the best logit's last bit


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Limits; None = not looked at.

    Attributes:
        relative: of ‖a − b‖ / ‖b‖ of each layer's residual stream and of the logits, in prefill and
            in decode, over all positions; ten times as much of each one.
        kl_mean, kl_p99: of the KL divergence over positions, in nats.
        margin_of_range, margin_of_top: of the margin where greedy tokens differ first, as a part of
            the logits' range or of the best logit.
    """

    relative: float | None = None
    kl_mean: float | None = None
    kl_p99: float | None = None
    margin_of_range: float | None = None
    margin_of_top: float | None = None

    def exceeded(self, found: Comparison) -> list[str]:
        """What is past the limits, in words; empty where all is well."""
        problems = []
        for name, phase in (("prefill", found.prefill), ("decode", found.decode)):
            for delta in (*phase.layers, phase.logits):
                # Not `>`: a ratio of overflowing norms is NaN, and within no limit.
                if self.relative is None:
                    continue
                if not delta.relative <= self.relative:
                    problems.append(
                        f"{name}, {delta.name}: expected a relative norm of at most "
                        f"{self.relative:.0e}, got {delta.relative:.2e}"
                    )
                elif not delta.worst <= WORST * self.relative:
                    problems.append(
                        f"{name}, {delta.name}: expected a relative norm of at most "
                        f"{WORST * self.relative:.0e} at every position, got {delta.worst:.2e}"
                    )
            distribution = phase.distribution
            for what, limit, value in (
                ("mean", self.kl_mean, distribution.kl_mean),
                ("99th percentile", self.kl_p99, distribution.kl_p99),
            ):
                if limit is not None and not value <= limit:
                    problems.append(
                        f"{name}: expected a KL divergence of at most {limit:.0e} ({what}), "
                        f"got {value:.2e}"
                    )
        for b, sequence in enumerate(found.greedy):
            limit = self._margin(sequence, found)
            if sequence.margin is not None and not sequence.margin <= limit:
                problems.append(
                    f"greedy, sequence {b}: token {sequence.equal} differs at a margin of "
                    f"{sequence.margin:.2e}, expected at most {limit:.2e} there"
                )
        return problems

    def _margin(self, sequence: Greedy, found: Comparison) -> float:
        limits = []
        if self.margin_of_range is not None:
            limits.append(self.margin_of_range * found.decode.logit_range)
        if self.margin_of_top is not None and sequence.top is not None:
            limits.append(self.margin_of_top * sequence.top)
        return max(limits, default=0.0)


def tolerance(dtype: str, config: ModelConfig) -> Tolerance:
    """The limits of a model in a dtype."""
    if dtype == "float32":
        tiny = config.num_layers * config.hidden_size <= TINY
        return Tolerance(
            relative=RELATIVE_TINY if tiny else RELATIVE, margin_of_range=MARGIN_FLOAT32
        )
    finer = 4.0 ** (BITS["bfloat16"] - BITS[dtype])
    return Tolerance(
        kl_mean=KL_MEAN * finer,
        kl_p99=KL_P99 * finer,
        margin_of_top=MARGIN_STEPS * 2.0 ** -BITS[dtype],
    )
