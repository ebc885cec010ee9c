"""Predictions of time, memory and traffic: which strategy and cache a model should run with."""

from deinfer_jax.planner.cost import Memory as Memory
from deinfer_jax.planner.cost import Predictor as Predictor
from deinfer_jax.planner.cost import Traffic as Traffic
from deinfer_jax.planner.measure import measure_link as measure_link
from deinfer_jax.planner.placement import STRATEGIES as STRATEGIES
from deinfer_jax.planner.placement import Collective as Collective
from deinfer_jax.planner.placement import Heads as Heads
from deinfer_jax.planner.placement import LayerPlacement as LayerPlacement
from deinfer_jax.planner.placement import Product as Product
from deinfer_jax.planner.placement import outer_collectives as outer_collectives
from deinfer_jax.planner.placement import place_layer as place_layer
from deinfer_jax.planner.placement import split_heads as split_heads
from deinfer_jax.planner.predict import choose as choose
from deinfer_jax.planner.predict import plan as plan
from deinfer_jax.planner.report import Option as Option
from deinfer_jax.planner.report import Plan as Plan
from deinfer_jax.planner.speeds import DEVICES as DEVICES
from deinfer_jax.planner.speeds import LINKS as LINKS
from deinfer_jax.planner.speeds import Device as Device
from deinfer_jax.planner.speeds import Link as Link
