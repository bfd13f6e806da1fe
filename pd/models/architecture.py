"""The particulars by which an architecture differs from the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from pd.models.causal_lm import CausalLM
    from pd.models.config import ModelConfig
    from pd.models.settings import Settings
    from pd.models.tensor_parallel import TensorParallel


class Architecture:
    """Base class of the architectures, one per file, listed in :mod:`pd.models.registry`.

    The base class is Mistral: attention and a gated MLP without biases. Subclasses override
    attributes and methods where their architecture differs. A file of an architecture imports
    nothing that imports torch, except inside :meth:`make_model`: a node reads the configuration,
    and refuses a wrong one, before it spends seconds on torch. A file that defines layers of its
    own imports torch at its top; then only the refusal of a wrong setting comes later.

    Attributes:
        defaults: values that transformers assumes for keys which ``config.json`` leaves out, where
            they are not the same for all architectures.
        default_eos: the id that ends an answer where no file has the key, as in transformers.
        width_key: key of ``config.json`` for the width of the MLP, or of one expert.
        has_experts: whether the MLP is a sparse mixture of experts.
    """

    defaults: ClassVar[Settings] = {}
    default_eos: ClassVar[int | None] = 2
    width_key: ClassVar[str] = "intermediate_size"
    has_experts: ClassVar[bool] = False

    def adapt(self, config: ModelConfig, cfg: Settings) -> ModelConfig:
        """Set what this architecture sets differently.

        Args:
            config: as read from the keys that all architectures share; without biases, without
                norms of q and k, and with experts whose weights are scaled to sum to 1.
            cfg: the content of ``config.json``, completed by :attr:`defaults`.

        Returns:
            ``config`` or a changed copy (:func:`dataclasses.replace`).
        """
        return config

    def uses_window(self, cfg: Settings) -> bool:
        """Whether a ``sliding_window`` that is smaller than the context is in use; a model that
        uses one is refused."""
        return True

    def make_model(self, config: ModelConfig, tp: TensorParallel) -> CausalLM:
        """Build one rank's part of the model, its weights still empty.

        Args:
            config: of the rank's part (:meth:`pd.models.config.ModelConfig.divided`).
        """
        from pd.models.causal_lm import CausalLM

        return CausalLM(config, tp)
