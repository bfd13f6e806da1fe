"""The ways in which an architecture differs from the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pd.models.window_reader import refuse_windows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pd.models.causal_lm import CausalLM
    from pd.models.config import ModelConfig
    from pd.models.settings import Settings
    from pd.models.tensor_parallel import TensorParallel


class Architecture:
    """Base class of the architectures. Each has its own file and a line in
    :mod:`pd.models.registry`.

    The base class is Mistral: attention and a gated MLP without biases. Subclasses override
    attributes and methods.

    The file of an architecture imports torch only inside :meth:`make_model`. A node reads its
    configuration, and refuses a wrong one, before it spends seconds on torch. If you define your
    own layers, you may import torch at the top. Then wrong settings are merely refused later.

    Attributes:
        defaults: values that transformers assumes for keys missing in ``config.json``, if they
            depend on the architecture.
        default_eos: id that ends an answer if no file has the key, as in transformers.
        width_key: key of ``config.json`` for the width of the MLP, or of one expert.
        has_experts: whether the MLP is a sparse mixture of experts.
        has_latents: whether attention is to latents of K and V (MLA).
        has_sinks: whether attention has sinks.
        has_mxfp4: whether the weights of experts may be in MXFP4.
        fused: modules of a checkpoint whose weights are those of several modules, row after row,
            and the names of these modules in this order.
        implemented: keys of ``config.json`` that :mod:`pd.models.refusals` refuses for other
            architectures, but :meth:`adapt_config` represents.
        neutral: values, by key, of further settings that change nothing. We refuse all others.
    """

    defaults: ClassVar[Settings] = {}
    default_eos: ClassVar[int | None] = 2
    width_key: ClassVar[str] = "intermediate_size"
    has_experts: ClassVar[bool] = False
    has_latents: ClassVar[bool] = False
    has_sinks: ClassVar[bool] = False
    has_mxfp4: ClassVar[bool] = False
    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    implemented: ClassVar[frozenset[str]] = frozenset()
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {}

    def adapt_config(self, config: ModelConfig, cfg: Settings) -> ModelConfig:
        """Apply the particulars of this architecture.

        Args:
            config: as read from the keys that all architectures share: no biases, no norms of q and
                k, and experts whose weights are scaled to sum to 1.
            cfg: the content of ``config.json``, completed by :attr:`defaults`.

        Returns:
            ``config`` or a changed copy (:func:`dataclasses.replace`).
        """
        return config

    def read_windows(self, cfg: Settings) -> tuple[int, ...]:
        """Read the sliding window of each layer with a function of
        :mod:`pd.models.window_reader`. By default a window is refused."""
        return refuse_windows(cfg)

    def make_model(self, config: ModelConfig, tp: TensorParallel) -> CausalLM:
        """Build one rank's part of the model, with empty weights.

        Args:
            config: configuration of the rank's part
                (:meth:`pd.models.config.ModelConfig.split_by_ranks`).
        """
        from pd.models.causal_lm import CausalLM

        return CausalLM(config, tp)
