"""What `make test` runs of tests that have many parameters, or take long; the rest is marked `exhaustive`.

`make exhaustive` runs the rest, and plain pytest everything. Two rules:

- A test over many types of models runs on a dozen, `DOZEN`, which have one of each mechanism.
- `KEPT` says for other tests which parameters stay, by words of their ids; none, if the whole test is long.

Each promise and each method still has its tests in `make test`: what is left out is more of the same.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable

import pytest

DOZEN = """
    gpt2 llama mistral gemma2 gptj bloom falcon olmo2 mixtral gpt_oss mamba qwen3_next bert t5 vit
""".split()
MANY = 8
"""A test over fewer types has chosen them itself."""

SHORT = "ablate_head patch_paris_to_rome read_activation"
KEPT: dict[str, str] = {
    "tests/engine/test_zoo.py::test_nothing_changes_when": "float32",
    "tests/engine/test_zoo.py::test_reading_outputs_gives_what_torch_hooks_see": "float32 bfloat16",
    "tests/engine/test_zoo.py::test_every_call_and_element_has_the_name_the_grammar_gives_it": "float32",
    "tests/engine/test_zoo.py::test_reading_inputs_gives_what_torch_pre_hooks_see": "float32 bfloat16",
    "tests/engine/test_zoo.py::test_edits_by_return_and_in_place_are_the_same_and_equal_a_torch_hook": "float32",
    "tests/engine/test_zoo.py::test_edits_of_inputs_by_return_and_in_place_are_the_same": "float32",
    "tests/engine/test_zoo.py::test_gradients_at_outputs_are_those_of_a_leaf_put_in_their_place": "float32",
    "tests/engine/test_zoo.py::test_the_gradient_of_a_site_asked_for_alone_is_the_same": "frozen",
    "tests/engine/test_zoo.py::test_nothing_changes_with_copies_at_odd_addresses_when": (
        "add_zero_to_everything_in_place"
    ),
    "tests/test_docs.py::test_examples_run": " ".join(f"{name}.py" for name in SHORT.split()),
    "tests/engine/test_programs.py::test_random_programs_observe_what_the_interpreter_predicts": "500",
    "tests/training/test_pocket.py::test_every_held_out_set_is_answered": "",
    "tests/training/test_pocket.py::test_the_tokenizer_is_the_one_the_training_command_builds": "",
    "tests/training/test_pocket.py::test_name_movers_look_at_the_answer_copy_it_and_are_needed_for_it": "",
    "tests/training/test_pocket.py::test_three_heads_that_have_no_part_can_go": "",
    "tests/dialects/transformer_lens/test_demos.py::test_a_demo_gives_the_numbers_of_transformer_lens": (
        "attribution_patching bert brackets grokking grouped_queries head_detector indirect_objects main_demo othello "
        "svd_interpreter t5 transformer_from_scratch"
    ),
    "tests/dialects/transformer_lens/test_studies.py::test_sums_are_waves": "",
    "tests/dialects/transformer_lens/test_studies.py::test_a_head_that_looks_back_feeds_the_heads_that_repeat": "",
    "tests/dialects/transformer_lens/test_studies.py::test_a_head_weighs_the_brackets_that_follow": "",
    "tests/experiments/test_experiments.py::test_the_script_prints_what_the_experiment_prints": "sweep",
    "tests/experiments/test_hostile_files.py::test_no_text_of_many_experiments_becomes_code": "",
    "tests/sites/test_hostile_names.py::test_listing_many_sites_goes_through_them_once": "1000",
    "tests/results/test_hostile_results.py::test_no_text_of_a_result_is_obeyed": "12",
    "tests/sae/test_training.py::test_however_often_it_is_killed_it_ends_as_one_that_was_not": "",
    "tests/files/test_fuzz.py::test_files_of_experiments_and_edits_are_read_or_refused": "0",
    "tests/models/test_models.py::test_a_fresh_check_gives_the_row_on_the_page": (
        "llama falcon bloom mixtral mamba t5 vit"
    ),
    "tests/methods/test_edges.py::test_sixteen_and_sixty_four_bits_agree_to_rounding": "torch.bfloat16",
    "tests/store/test_hostile_stores.py::test_stores_are_read_or_refused": "0",
    "tests/sae/test_hostile_files.py::test_files_of_autoencoders_are_read_or_refused": (
        "saelens/topk saelens/before_6 learned/topk learned/cross llama/old"
    ),
    "tests/models/test_check.py::test_every_promise_holds": "llama bloom",
    "tests/models/test_spread.py::test_two_processes_with_half_of_the_heads_each_see_the_same_stream": "",
    "tests/models/test_batches.py::test_every_request_is_as_by_itself": "llama gpt2 mixtral",
    "tests/models/test_batches.py::test_an_edit_does_what_it_does_in_generate": "llama",
    "tests/jobs/test_ray.py::test_workers_killed_at_random_moments_leave_the_same_bytes": "3",
    "tests/sweeps/test_plans.py::test_rows_may_come_in_any_number_at_a_time": "1 3 8 13 32",
    "tests/sweeps/test_planning.py::test_groups_cost_least_of_all_partitions": "0 1 2 3 4 5",
}


def mark(items: Iterable[pytest.Item], *, whole: bool = True) -> None:
    """Mark what is exhaustive. A kept word that a whole test has not is a mistake."""
    by_test: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        by_test[item.nodeid.split("[")[0]].append(item)
    for name, found in by_test.items():
        if name in KEPT:
            keep, words = KEPT[name].split(), {id(item): _words(item) for item in found}
            missing = set(keep) - set().union(*words.values())
            if missing and whole:
                raise pytest.UsageError(
                    f"tests/selection.py keeps {sorted(missing)} of {name}, which has no such"
                )
            _mark({key: set(keep) & of for key, of in words.items()}, found)
        else:
            types = {id(item): _types(item) for item in found}
            if len(set().union(*types.values())) >= MANY:
                _mark({key: set(DOZEN) & of for key, of in types.items()}, found)


def _mark(kept: dict[int, set[str]], items: list[pytest.Item]) -> None:
    for item in items:
        if not kept[id(item)]:
            item.add_marker(pytest.mark.exhaustive)


def _words(item: pytest.Item) -> set[str]:
    """The parts of an item's id between dashes."""
    return set(item.nodeid.partition("[")[2].removesuffix("]").split("-"))


def _types(item: pytest.Item) -> set[str]:
    """The types of models among an item's parameters."""
    tiny = sys.modules.get("tests.models.tiny")  # there, if any of these tests is
    known = set().union(*tiny.KINDS.values()) if tiny is not None else set()
    given = getattr(item, "callspec", None)
    values = given.params.values() if given is not None else ()
    return {value for value in values if isinstance(value, str) and value in known}
