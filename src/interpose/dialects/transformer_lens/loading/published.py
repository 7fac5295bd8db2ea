"""What TransformerLens knows of published models by their names: facts, and nothing that a model itself says."""

from __future__ import annotations

from typing import Any

import transformers

from interpose.models.hub import within_reach

WITHOUT_BOS = frozenset(
    """
    audioflamingo3 bloom ernie4_5 ernie4_5_moe exaone exaone4 glm glm4 glm4_moe glm4_moe_lite
    glm4v glm_moe_dsa glmasr gpt_neox granite granitemoe granitemoehybrid minimax_m2 mpt
    musicflamingo phi phimoe qwen2 qwen2_5_vl qwen2_audio qwen2_moe qwen3 qwen3_5 qwen3_5_moe
    qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe recurrent_gemma
    seed_oss smollm3 starcoder2
    """.split()
)
"""Types of models before whose texts TransformerLens 4.3's bridge puts no BOS token."""

WITHOUT_BOS_IN_OLD_CLASSES = frozenset("bloom gpt_neox phi qwen2 qwen3".split())
"""The same, of the classes that TransformerLens 3.5.1 had besides."""


def prepends_bos(module: Any, without: frozenset[str]) -> bool:
    """Whether the texts of a model begin with a BOS token.

    Args:
        module: the model.
        without: the types of models whose texts do not.
    """
    config = getattr(module, "config", None)
    return getattr(config, "model_type", None) not in without


def as_trained(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Options that load a BERT with the heads it was trained with: its config on the hub names one of the two.

    Args:
        name: the repository.
        options: of the load, which go before.
    """
    if "config" in options:
        return {}
    asked: dict[str, Any] = {
        key: options[key] for key in ("revision", "token", "cache_dir") if key in options
    }
    config: Any = transformers.AutoConfig.from_pretrained(name, **within_reach(name, asked))
    if config.model_type != "bert" or config.architectures != ["BertForMaskedLM"]:
        return {}
    config.architectures = ["BertForPreTraining"]
    return {"config": config}
