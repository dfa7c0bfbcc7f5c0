"""The norms as modules, with the names, arguments and state of those in `fla.modules`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from safetune.errors import InvalidOperand
from safetune.kernels.norm import group_norm
from safetune.kernels.norm_linear import group_norm_linear


class _Norm(nn.Module):
    """Parameters and options; `forward` is the norm."""

    is_rms_norm = False
    num_groups = 1

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        bias: bool = False,
        eps: float = 1e-5,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        *,
        weight_offset: float = 0.0,
        deterministic: bool | None = None,
    ) -> None:
        super().__init__()
        if weight_offset and not elementwise_affine:
            raise InvalidOperand(
                f"weight_offset={weight_offset} needs a weight; use elementwise_affine=True"
            )
        self.hidden_size = hidden_size
        self.elementwise_affine = elementwise_affine
        self.eps = eps
        self.weight_offset = weight_offset
        self.deterministic = deterministic
        for name, wanted in (("weight", True), ("bias", bias)):
            made = None
            if wanted and elementwise_affine:
                made = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
            self.register_parameter(name, made)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Make the affine map the identity: weight + weight_offset is 1, bias 0."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.weight_offset)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        """Return the sizes, eps, and the arguments that differ from their defaults."""
        defaults = {
            "elementwise_affine": True,
            "is_rms_norm": type(self).is_rms_norm,
            "eps": None,
            "weight_offset": 0.0,
            "deterministic": None,
        }
        given = {name: getattr(self, name) for name in defaults}
        parts = [f"{name}={given[name]}" for name in defaults if given[name] != defaults[name]]
        return ", ".join([str(self.hidden_size), *parts])

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Any:
        """Return the norm of `x`, and residual_out after it if `prenorm`: see `group_norm`."""
        try:  # a tenth of the host time of the attributes
            weight, bias = self._parameters["weight"], self._parameters["bias"]
        except KeyError:  # computed, as by torch.nn.utils.parametrize
            weight, bias = self.weight, self.bias
        return group_norm(
            x,
            weight,
            bias,
            residual,
            self.eps,
            prenorm,
            residual_in_fp32,
            self.is_rms_norm,
            self.num_groups,
            weight_offset=self.weight_offset,
            deterministic=self.deterministic,
        )


class _NormLinear(_Norm):
    """The same state; `forward` is the norm followed by the caller's linear map."""

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Any:
        """Return the linear map of the norm of `x`, and residual_out after it if `prenorm`."""
        operands = (x, self.weight, self.bias, weight, bias, residual)
        options = (self.eps, prenorm, residual_in_fp32, self.is_rms_norm, self.num_groups)
        return group_norm_linear(
            *(*operands, *options),
            weight_offset=self.weight_offset,
            deterministic=self.deterministic,
        )


class _Grouped(_Norm):
    """One norm for each of `num_groups` equal parts of the last dimension."""

    def __init__(
        self,
        num_groups: int,
        hidden_size: int,
        elementwise_affine: bool = True,
        bias: bool = False,
        eps: float = 1e-5,
        is_rms_norm: bool = False,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        *,
        weight_offset: float = 0.0,
        deterministic: bool | None = None,
    ) -> None:
        if num_groups < 1 or hidden_size % num_groups:
            raise InvalidOperand(f"num_groups={num_groups} must divide hidden_size={hidden_size}")
        given = (hidden_size, elementwise_affine, bias, eps, device, dtype)
        super().__init__(*given, weight_offset=weight_offset, deterministic=deterministic)
        self.num_groups = num_groups
        self.is_rms_norm = is_rms_norm

    def extra_repr(self) -> str:
        """Return the number of groups, and then as any norm."""
        return f"{self.num_groups}, {super().extra_repr()}"


class LayerNorm(_Norm):
    """LayerNorm over the last dimension; without a bias unless `bias`."""


class RMSNorm(_Norm):
    """RMSNorm over the last dimension; `weight_offset=1.0` is Gemma's."""

    is_rms_norm = True


class GroupNorm(_Grouped):
    """LayerNorm or RMSNorm of equal parts of the last dimension; the affine map covers all."""


class LayerNormLinear(_NormLinear):
    """`LayerNorm` and a linear map whose weight and bias are arguments of the call."""


class RMSNormLinear(_NormLinear):
    """`RMSNorm` and a linear map whose weight and bias are arguments of the call."""

    is_rms_norm = True


class GroupNormLinear(_Grouped, _NormLinear):
    """`GroupNorm` and a linear map whose weight and bias are arguments of the call."""
