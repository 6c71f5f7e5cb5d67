"""Which tests hold for the installed lane: those of its patches, less what the table below names."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

from sglang_patches import series, upstream

HERE = Path(__file__).parent
REPO = HERE.parent

_NAMES = "the functions and Triton kernels that are compared have other names there"
_ONE_VOTE = "data-parallel ranks have one vote for decode and draft decode"
_NO_TRAIL = "resolved arguments do not tell who switched decode graphs off, so the reason is off_other"
_PCIE = "runtime/test_pcie_nccl_allreduce.py::"
_RANKS = "runtime/test_pcie_nccl_allreduce_ranks.py::"
_NO_GRAPHS_ONLY = "NCCL 2.28 cannot make one communicator for graphs alone"
_STATES = "runtime/test_deepseek_v2_embedding_capture_states.py::"
_NO_STREAM = "this lane has no allreduce-fusion-gate, and its layers leave no sum to the next one on a CPU"
_HTTP = "runtime/test_strict_api_http.py::"
_OLLAMA = "transformers 5 gives upstream's Ollama chat a mapping where it expects token ids"
_GUARD = "runtime/test_pcie_nccl_allreduce_guard.py::"
_NO_HOOKS = "torch 2.11 has no hooks on graph capture and replay"
_NO_IPC = "this upstream has no PCIe-IPC all-reduce"
_DRIVER = "this FlashInfer pins memory for its wrapper, which takes a GPU driver"
_NO_SLICES = "a verify is not replayed in slices in this lane"

_LOADING = "runtime/test_kimi_k25_eagle3_delegation_loading.py::"
_NATIVE = "runtime/test_kimi_k25_native_processor.py::"
_NO_PROCESSOR = "transformers 4 has no processor for Kimi-K2.5"
_MADE = "upstream's arguments, contexts or runners are made as 0.5.23 makes them"
_STAND_IN = "the stand-in for sgl_kernel has the names that 0.5.23 imports, not those of this release alone"
_LANE_0_5_9 = "upstream's classes have other names and shapes there: runtime/test_lane_0_5_9.py has what holds"

# What the newest lane alone has.
_NEWER = {
    "tune/test_moe_kernel.py": "`tune moe` calls upstream's kernel where 0.5.23 has it",
    "runtime/test_eagle_verify_cuda_graph_slice_policy.py": _NO_SLICES,
    "runtime/test_eagle_verify_cuda_graph_slices.py": _NO_SLICES,
    f"{_PCIE}test_a_pcie_host_gets_a_built_in_before_workers_start": _NO_GRAPHS_ONLY,
    f"{_PCIE}test_where_upstream_calls_the_communicator_outside_of_graphs_it_is_left_alone": _NO_GRAPHS_ONLY,
    f"{_RANKS}test_the_communicator_for_graphs_alone_is_told_and_counted_on_every_rank": _NO_GRAPHS_ONLY,
    f"{_RANKS}test_a_communicator_that_was_decided_and_not_made_is_told": _NO_GRAPHS_ONLY,
    f"{_PCIE}test_a_tuned_profile_turns_pcie_ipc_on_up_to_its_crossover": _NO_IPC,
    f"{_RANKS}test_pcie_ipc_that_comes_late_on_one_rank_is_used_by_none": _NO_IPC,
    f"{_RANKS}test_pcie_ipc_is_on_all_ranks_or_on_none": _NO_IPC,
    f"{_RANKS}test_a_workspace_that_one_rank_cannot_build_is_used_by_none": _NO_IPC,
}

# By lane: file, file::test, or file::test[case], below test/ -> why it does not hold there. A test of a patch that the
# lane has not needs no entry.
NOT_HERE: Mapping[str, Mapping[str, str]] = {
    "0.5.17": {
        "runtime/test_eagle_verify_cuda_graph.py::test_draft_decode_has_two_reasons_of_its_own": _ONE_VOTE,
        "runtime/test_eagle_verify_cuda_graph.py::test_who_switched_graphs_off": _NO_TRAIL,
        "runtime/test_eagle_verify_cuda_graph.py::test_the_hooks_named_here_are_upstreams": _NO_TRAIL,
        "runtime/test_eagle_verify_cuda_graph.py::test_switched_off_graphs_are_told_by_the_resolution": _NO_TRAIL,
        "runtime/test_eagle_verify_cuda_graph_coverage.py::test_require_names_what_switched_graphs_off": _NO_TRAIL,
        **_NEWER,
        f"{_STATES}test_no_rank_captures_a_partial_sum_where_all_reduce_is_fused": _NO_STREAM,
        f"{_STATES}test_ranks_find_out_whether_they_captured_parts_of_sums": _NO_STREAM,
        "sgl_kernel/test_upstream_kernels.py::test_equal_to_upstreams_kernels": _NAMES,
        f"{_HTTP}test_good_requests_reach_the_scheduler[ollama]": _OLLAMA,
        f"{_HTTP}test_bad_requests_get_a_400_that_names_the_thing_and_no_file[no messages for Ollama]": _OLLAMA,
        f"{_HTTP}test_good_requests_reach_the_scheduler[anthropic]": "upstream tells the test's stop as a 500 there",
        "runtime/test_flashinfer_mla_gather_cast.py::test_flashinfers_wrapper_has_what_is_asked_of_it": _DRIVER,
        f"{_GUARD}test_only_the_expected_communicator_is_made_for_graphs_and_followed": _NO_HOOKS,
        f"{_GUARD}test_a_graph_whose_capture_could_not_be_followed_counts_as_having_calls": _NO_HOOKS,
        f"{_GUARD}test_a_replay_that_cannot_be_ordered_waits_on_the_host": _NO_HOOKS,
    },
    "0.5.9": {
        "runtime/test_deepseek_v2_embedding_capture.py": _LANE_0_5_9,
        "runtime/test_deepseek_v2_embedding_capture_layer_ids.py": _LANE_0_5_9,
        f"{_STATES}test_no_rank_captures_a_partial_sum_where_all_reduce_is_fused": _LANE_0_5_9,
        f"{_STATES}test_ranks_find_out_whether_they_captured_parts_of_sums": _LANE_0_5_9,
        "runtime/test_eagle_verify_cuda_graph.py": _LANE_0_5_9,
        "runtime/test_eagle_verify_cuda_graph_added_sizes.py": _LANE_0_5_9,
        "runtime/test_eagle_verify_cuda_graph_coverage.py": _LANE_0_5_9,
        **_NEWER,
        "runtime/test_pcie_nccl_allreduce_guard.py": _NO_GRAPHS_ONLY,
        "runtime/test_kimi_k25_eagle3_delegation.py::test_images_with_context_parallel_prefill_are_refused": _MADE,
        "runtime/test_kimi_k25_eagle3_delegation.py::test_a_draft_served_in_another_dtype_is_refused": (
            "this release takes the test's target for float16 too, so that the two do not differ"
        ),
        f"{_LOADING}test_context_parallel_prefill_runs_the_body_and_the_head_of_the_language_model": _MADE,
        f"{_LOADING}test_an_encoder_only_node_says_why_it_has_no_answer": "there is no encoder node of this model",
        f"{_LOADING}test_a_draft_without_captured_states_is_loaded": "upstream's draft always has fc",
        "runtime/test_kimi_k25_eagle3_delegation_alarm.py::test_one_rank_of_a_group_tells": _MADE,
        "runtime/test_cpu_eagle3.py::test_verify_sees_prefix_and_ancestors": _MADE,
        "runtime/test_cpu_eagle3.py::test_draft_extend_is_causal": _MADE,
        "runtime/test_cpu_eagle3.py::test_draft_decode_reads_its_own_branch": _MADE,
        f"{_NATIVE}test_images_cut_here_are_those_of_transformers": _NO_PROCESSOR,
        f"{_NATIVE}test_stated_token_count_is_what_preprocessing_makes": _NO_PROCESSOR,
        f"{_NATIVE}test_the_plan_for_older_releases_is_upstreams": "this release has no such plan",
        f"{_NATIVE}test_text_alone_is_only_tokenised": _NO_PROCESSOR,
        f"{_NATIVE}test_copies_as_upstream_copies_processors": _NO_PROCESSOR,
        "runtime/test_metrics.py": _LANE_0_5_9,
        "runtime/test_provenance.py": _LANE_0_5_9,
        "runtime/test_cpu_spec_sampling.py": _LANE_0_5_9,
        "runtime/test_cpu_spec_sampling_trees.py": _LANE_0_5_9,
        "sgl_kernel/test_upstream_kernels.py": _STAND_IN,
        "sgl_kernel/test_upstream_names.py": _STAND_IN,
    },
}


@functools.cache
def release() -> str:
    """The installed upstream release; empty where there is none."""
    installed = upstream.locate()
    return installed.release if installed else ""


@functools.cache
def nccl() -> str:
    """Version of the installed NCCL package, for whichever CUDA."""
    found = [entry.version for entry in distributions() if entry.name.startswith("nvidia-nccl-cu")]
    return found[0]


def tokenizer(path: Path) -> Any:
    """The checkpoint's tokenizer, by whichever transformers the lane has."""
    from transformers import AutoTokenizer

    from sglang_patches.runtime.kimi_k25_native_processor import tokens_as_read

    older = tokens_as_read(str(path)) if int(version("transformers").split(".")[0]) < 5 else {}
    return AutoTokenizer.from_pretrained(path, **older)


def has(patch: str) -> bool:
    """Whether the installed lane has this patch."""
    return patch in series.load(release(), REPO / "patches").by_name


@functools.cache
def _lacking() -> frozenset[str]:
    """Patches of some lane that the installed one has not, as the names of their test files begin."""
    folder = REPO / "patches"
    lanes = series.releases(folder)
    if release() not in lanes:
        return frozenset()
    everywhere = {patch.name for lane in lanes for patch in series.load(lane, folder).patches}
    here = set(series.load(release(), folder).by_name)
    return frozenset(f"test_{name.replace('-', '_')}" for name in everywhere - here)


def why_not(path: Path, test: str = "") -> str:
    """Why a test file, or one test of it, does not hold for the installed lane; empty where it does."""
    if HERE not in path.parents:
        return ""
    if (lane := re.match(r"test_lane_(\d+_\d+_\d+)$", path.stem)) and lane[1].replace("_", ".") != release():
        return f"is for lane {lane[1].replace('_', '.')} alone"
    if path.parent.name == "runtime" and any(path.stem.startswith(name) for name in _lacking()):
        return f"lane {release()} has no such patch"
    named = path.relative_to(HERE).as_posix()
    table = NOT_HERE.get(release(), {})
    return table.get(f"{named}::{test}" if test else named, "")
