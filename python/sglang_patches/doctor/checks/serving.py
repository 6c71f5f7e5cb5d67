"""What is to be served: model, draft, the memory they need, the port."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_patches.doctor.checks.gpus import positions
from sglang_patches.doctor.finding import Finding
from sglang_patches.doctor.host import Host, Model

_GIB = 1 << 30
# A server without a GPU runs in float32: twice the bytes of stored bfloat16 (serve.py).
_CPU_FACTOR = 2
_CPU_TOKENS = 16384  # serve.py's --max-total-tokens on a CPU


def model(host: Host) -> Iterator[Finding]:
    """Whether the target's files are here and whole."""
    yield from _checkpoint("model", host.serving.model, "no model named: memory and draft were not checked", "--model")


def draft(host: Host) -> Iterator[Finding]:
    """Whether the draft is here and fits the target."""
    name, given = "draft", host.serving.draft
    if given is None or given.problem or not given.here:
        yield from _checkpoint(name, given, "no draft named: serving without speculation", "--draft")
        return
    for refusal in host.serving.draft_refused:
        yield Finding(
            name,
            "failure",
            refusal,
            "the server refuses this draft at start; upstream alone drafts with it at an accept length near 1.0, "
            "that is for nothing",
            "sglang-patches draft check TARGET DRAFT says all of it; train or choose a draft for this target",
        )
    for warning in host.serving.draft_warnings:
        yield Finding(
            name,
            "warning",
            warning,
            "a draft that is read wrongly still serves, at an accept length of 1.0 in place of 2.89 (tiny pair, "
            "docs/measured.md)",
            "compare the accept length in /server_info with the draft's published one",
        )
    if not host.serving.draft_refused and not host.serving.draft_warnings:
        target = host.serving.model
        fits = f"{given.path} fits {target.path}" if target and target.here and not target.problem else given.path
        yield Finding(name, "ok", fits)


def _checkpoint(name: str, given: Model | None, absent: str, option: str) -> Iterator[Finding]:
    if given is None:
        yield Finding(name, "ok", absent)
    elif given.problem:
        remedy = given.remedy or "the folder of a complete checkpoint, or download it again: hf download OWNER/MODEL"
        yield Finding(
            name,
            "failure",
            given.problem,
            "the server ends while loading it: 0 requests are served",
            f"{option}: {remedy}",
        )
    elif not given.here:
        seen, first = "is not on this machine", "the server downloads it first, and "
        if given.unread:
            seen, first = "has a form that only a server reads", ""
        yield Finding(
            name,
            "note",
            f"{given.path} {seen}",
            f"{first}weights, draft and memory were not checked (0 bytes known)",
            f"{given.remedy or f'hf download {given.path}'}; then run doctor again",
        )
    else:
        weights = given.split + given.whole
        yield Finding(
            name,
            "ok",
            f"{given.path}: {_size(weights)} of weights, {given.layers} layers, {given.context_length} positions",
        )


def a_rank(one: Model, tp: int) -> tuple[float, float]:
    """(bytes of weights, bytes of KV cache a token) that each of `tp` ranks holds of this model."""
    # As upstream's ModelConfig.get_num_kv_heads: a rank has at least one head.
    return one.split / tp + one.whole, one.kv_split / min(tp, one.kv_heads or tp) + one.kv_whole


def memory(host: Host) -> Iterator[Finding]:
    """Free memory against weights and KV cache at this tensor-parallel size."""
    name, target = "memory", host.serving.model
    if target is None or not target.here or target.problem:
        yield Finding(name, "ok", "not checked: the model's size is not known")
        return
    models = [one for one in (target, host.serving.draft) if one and one.here and not one.problem]
    if host.topology.gpus:
        yield from _on_gpus(host, target, models)
    elif host.driver_present:
        yield Finding(name, "ok", "not checked: no GPU is usable")
    elif host.serving.tp > 1:
        yield Finding(name, "ok", f"not checked: --tp {host.serving.tp} asks for GPUs, and there is none")
    else:
        yield from _on_cpu(host, models)


def _on_gpus(host: Host, target: Model, models: list[Model]) -> Iterator[Finding]:
    name, tp, fraction = "memory", host.serving.tp, host.serving.memory_fraction
    placed = [position for position in positions(host) if position < len(host.gpus)]
    used = [host.gpus[position] for position in placed]
    free = [gpu.memory_free for gpu in used if gpu.memory_free is not None]
    if not positions(host):
        yield Finding(name, "ok", "not checked: no rank has a GPU")
        return
    if len(free) < len(used) or not free:
        yield Finding(
            name,
            "warning",
            "free GPU memory could not be read",
            f"{_size(sum(a_rank(one, tp)[0] for one in models))} of weights a rank that do not fit end the start "
            "after minutes",
            "nvidia-smi",
        )
        return
    weights, token = (sum(part) for part in zip(*(a_rank(one, tp) for one in models), strict=True))
    least = min(free)
    room = least * fraction - weights
    seen = (
        f"{_size(least)} free on GPU {placed[free.index(least)]}, the fullest of {len(free)}; a rank of {tp} holds "
        f"{_size(weights)} of weights"
    )
    total = used[free.index(least)].memory
    taken = total - least if total else 0
    occupied = f"; {_size(taken)} of it are taken now" if taken > _GIB else ""
    if room <= 0:
        smaller = next(
            (more for more in (2, 4, 8, 16, 32) if more > tp and _weights(models, more) < least * fraction), None
        )
        yield Finding(
            name,
            "failure",
            seen + occupied,
            f"upstream keeps {1 - fraction:.0%} for graphs and activations (--mem-fraction-static {fraction}), so "
            f"{_size(weights - least * fraction)} are missing before the first token of KV cache",
            ("end what holds the GPU (nvidia-smi); " if occupied else "")
            + (
                f"--tp {smaller} needs {_size(_weights(models, smaller))} a rank"
                if smaller
                else "larger GPUs, or weights of fewer bits"
            ),
        )
        return
    tokens = int(room / token) if token else 0
    told = f"{seen}, KV cache {token:,.0f} bytes a token: room for {tokens:,} tokens"
    if tokens < target.context_length:
        yield Finding(
            name,
            "warning",
            told + occupied,
            f"one request at the full {target.context_length:,} positions does not fit; upstream refuses or retracts "
            f"longer ones (--mem-fraction-static {fraction})",
            f"--context-length {max(1, tokens)} or an FP8 KV cache (twice the tokens)"
            + ("; end what holds the GPU (nvidia-smi)" if occupied else ""),
        )
    else:
        yield Finding(name, "ok", told)


def _weights(models: list[Model], tp: int) -> float:
    return sum(a_rank(one, tp)[0] for one in models)


def _on_cpu(host: Host, models: list[Model]) -> Iterator[Finding]:
    name = "memory"
    # Stored weights of bfloat16 become float32, and so does the KV cache.
    need = _CPU_FACTOR * sum(one.split + one.whole + _CPU_TOKENS * (one.kv_split + one.kv_whole) for one in models)
    if host.memory_available is None:
        yield Finding(
            name,
            "warning",
            "available memory could not be read",
            f"the models need {_size(need)} in float32",
            "free -g",
        )
    elif need > host.memory_available:
        yield Finding(
            name,
            "failure",
            f"{_size(host.memory_available)} available, needed {_size(need)}",
            f"weights in float32 and KV cache of {_CPU_TOKENS} tokens do not fit: the kernel ends the server while it "
            "loads",
            "a smaller model (test/models/tiny-kimi), or a machine with GPUs",
        )
    else:
        yield Finding(
            name,
            "ok",
            f"{_size(host.memory_available)} available, needed {_size(need)} (float32, {_CPU_TOKENS} tokens of KV "
            "cache)",
        )


def port(host: Host) -> Iterator[Finding]:
    """Whether the server can bind its port."""
    serving = host.serving
    if serving.port_free:
        yield Finding("port", "ok", f"{serving.port} is free on {serving.bind or 'all addresses'}")
    else:
        yield Finding(
            "port",
            "failure",
            # Hosts that were recorded before do not say who holds it.
            serving.port_seen or f"port {serving.port} is in use",
            "the server ends when it binds it, after the weights have loaded, which takes minutes for 1T parameters",
            serving.port_remedy or f"another --port, or: sglang-patches stop --port {serving.port}",
        )


def _size(number: float) -> str:
    return f"{number / _GIB:.1f} GiB" if number >= _GIB else f"{number / (1 << 20):.0f} MiB"
