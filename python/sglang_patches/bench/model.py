"""What a measurement is made of: arms, turns, samples, and the result that keeps them.

An *arm* is one way to serve. A *turn* is the life of one server: started, warmed up, measured, ended; a turn gives one
figure of each kind, and turns (not requests, which share a process) are what statistics count. A *block* is a set of
turns that are compared with each other, one of each arm; blocks alternate their order (ABBA) so that a drift cancels.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from sglang_patches.document.schema import Document

#: Whether more is better, for each figure of a turn; figures not named here are told but never judged.
HIGHER_IS_BETTER: dict[str, bool] = {
    "tokens_per_s": True,
    "ttft_ms_p50": False,
    "tpot_ms_p50": False,
    "tpot_ms_p95": False,
    "tpot_ms_p99": False,
    "verify_ms": False,
    "accept_length": True,
    "graph_share": True,
}


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Arm(_Part):
    """One way to serve: what is added to the command and environment that all arms share."""

    name: str = Field(description="Short and unique in a run: a, b, none, pristine, ...")
    spec: str = Field(description="As the person wrote it.")
    patches: str = Field(default="", description="Value of SGLANG_PATCHES; empty: each patch's default.")
    environment: dict[str, str] = Field(default_factory=dict)
    arguments: list[str] = Field(default_factory=list, description="Server arguments, after the shared ones.")
    python: str = Field(default="", description="Interpreter that serves; empty: this one.")


class Sample(_Part):
    """One request. Times in seconds."""

    turn: int
    arm: str
    prompt: int = Field(description="Index in the workload's prompts.")
    prompt_tokens: int
    output_tokens: int
    sent: float = Field(description="When it was sent, from the beginning of the turn's measured part.")
    latency: float
    ttft: float = Field(description="From sending to the first tokens.")
    itl: list[float] = Field(description="Times between chunks; under speculation a chunk may hold several tokens.")
    verify_passes: int | None = Field(default=None, description="Target verify passes; null without speculation.")
    first_tokens: int = Field(
        default=1,
        description="Tokens of the first chunk: more than the prefill's one where a busy server joins chunks.",
    )
    first_passes: int = Field(default=0, description="Target verify passes that the first chunk tells.")
    output_sha256: str | None = Field(description="Of the output token ids, as comma-joined decimals; null if unknown.")
    error: str = ""


class Turn(_Part):
    """The life of one server."""

    index: int = Field(description="Position in the schedule, from 0.")
    block: int = Field(description="Turns of one block are compared with each other.")
    arm: str
    ended: str = Field(default="", description="UTC, ISO 8601: when its measured part was over; empty where not told.")
    ready_s: float = Field(description="From starting the process to answering /ready.")
    figures: dict[str, float] = Field(description="By the names of HIGHER_IS_BETTER, and others.")
    output_sha256: str | None = Field(description="Over all outputs, in order of prompts; equal means equal tokens.")
    document: Document | None = Field(description="Code state that the server told; null where it cannot (pristine).")
    server_args: dict[str, Any] | None = Field(
        default=None, description="Resolved arguments, where there is no document to tell them. Secrets are masked."
    )
    outcomes: dict[str, Any] = Field(default_factory=dict, description="What each patch did, as /server_info tells.")
    retried: str = Field(
        default="", description="Why this turn was measured by a second server; its first one's samples are not kept."
    )
    log: str = Field(default="", description="The server's log, relative to the result folder.")


class Workload(_Part):
    """What every server is asked, so that turns are the same work."""

    name: str
    prompts_sha256: str
    prompts: int
    prompt_tokens: int = Field(description="Of each prompt, exactly.")
    output_tokens: int = Field(description="Of each answer, exactly: the end token is ignored.")
    concurrency: int
    warm_up: int = Field(description="Requests before each turn's measured part.")


class Result(_Part):
    """result.json of a result folder.

    Samples lie beside it in samples.jsonl, one `Sample` a line; those of kind verify-step are records of its own.
    """

    kind: Literal["ab", "factorial", "bisect", "compare-upstream", "verify-step"]
    schema_version: Literal[2] = 2
    name: str = Field(description="Of the folder.")
    headline: str = Field(description="The finding, in one sentence.")
    command: list[str] = Field(description="What made it, as typed; secrets masked.")
    when: str = Field(description="When measuring ended: UTC, ISO 8601.")
    arms: list[Arm]
    workload: Workload | None = None
    turns: list[Turn] = Field(default_factory=list)
    allowed: list[str] = Field(default_factory=list, description="Differences between arms that --allow let pass.")
    analysis: dict[str, Any] = Field(description="By kind: verdicts, effects, the suspects, or the table of phases.")
    document: Document | None = Field(default=None, description="Code state of the measuring process.")
