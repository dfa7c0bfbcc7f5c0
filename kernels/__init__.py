"""LayerNorm, RMSNorm and GroupNorm as Triton kernels, forward and backward; they replace FLA's.

`safetune.kernels.layer_norm` is the function. The kernels are in the module of the same name:
`from safetune.kernels.layer_norm import ...`.
"""

# Importing the workloads declares them, so `safetune tune safetune.kernels.layer_norm` finds them.
from safetune.kernels import workloads as workloads
from safetune.kernels.functional import layer_norm_bwd, layer_norm_fwd
from safetune.kernels.grid_policy import GridPlan, plan_grid
from safetune.kernels.modules import (
    GroupNorm,
    GroupNormLinear,
    LayerNorm,
    LayerNormLinear,
    RMSNorm,
    RMSNormLinear,
)
from safetune.kernels.norm import group_norm, layer_norm, rms_norm
from safetune.kernels.norm_linear import group_norm_linear, layer_norm_linear, rms_norm_linear

__all__ = [
    "GridPlan",
    "GroupNorm",
    "GroupNormLinear",
    "LayerNorm",
    "LayerNormLinear",
    "RMSNorm",
    "RMSNormLinear",
    "group_norm",
    "group_norm_linear",
    "layer_norm",
    "layer_norm_bwd",
    "layer_norm_fwd",
    "layer_norm_linear",
    "plan_grid",
    "rms_norm",
    "rms_norm_linear",
]
