"""What :mod:`tests.models.tiny` knows: sizes by attribute name, and one entry for each special case."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

VOCAB = 99
TOKENS = (10, 60)  # the token ids of inputs; none is special
MOST_KINDS = 4  # a list with more different items, one for each layer, is no list of kinds

# The types of each kind but the causal ones, which transformers lists.
MASKED = """
    albert bert big_bird camembert convbert data2vec-text deberta deberta-v2 distilbert electra
    ernie esm eurobert flaubert fnet gte ibert layoutlm longformer luke megatron-bert mobilebert
    modernbert mpnet mra nomic_bert nystromformer rembert roberta roberta-prelayernorm roformer
    squeezebert xlm xlm-roberta xlm-roberta-xl xmod yoso
"""
ENCODER_DECODER = """
    bart bigbird_pegasus blenderbot blenderbot-small fsmt led longt5 m2m_100 marian mbart mt5 mvp
    nllb-moe pegasus pegasus_x plbart prophetnet switch_transformers t5 t5gemma umt5 whisper
"""
VISION = """
    aimv2_vision_model beit clip_vision_model data2vec-vision deit dinov2 dinov2_with_registers
    dinov3_vit ijepa siglip_vision_model vit vit_msn yolos
"""
AUDIO = """
    data2vec-audio hubert unispeech unispeech-sat wav2vec2 wav2vec2-conformer wavlm whisper
"""
CLASSIFIERS = """
    albert bert deberta-v2 distilbert electra falcon gemma2 gpt2 gpt_neox llama mistral mixtral
    modernbert opt phi3 qwen2 qwen3 roberta xlnet
"""

# Attribute name (a full match) -> tiny value; the first match wins. None leaves the default alone.
# A number replaces an integer, or every item of a list of integers; nothing replaces None or a bool.
SIZES: tuple[tuple[str, Any], ...] = (
    (r"type_vocab_size", None),
    (r"\w*vocab_size\w*", VOCAB),
    # layers
    (
        r"num_hidden_layers|n_layers?|num_layers|(num_)?(en|de)coder_layers|depth|num_blocks",
        "layers",
    ),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    # heads
    (r"num_key_value_heads|num_kv_heads|kv_n_heads|swa_num_key_value_heads|num_query_groups", 2),
    (r"(\w+_)?(num_attention_heads|attention_heads)|n_heads?|num_heads|index_n_heads", 4),
    (r"linear_num_(key_)?heads|linear_num_value_heads", 4),
    (r"mamba_n(um)?_heads", 8),
    (r"(\w+_)?head_dim|d_kv|d_head|dim_head|kv_channels|attention_head_size|mamba_d_head", 8),
    (r"query_pre_attn_scalar", 16),
    (r"rotary_dim", 4),
    # widths
    (r"moe_\w*intermediate_size|\w*expert\w*_intermediate_size|expert_ffn_hidden_size", 16),
    (
        r"\w*intermediate_size\w*|(\w+_)?ffn_dim|d_ff|dff|d_inner|dim_ff|feed_forward_size|mlp_dim",
        64,
    ),
    (r"n_inner|ffn_hidden_size", 64),
    (r"hidden_size_per_layer_input", 8),
    (r"(\w+_)?hidden_(size|dim)(_global)?|d_model|n_embd|dim|embed_dim|emb_dim|embedding_dim", 32),
    (r"(\w+_)?embedding_size|word_embed_proj_dim|lru_width|(pronunciation|shape)_embed_dim", 32),
    (r"projection_(dim|size)|vision_output_dim|classifier_proj_size|output_proj_dims", 32),
    (r"\w*_lora_rank|adapter_rank|laurel_rank|\w*_lowrank|gated_norm_rank", 16),
    # positions
    (r"max_(\w+_)?position_embeddings|max_target_positions|n_positions|n_ctx|max_seq_len", 64),
    (r"model_max_length|context_length|\w*max_distance", 64),
    (r"max_source_positions", 20),
    (r"position_bias_num_buckets", 16),
    (r"sliding_window|sliding_window_size|attention_window_size|attention_window|window_size", 4),
    (r"attention_chunk_size|local_attention|keep_window_size", 4),
    # experts
    (r"num_experts|num_local_experts|n_routed_experts|moe_num_experts", 4),
    (r"num_experts_per_tok(en)?|moe_top_?k|moe_k|top_k_experts", 2),
    (r"n_group|num_expert_group", 2),
    (r"topk_group|n_shared_experts|num_shared_experts", 1),
    (r"index_topk|index_block_size|block_size", 4),
    # state spaces
    (r"state_size|ssm_state_size|mamba_d_state", 8),
    (r"n_groups|mamba_n_?groups", 2),
    (r"time_step_rank|mamba_dt_rank|(mamba_)?chunk_size", 4),
    # images and sound
    (r"image_size", 16),
    (r"patch_size", 4),
    (r"num_mel_bins", 8),
)

# Floats that multiply something: away from 1, so that a forgotten one shows.
FACTORS: tuple[tuple[str, float], ...] = (
    (r"residual_multiplier", 0.5),
    (r"attention_multiplier", 0.3),
    (r"\w*_multipliers?", 0.7),
    (r"logits_scaling", 3.0),
    (r"logit_scale", 0.25),
    (r"\w*routed_scaling_factor|router_scaling_factor", 1.5),
)

# Where a config has the attribute on the left, these values too: latent attention is not grouped.
TOGETHER: dict[str, dict[str, Any]] = {"kv_lora_rank": {"num_key_value_heads": 4}}

# kind of model -> values for attributes that a config has. BERT's kin and XLM look at what comes
# before only on demand; a classifier needs a padding token to find the last token of each text.
FORCED: dict[str, dict[str, Any]] = {
    "causal": {"is_decoder": True, "causal": True},
    "classifier": {"pad_token_id": 0},
}


def cycle(*kinds: Any) -> Callable[[int], list[Any]]:
    """A list of kinds, one for each layer."""
    return lambda layers: [kinds[i % len(kinds)] for i in range(layers)]


ROPE = {"rope_type": "default", "rope_theta": 10000.0}
MIXED = cycle("full_attention", "sliding_attention")
SOUND: dict[str, Any] = {
    "conv_dim": (16, 16),
    "conv_stride": (4, 4),
    "conv_kernel": (8, 4),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
}

# model_type of a model, or of a part of one -> values that win over all the above. A function is
# called with the number of layers; a dictionary goes to the part of that name.
SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "big_bird": {"attention_type": "original_full"},  # texts are too short for the sparse kind
    "bigbird_pegasus": {"attention_type": "original_full"},
    "blt": {"encoder_hash_byte_group_vocab": 64, "num_hidden_layers": lambda layers: layers},
    "cohere2_moe": {
        "mlp_layer_types": cycle("dense", "sparse"),
        "prefix_dense_intermediate_size": 64,
    },
    "cohere_compass_text": {  # the default has one kind of layers, and no rope for it
        "layer_types": cycle("sliding_attention", "full_attention"),
        "rope_parameters": {"sliding_attention": ROPE, "full_attention": None},
    },
    "data2vec-audio": SOUND,
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 3},
        "index_topk": 2,
    },
    "diffllama": {"attention_dropout": 0.0},  # refuses any other
    "distilbert": {"hidden_dim": 64},
    "dots1": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "layer_types": MIXED,
    },
    "esm": {"vocab_size": VOCAB, "pad_token_id": 0, "mask_token_id": 98},
    "falcon_h1": {"mamba_d_ssm": 64},
    "flint": {"mlp_only_layers": [0]},
    "gemma3": {"mm_tokens_per_image": 4},
    "gemma3n_text": {"num_kv_shared_layers": 2, "activation_sparsity_pattern": cycle(0.5, 0.0)},
    "gemma4": {
        "text_config": {
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 16,
            "num_kv_shared_layers": 0,
        },
        "vision_config": {"position_embedding_size": 16},
    },
    "gemma4_assistant": {
        "text_config": {
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "num_kv_shared_layers": lambda layers: layers,
        }
    },
    "gemma4_text": {"global_head_dim": 16, "num_kv_shared_layers": 2},
    "gemma4_unified": {"vision_config": {"mm_embed_dim": 32, "mm_posemb_size": 16}},
    "gemma4_unified_text": {"global_head_dim": 16},
    "got_ocr2": {"vision_config": {"output_channels": 16, "global_attn_indexes": [1]}},
    "gpt_neo": {"attention_types": lambda layers: [[["global"], 1], [["local"], layers - 1]]},
    "granitemoehybrid": {"layer_types": cycle("linear_attention", "full_attention")},
    "hubert": SOUND,
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "inkling_text": {"mlp_layer_types": cycle("dense", "sparse"), "rel_extent": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 0},
    "laguna": {"layer_types": MIXED, "num_attention_heads_per_layer": cycle(4, 8)},
    "lfm2": {"layer_types": cycle("conv", "full_attention"), "block_multiple_of": 16},
    "lfm2_moe": {"layer_types": cycle("conv", "full_attention")},
    "longcat_flash": {"qk_head_dim": 16, "zero_expert_num": 2},
    "mamba2": {"num_heads": 8},
    "mellum": {"layer_types": MIXED},
    "minicpm3": {"dim_model_base": 16},
    "minimax": {
        "full_attn_alpha_factor": 0.8,
        "full_attn_beta_factor": 0.7,
        "linear_attn_alpha_factor": 0.9,
        "linear_attn_beta_factor": 0.6,
        "mlp_alpha_factor": 1.2,
        "mlp_beta_factor": 0.5,
    },
    "minimax_m3_vl_text": {
        "layer_types": cycle("full_attention", "minimax_m3_sparse"),
        "mlp_layer_types": cycle("dense", "sparse"),
        "index_block_size": 2,
        "index_topk_blocks": 2,
    },
    "ministral": {"head_dim": 8, "layer_types": cycle("sliding_attention", "full_attention")},
    "mllama_text_model": {"cross_attention_layers": [1]},
    "mobilebert": {"embedding_size": 16, "intra_bottleneck_size": 16},
    "mpt": {"attn_config": {"attn_pdrop": 0}},  # the config declares it an int
    "nemotron": {"num_key_value_heads": 2},
    "phi3": {"sliding_window": 4},
    "phi4_multimodal": {
        "audio_config": {
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
            "nemo_conv_channels": 16,
        }
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        "ple_layer_ids": [1],
        "eos_token_id": 2,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 16,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 1,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {
        "attn_layers": cycle("local", "lsh"),
        "axial_pos_embds_dim": (16, 16),
        "axial_pos_shape": (8, 8),
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_buckets": 4,
        "hash_seed": 0,
    },
    "starcoder2": {"sliding_window": 4},
    "unispeech": SOUND,
    "unispeech-sat": SOUND,
    "wav2vec2": SOUND,
    "wav2vec2-conformer": SOUND,
    "wavlm": SOUND,
    "xlstm": {"hidden_size": 64, "embedding_dim": 64, "qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "layers_block_type": cycle("linear_attention", "hybrid"),
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "zamba2": {"layers_block_type": cycle("linear_attention", "hybrid")},
    "zaya": {
        "num_experts_per_tok": 1,
        "layer_types": cycle("hybrid", "hybrid_sliding"),
        "sliding_window": 4,
        "router_hidden_size": 16,
    },
}

# Types that show what is theirs (layers that share keys, values or parameters) only with more.
LEAST_LAYERS = {
    "gemma3n_text": 4,
    "gemma4_text": 4,
    "mllama_text_model": 3,
    "zamba": 4,
    "zamba2": 4,
}

# Input name -> shape; "b" is the batch, "t" the length, "4b" four times the batch. Names that end in
# ids are filled with token ids, others with normal numbers; tuples of shapes and dictionaries give
# tuples and dictionaries of tensors.
SHAPES: dict[str, Any] = {
    "input_ids": ("b", "t"),
    "decoder_input_ids": ("b", "t"),
    "pixel_values": ("b", 3, 16, 16),
    "input_features": ("b", 8, 40),
    "input_values": ("b", 400),
}
ASSISTANT: dict[str, Any] = {
    "inputs_embeds": ("b", "t", 64),
    "shared_kv_states": {
        "sliding_attention": (("b", 2, "t", 8), ("b", 2, "t", 8)),
        "full_attention": (("b", 2, "t", 16), ("b", 2, "t", 16)),
    },
}

# model_type -> the inputs of a type that takes others than its main input.
INPUTS: dict[str, dict[str, Any]] = {
    "gemma4_assistant": ASSISTANT,
    "gemma4_unified_assistant": ASSISTANT,
    "mllama_text_model": {"input_ids": ("b", "t"), "cross_attention_states": ("b", 5, 32)},
    "musicgen_decoder": {"input_ids": ("4b", "t")},
    "musicgen_melody_decoder": {"input_ids": ("4b", "t")},
}

# Parameters whose first values mean something (decay rates and the like): only jittered.
KEEP = r"A_log$|\.D$|dt_bias$|dt_proj\.bias$|time_decay$|time_first$"
# Parameters without a gradient that the constructor computes (sinusoids): left alone.
COMPUTED = r"embed_positions\.weight$"
# Buffers that training sets: randomised as parameters are. Others are left alone.
LEARNED = r"(correction_bias|expert_bias|balancing_biases|layer_scalar)$"
# Buffers that hold choices out of so many: drawn.
TABLES = {"tid2eid": 4}

# Causal types that cannot be built tiny, each with the reason.
UNBUILDABLE: dict[str, str] = {
    "gemma3n": "its vision tower is TimmWrapperModel, which needs timm and PIL; neither is among the"
    " development dependencies (its language model is built as gemma3n_text)",
}
