"""The configuration of the layer for drafts that a checkpoint itself has (MTP, "nextn"). Importing
this does not import torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pd.core.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from pd.core.config import NodeConfig
    from pd.models.config import ModelConfig


@dataclass(frozen=True)
class MtpConfig:
    """The layer after the last one of a checkpoint; see :class:`pd.models.draft_head.HeadConfig`.

    Attributes:
        layer: the layer, as a model of one layer.
        index: number of the layer in the checkpoint.
    """

    algorithm: ClassVar[str] = "mtp"
    plane_name: ClassVar[str] = "mtp"
    normed: ClassVar[bool] = True

    layer: ModelConfig
    index: int

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return (self.index,)

    @property
    def hidden_size(self) -> int:
        return self.layer.hidden_size

    def identify(self, config: NodeConfig) -> str:
        """Return the algorithm alone, because the layer is a part of the model's checkpoint."""
        return self.algorithm

    @classmethod
    def of_target(cls, path: str | Path, target: ModelConfig) -> MtpConfig:
        """Make the configuration of the first layer for drafts of a model.

        Such a layer is never one of the dense leading layers.

        Args:
            path: the model's directory, for messages.
            target: configuration of the whole model.

        Raises:
            UsageError: the model has no such layer.
        """
        if not target.num_draft_layers:
            raise UsageError(
                f"--speculative-algorithm mtp: {path} has no layer for drafts "
                "(num_nextn_predict_layers in config.json)"
            )
        layer = dataclasses.replace(
            target, num_layers=1, num_dense_layers=0, num_draft_layers=0, windows=()
        )
        return cls(layer, target.num_layers)
