"""Triton kernels that safetune ships: layer norm and RMS norm, forward and backward.

`safetune.kernels.layer_norm` is the function here; its kernels are in the module of the same name,
`from safetune.kernels.layer_norm import ...`.
"""

# Importing the workloads declares them, so `safetune tune safetune.kernels.layer_norm` finds them.
from safetune.kernels import workloads as workloads
from safetune.kernels.functional import layer_norm, layer_norm_bwd, layer_norm_fwd, rms_norm
from safetune.kernels.grid_policy import GridPlan, plan_grid

__all__ = [
    "GridPlan",
    "layer_norm",
    "layer_norm_bwd",
    "layer_norm_fwd",
    "plan_grid",
    "rms_norm",
]
