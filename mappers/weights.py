"""What a linear map is made of: matrices, biases and the source layers each target layer reads.

Knows neither models nor how the products are computed.

Shapes: L target layers, K chosen source layers, G head groups (1 for support `full`, H for
`head_local`), F features of a group, O elements of one group of one target layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.errors import MapperError


@dataclass(frozen=True, slots=True)
class LinearWeights:
    """Fitted weights [L, G, F, O] and biases [L, G, O], and the layers [L][K] they read."""

    source_layers: tuple[tuple[int, ...], ...]
    k_weight_LGFO: Tensor
    k_bias_LGO: Tensor
    v_weight_LGFO: Tensor
    v_bias_LGO: Tensor

    @property
    def groups(self) -> int:
        """Head groups: 1 when a target head reads every source head."""
        return self.k_weight_LGFO.shape[1]

    @property
    def parameters(self) -> int:
        """Weights of all matrices; without biases."""
        return self.k_weight_LGFO.numel() + self.v_weight_LGFO.numel()

    def placed(self, device: torch.device | str, dtype: torch.dtype) -> LinearWeights:
        """On `device`: matrices in `dtype`, biases in fp32, both dense.

        The features of an output stand side by side, which is fastest; the shapes stay.
        """

        def matrices(weight_LGFO: Tensor) -> Tensor:
            weight_LGOF = weight_LGFO.to(device, dtype).transpose(2, 3).contiguous()
            return weight_LGOF.transpose(2, 3)

        return LinearWeights(
            self.source_layers,
            matrices(self.k_weight_LGFO),
            self.k_bias_LGO.to(device, torch.float32).contiguous(),
            matrices(self.v_weight_LGFO),
            self.v_bias_LGO.to(device, torch.float32).contiguous(),
        )

    def shard(self, heads: range, kv_heads: int) -> LinearWeights:
        """The part that makes `heads` of the target's `kv_heads` heads; views.

        With one group it reads all source heads, otherwise the heads of the same numbers alone.
        MapperError when `heads` is not a range of neighbouring heads of the target.
        """
        if len(heads) == 0 or heads.step != 1 or heads.start < 0 or heads.stop > kv_heads:
            raise MapperError(f"{heads} is not a range of the target's {kv_heads} KV heads")
        share = self.groups * self.k_bias_LGO.shape[2] // kv_heads
        columns = slice(heads.start * share, heads.stop * share)
        groups = slice(None)
        if self.groups > 1:
            groups, columns = slice(heads.start, heads.stop), slice(None)
        return LinearWeights(
            self.source_layers,
            self.k_weight_LGFO[:, groups, :, columns],
            self.k_bias_LGO[:, groups, columns],
            self.v_weight_LGFO[:, groups, :, columns],
            self.v_bias_LGO[:, groups, columns],
        )
