"""Tiny random checkpoints in the Hugging Face format, and what transformers makes of them."""

from __future__ import annotations

import functools
import json
import os
from typing import TYPE_CHECKING, Any

# Nothing here may look for models on the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

if TYPE_CHECKING:
    from pathlib import Path

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
# Test processes share few cores; threads that wait for each other spin.
torch.set_num_threads(1)

VOCAB_SIZE = 320
BOS, EOS, END_OF_TURN = "<|bos|>", "<|eos|>", "<|im_end|>"
SPECIAL_TOKENS = (BOS, EOS, "<|im_start|>", END_OF_TURN)
BOS_ID, EOS_ID, IM_START_ID, IM_END_ID = range(256, 260)

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
_MOE = {"num_experts_per_tok": 2, "num_local_experts": 4}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 512,
    "mscale": 0.707,
    "mscale_all_dim": 0.9,
}
_UNROUNDED_YARN = {
    "rope_type": "yarn",
    "rope_theta": 15000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 256,
    "beta_fast": 24.0,
    "beta_slow": 1.0,
    "truncate": False,
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
}

# What makes each architecture itself, beyond the shape they share.
_SPECIFIC: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("LlamaConfig", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    "llama3": ("LlamaConfig", {"rope_parameters": _LLAMA3_ROPE, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {"sliding_window": None, "head_dim": 24}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "mixtral": ("MixtralConfig", {**_MOE, "sliding_window": None}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**_MOE, "head_dim": 32, "moe_intermediate_size": 48, "norm_topk_prob": True},
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        {**_LATENT, "q_lora_rank": None, "n_shared_experts": 2, "rope_parameters": _YARN},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {**_LATENT, "q_lora_rank": 40, "n_shared_experts": 1, "n_group": 4, "topk_group": 2},
    ),
    "glm4_moe_lite": (
        "Glm4MoeLiteConfig",
        {
            **{key: value for key, value in _LATENT.items() if key != "first_k_dense_replace"},
            "q_lora_rank": 40,
            "mlp_layer_types": ["dense", "dense", "sparse"],
            "rms_norm_eps": 0.02,
        },
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            "head_dim": 32,
            "use_qk_norm": True,
            "attention_bias": True,
            "moe_intermediate_size": 48,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 3,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
        },
    ),
    "phi3": ("Phi3Config", {"head_dim": 24, "pad_token_id": None}),
    "gpt_oss": (
        "GptOssConfig",
        {
            **_MOE,
            "head_dim": 32,
            "sliding_window": 12,
            "rope_parameters": _UNROUNDED_YARN,
            # Small, so that both clamps act on our activations.
            "swiglu_limit": 1.2,
            "swiglu_alpha": 1.3,
        },
    ),
}
ARCHITECTURES = tuple(_SPECIFIC)
# With multi-head latent attention: their heads' sizes have names of their own.
LATENT = tuple(name for name, (_, specific) in _SPECIFIC.items() if "kv_lora_rank" in specific)
# Written in several files with an index, and with two end-of-sequence ids.
SHARDED = ("llama3", "qwen3_moe")
TWO_EOS = ("llama3", "qwen3")


def make_checkpoint(architecture: str, directory: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a random model of about 0.1M parameters with a byte-level tokenizer.

    Args:
        architecture: one of :data:`ARCHITECTURES`.
        directory: created if need be.
        overrides: settings of the architecture's configuration class in transformers.

    Returns:
        ``directory``.
    """
    directory.mkdir(parents=True, exist_ok=True)
    class_name, specific = _SPECIFIC[architecture]
    settings = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        **specific,
        **overrides,
    }
    config = getattr(transformers, class_name)(**settings)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _randomize(model, seed)
    eos = [EOS_ID, IM_END_ID] if architecture in TWO_EOS else EOS_ID
    model.generation_config = transformers.GenerationConfig(bos_token_id=BOS_ID, eos_token_id=eos)
    shard_size = "200KB" if architecture in SHARDED else "5GB"
    model.save_pretrained(directory, max_shard_size=shard_size)
    write_tokenizer(directory)
    return directory


@torch.no_grad()
def _randomize(model: torch.nn.Module, seed: int) -> None:
    """Fill weights so that logits are well apart and greedy text varies (see loader._fill_dummy).

    Norms and biases are random too, so that ignoring one is noticed.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.2, 0.2, generator=generator)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.uniform_(0.7, 1.3, generator=generator)
        elif parameter.dim() == 1:
            parameter.normal_(std=0.3, generator=generator)
        elif "embed" in name and not model.config.tie_word_embeddings:
            parameter.normal_(std=0.7, generator=generator)
        else:
            gain = 3.0 if "lm_head" in name else 1.5 if "embed" in name else 1.8
            parameter.normal_(std=gain * parameter.shape[-1] ** -0.5, generator=generator)


def write_tokenizer(directory: Path) -> None:
    """Write a byte-level tokenizer: ids 0 to 255 are bytes in GPT-2's alphabet, then special
    tokens."""
    # Sorted, GPT-2's alphabet has a stable order; bytes are mapped by the pre-tokenizer.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("t", "he"), ("Ġ", "the"), ("i", "n"), ("in", "g"), ("a", "n")]
    # With the special tokens, which would otherwise get ids of merges.
    vocab = {token: i for i, token in enumerate([*alphabet, *SPECIAL_TOKENS])}
    for i, (left, right) in enumerate(merges):
        vocab[left + right] = 256 + len(SPECIAL_TOKENS) + i
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


@functools.lru_cache(maxsize=16)
def reference_model(directory: Path) -> Any:
    """Load transformers' model, float32 on the CPU, cached."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for module in model.modules():
        if type(module).__name__ == "GptOssExperts":  # earlier releases do not read these
            module.alpha, module.limit = model.config.swiglu_alpha, model.config.swiglu_limit
    return model.eval()


@torch.inference_mode()
def reference_generate(
    directory: Path, prompts: list[list[int]], max_new_tokens: int, *, stop_at_eos: bool = False
) -> list[list[int]]:
    """Generate greedy tokens of each prompt, one prompt at a time.

    With ``stop_at_eos`` a list ends with the first end-of-sequence id of ``generation_config``.
    """
    model = reference_model(directory)
    eos = model.generation_config.eos_token_id if stop_at_eos else []
    ending = set(eos if isinstance(eos, list) else [eos])
    outputs = []
    for prompt in prompts:
        result = model(torch.tensor([prompt]), use_cache=True)
        tokens: list[int] = []
        while True:
            tokens.append(int(result.logits[0, -1].argmax()))
            if len(tokens) == max_new_tokens or tokens[-1] in ending:
                break
            cache = result.past_key_values
            result = model(torch.tensor([tokens[-1:]]), past_key_values=cache, use_cache=True)
        outputs.append(tokens)
    return outputs


@torch.inference_mode()
def reference_logits(directory: Path, token_ids: list[int]) -> torch.Tensor:
    """Compute float32 logits ``[len(token_ids), vocab_size]`` of a whole sequence."""
    return reference_model(directory)(torch.tensor([token_ids])).logits[0]


@torch.inference_mode()
def is_greedy(directory: Path, prompt: list[int], tokens: list[int], tie: float = 1e-5) -> bool:
    """Return whether each token is the reference's best after the earlier ones, or within ``tie``.

    Two logits that differ by rounding may come in either order in a batch of another size, and the
    text continues from either. One of several thousand random tokens is such a tie.
    """
    logits = reference_logits(directory, prompt + tokens)[len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return bool((logits.max(dim=1).values - chosen <= tie).all())


def reference_logprobs(directory: Path, token_ids: list[int]) -> torch.Tensor:
    """Compute float32 log probabilities ``[len(token_ids), vocab_size]``; row i is of token i +
    1."""
    return torch.log_softmax(reference_logits(directory, token_ids), dim=-1)
