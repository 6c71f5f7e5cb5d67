"""Names of upstream's own metrics (0.5.23, ``observability/metrics_collector.py``) that `top` and the dashboard read.

A test looks for each of them in the ``/metrics`` of a real server, so that a rename in another release is found.
"""

from __future__ import annotations

RUNNING = "sglang:num_running_reqs"
QUEUED = "sglang:num_queue_reqs"
TOKEN_USAGE = "sglang:token_usage"
KV_USED = "sglang:kv_used_tokens"
KV_MAX = "sglang:max_total_num_tokens"
# Counted as the scheduler works, label `mode`: prefill_compute, prefill_cache, decode.
TOKENS = "sglang:realtime_tokens_total"
TIME_TO_FIRST_TOKEN = "sglang:time_to_first_token_seconds"
TIME_PER_OUTPUT_TOKEN = "sglang:request_time_per_output_token_seconds"

ALL = (
    RUNNING,
    QUEUED,
    TOKEN_USAGE,
    KV_USED,
    KV_MAX,
    TOKENS,
    f"{TIME_TO_FIRST_TOKEN}_bucket",
    f"{TIME_PER_OUTPUT_TOKEN}_bucket",
)
