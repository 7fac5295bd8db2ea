"""TransformerLens's small functions, by its names: one file per topic."""

from interpose.dialects.transformer_lens.utilities.activations import (
    gelu_fast,
    gelu_new,
    solu,
)
from interpose.dialects.transformer_lens.utilities.data import (
    download_file_from_hf,
    get_dataset,
    get_input_with_manually_prepended_bos,
    get_tokens_with_bos_removed,
    keep_single_column,
    tokenize_and_concatenate,
)
from interpose.dialects.transformer_lens.utilities.defaults import (
    USE_DEFAULT_VALUE,
    LocallyOverridenDefaults,
    get_nested_attr,
    override_or_use_default_value,
    set_nested_attr,
    temporarily_swap_parameter,
)
from interpose.dialects.transformer_lens.utilities.devices import (
    calculate_available_device_cuda_memory,
    determine_available_memory_for_available_devices,
    get_best_available_cuda_device,
    get_best_available_device,
    get_device,
    print_gpu_mem,
    sort_devices_based_on_available_memory,
)
from interpose.dialects.transformer_lens.utilities.initialisation import (
    init_kaiming_normal_,
    init_kaiming_uniform_,
    init_xavier_normal_,
    init_xavier_uniform_,
)
from interpose.dialects.transformer_lens.utilities.losses import (
    lm_accuracy,
    lm_cross_entropy_loss,
)
from interpose.dialects.transformer_lens.utilities.names import (
    get_act_name,
)
from interpose.dialects.transformer_lens.utilities.optional import (
    is_library_available,
)
from interpose.dialects.transformer_lens.utilities.prompts import (
    test_prompt,
)
from interpose.dialects.transformer_lens.utilities.sampling import (
    logits_to_df,
    sample_logits,
)
from interpose.dialects.transformer_lens.utilities.slices import (
    Slice,
    SliceInput,
)
from interpose.dialects.transformer_lens.utilities.statistics import (
    SuccessRateInterval,
    bootstrap_ci,
    derive_generator,
    sign_flip_permutation_pvalue,
    standard_error,
    success_rate_ci,
)
from interpose.dialects.transformer_lens.utilities.tensors import (
    check_structure,
    composition_scores,
    filter_dict_by_prefix,
    get_attention_mask,
    get_corner,
    get_cumsum_along_dim,
    get_matrix_corner,
    get_offset_position_ids,
    is_lower_triangular,
    is_square,
    remove_batch_dim,
    repeat_along_head_dimension,
    to_numpy,
    transpose,
)

__all__ = [
    "USE_DEFAULT_VALUE",
    "LocallyOverridenDefaults",
    "Slice",
    "SliceInput",
    "SuccessRateInterval",
    "bootstrap_ci",
    "calculate_available_device_cuda_memory",
    "check_structure",
    "composition_scores",
    "derive_generator",
    "determine_available_memory_for_available_devices",
    "download_file_from_hf",
    "filter_dict_by_prefix",
    "gelu_fast",
    "gelu_new",
    "get_act_name",
    "get_attention_mask",
    "get_best_available_cuda_device",
    "get_best_available_device",
    "get_corner",
    "get_cumsum_along_dim",
    "get_dataset",
    "get_device",
    "get_input_with_manually_prepended_bos",
    "get_matrix_corner",
    "get_nested_attr",
    "get_offset_position_ids",
    "get_tokens_with_bos_removed",
    "init_kaiming_normal_",
    "init_kaiming_uniform_",
    "init_xavier_normal_",
    "init_xavier_uniform_",
    "is_library_available",
    "is_lower_triangular",
    "is_square",
    "keep_single_column",
    "lm_accuracy",
    "lm_cross_entropy_loss",
    "logits_to_df",
    "override_or_use_default_value",
    "print_gpu_mem",
    "remove_batch_dim",
    "repeat_along_head_dimension",
    "sample_logits",
    "set_nested_attr",
    "sign_flip_permutation_pvalue",
    "solu",
    "sort_devices_based_on_available_memory",
    "standard_error",
    "success_rate_ci",
    "temporarily_swap_parameter",
    "test_prompt",
    "to_numpy",
    "tokenize_and_concatenate",
    "transpose",
]
