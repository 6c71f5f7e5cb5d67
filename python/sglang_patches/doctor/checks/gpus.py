"""The GPUs, what connects them, and what forbids it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from sglang_patches.doctor.finding import Finding
from sglang_patches.doctor.host import Host
from sglang_patches.nccl.topology import Link, Topology

# The oldest driver branch for programs built with a CUDA of this major version (NVIDIA, CUDA Toolkit release notes,
# "CUDA Toolkit and minimum required driver version for minor version compatibility").
_OLDEST_DRIVER = {12: "525", 13: "580"}
# Medians in microseconds at 1 and 64 rows of 7168 bfloat16, NCCL as it comes, two H200s, NCCL 2.30.7: through host
# memory, and with peer access, there over NVLink (benchmark/allreduce/README.md).
_HOST_MEMORY, _PEER = (24.8, 68.2), (19.5, 24.9)
_LAYERS = 61  # Kimi-K2.5, where no model is named
_REDUCES_A_LAYER = 2  # after attention and after the MLP or the experts
# Gigabytes a second of one lane in one direction, by PCIe generation, after the encoding (PCI-SIG).
_LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
_HIDDEN, _CHUNK = 7168, 8192  # Kimi-K2.5's hidden size; tokens of a prefill chunk
_BUSY_STATES = 2  # P0 to P2: the link is at the generation it will serve with
_PRIME_SUSPECTS = {
    "GPU not supported": "the driver refuses it for this GPU model (GeForce cards, some virtual GPUs)",
    "chipset not supported": "the driver does not trust this chipset with peer traffic",
    "topology not supported": "the two slots hang on different root complexes and the driver refuses traffic "
    "between them",
    "disabled by a driver option": "an option of the kernel module switches it off",
}


def positions(host: Host) -> list[int]:
    """Positions of the GPUs that the ranks take, as far as there are so many.

    As upstream's engine.py (compute_local_gpu_id) for one host and no pipeline.
    """
    first, step = host.serving.base_gpu, host.serving.gpu_step
    wanted = range(first, first + host.serving.tp * step, step)
    return [position for position in wanted if position < len(host.topology.gpus)]


def serving_gpus(host: Host) -> Topology:
    """The GPUs that the ranks take, in their order, as if no others were visible."""
    return host.topology.subset(positions(host))


def no_peer_access(host: Host) -> list[Link]:
    """Pairs that a server would use whose GPUs cannot reach each other's memory, by their positions on the host."""
    used, off = set(positions(host)), host.topology.peer_access_off
    links = [link for link in host.topology.links if {link.a, link.b} <= used]
    return [link for link in links if off or not (link.read and link.write)]


def driver(host: Host) -> Iterator[Finding]:
    """The driver against the CUDA that torch was built for."""
    name = "driver"
    if not host.topology.gpus:
        if host.driver_present:
            yield Finding(
                name,
                "failure",
                f"an NVIDIA driver is there, but no GPU is usable: {host.topology.absent}",
                "patches and upstream take this for a GPU machine (a driver or /dev/nvidia* exists), and 0 of "
                f"{host.serving.tp} ranks get a GPU",
                "run nvidia-smi; after a driver update reboot or reload the module; in a container pass --gpus all "
                "and check CUDA_VISIBLE_DEVICES",
            )
        elif host.serving.tp > 1:
            yield Finding(
                name,
                "note",
                f"no GPU ({host.topology.absent}), and --tp {host.serving.tp} asks for {host.serving.tp}",
                "nothing is served like this (see GPUs); without GPUs one rank, --tp 1, serves small models on the CPU",
                f"run doctor on the machine with the {host.serving.tp} GPUs, or for this one: --tp 1",
            )
        else:
            yield Finding(
                name,
                "note",
                f"no GPU ({host.topology.absent}): serving is on the CPU, in float32",
                "the bundled 13.8 M model does 87 tok/s on two cores (docs/measured.md); larger ones are out of reach",
                "nothing for the bundled model; for any other use a machine with GPUs",
            )
        return
    if host.torch_cuda == "":
        yield Finding(
            name,
            "failure",
            "torch was built without CUDA",
            f"{len(host.topology.gpus)} GPUs would stand idle",
            "install the CUDA build that SGLang pins: pip install --force-reinstall sglang-patches",
        )
        return
    if host.cuda_problem:
        yield Finding(
            name,
            "failure",
            f"torch cannot start CUDA: {host.cuda_problem}",
            f"0 of {host.serving.tp} ranks get a GPU, though the driver lists {len(host.topology.gpus)}",
            "error 802 is a fabric manager that does not run (systemctl start nvidia-fabricmanager); 803 and 804 are "
            "a libcuda that does not belong to the driver (look for cuda-compat on LD_LIBRARY_PATH)",
        )
        return
    if host.torch_cuda is None or host.driver_cuda is None:
        yield Finding(
            name,
            "warning",
            f"driver {host.driver or 'unknown'}, CUDA of torch {host.torch_cuda or 'unknown'}: not compared",
            f"where it is too old for torch, 0 of {host.serving.tp} ranks get a GPU",
            "see `could not be read` below",
        )
        return
    theirs, ours = int(host.driver_cuda.split(".")[0]), int(host.torch_cuda.split(".")[0])
    seen = f"driver {host.driver} runs CUDA up to {host.driver_cuda}, torch is built for {host.torch_cuda}"
    if theirs < ours:
        yield Finding(
            name,
            "failure",
            seen,
            f"CUDA {ours}.x needs driver {_OLDEST_DRIVER.get(ours, 'of its own branch')} or newer (NVIDIA's release "
            "notes): torch finds no GPU",
            f"install driver {_OLDEST_DRIVER.get(ours, 'for CUDA ' + str(ours))} or newer on the host (not in the "
            "container)",
        )
    else:
        yield Finding(name, "ok", seen)


def count(host: Host) -> Iterator[Finding]:
    """As many GPUs as the server wants, and all alike."""
    name, there, tp = "GPUs", len(host.topology.gpus), host.serving.tp
    first, step = host.serving.base_gpu, host.serving.gpu_step
    placed = f" (--base-gpu-id {first} --gpu-id-step {step})" if (first, step) != (0, 1) else ""
    got = len(positions(host))
    if got < tp and (there or tp > 1):
        yield Finding(
            name,
            "failure",
            f"{there} visible, tensor parallel size is {tp}{placed}",
            f"{tp - got} of {tp} ranks have no GPU: the server does not start",
            f"--tp {max(1, got)}{'' if there else ' (a small model on the CPU)'}, or make the others visible "
            "(CUDA_VISIBLE_DEVICES, --gpus all)"
            + (f"; with {placed[2:-1]} the last rank takes GPU {first + (tp - 1) * step}" if placed else ""),
        )
        return
    models = Counter(gpu.name for gpu in serving_gpus(host).gpus)
    if len(models) > 1:
        kinds = ", ".join(f"{number}x {model}" for model, number in models.items())
        yield Finding(
            name,
            "warning",
            f"unequal GPUs: {kinds}",
            f"every layer waits for the slowest of {sum(models.values())} ranks, and the smallest memory sets the KV "
            "cache of all; NVML's order, shown here, may not be CUDA's",
            "choose equal ones with CUDA_VISIBLE_DEVICES, and set CUDA_DEVICE_ORDER=PCI_BUS_ID",
        )
    else:
        taken = f"; the ranks take GPU {_list(positions(host))}" if placed else ""
        yield Finding(name, "ok", host.topology.describe() + taken)


def peer_access(host: Host) -> Iterator[Finding]:
    """Whether GPUs reach each other's memory, and what forbids it."""
    name, used = "peer access", serving_gpus(host)
    if not used.links:
        yield Finding(name, "ok", "not needed: fewer than two GPUs")
        return
    lacking = no_peer_access(host)
    layers = host.serving.model.layers if host.serving.model and host.serving.model.layers else _LAYERS
    if lacking:
        calls = layers * _REDUCES_A_LAYER
        cost = [calls * (slow - fast) / 1000 for slow, fast in zip(_HOST_MEMORY, _PEER, strict=True)]
        yield Finding(
            name,
            "warning",
            f"none between {_pairs(lacking)} of {len(used.links)} pairs; {_because(host, lacking)}",
            f"all-reduce goes through host memory: {_HOST_MEMORY[0]} us against {_PEER[0]} at 1 row, "
            f"{_HOST_MEMORY[1]} against {_PEER[1]} at 64 (two H200s, peer access there over NVLink, "
            f"benchmark/allreduce); times {calls} calls, {cost[0]:.1f} to {cost[1]:.1f} ms a forward pass (reckoned)",
            _remedy(host, lacking),
        )
        return
    if used.full_nvlink():
        yield Finding(name, "ok", f"all {len(used.links)} pairs have NVLink")
        return
    detours = _detours(host)
    if detours:
        yield Finding(
            name,
            "warning",
            f"allowed on all {len(used.links)} pairs, but {' and '.join(detours)}",
            _detour_costs(host, used),
            _open_the_way(host) + "; then `sglang-patches nccl tune` says what it gains",
        )
        return
    yield Finding(name, "ok", f"allowed on all {len(used.links)} pairs{_unknown_ways(host)}")


def _detour_costs(host: Host, used: Topology) -> str:
    slot = used.gpus[0]
    rate = _LANE.get(slot.pcie_generation or 0, 0) * (slot.pcie_width or 0)
    link = f"{rate:.0f} GB/s a direction" if rate else "one link"
    if host.acs:
        costs = f"peer traffic goes up to the root and back: all GPUs of a switch share its uplink, {link}, "
        "where each pair had its own"
    else:
        costs = f"every peer transfer ({link} at best) is looked up in the IOMMU's tables at the root"
    return costs + "; on some boards it hangs or is wrong (NCCL's guide, troubleshooting, PCI ACS)"


def _pairs(links: list[Link]) -> str:
    named = ", ".join(f"{link.a}-{link.b}" for link in links[:4])
    return f"{len(links)} ({named}{', ...' if len(links) > 4 else ''})"


def _because(host: Host, lacking: list[Link]) -> str:
    if host.topology.peer_access_off:
        variables = [
            f"{key}={host.environment[key]}"
            for key in ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL")
            if key in host.environment
        ]
        return f"switched off for NCCL by {', '.join(variables) or 'its variables'}"
    pairs = {(link.a, link.b) for link in lacking}
    reasons = sorted({refusal.reason for refusal in host.refusals if (refusal.a, refusal.b) in pairs})
    said = "driver says: " + ", ".join(reasons) if reasons else "the driver does not say why"
    also = _detours(host)
    if host.driver_options:
        also.append("module options " + ", ".join(f"{key}={value}" for key, value in host.driver_options.items()))
    if host.container:
        also.append(f"this is a container ({host.container})")
    return said + (f"; {', '.join(also)}" if also else "")


def _detours(host: Host) -> list[str]:
    out = []
    if host.iommu == "translated":
        out.append("the IOMMU translates addresses")
    if host.acs:
        shown = ", ".join(host.acs[:3]) + (", ..." if len(host.acs) > 3 else "")
        out.append(f"ACS redirects peer traffic at {len(host.acs)} switch ports ({shown})")
    return out


def _unknown_ways(host: Host) -> str:
    unknown = [word for word, value in (("IOMMU", host.iommu), ("ACS", host.acs)) if value is None]
    return f" ({' and '.join(unknown)} not readable here)" if unknown else ""


def _open_the_way(host: Host) -> str:
    steps = []
    if host.iommu == "translated":
        steps.append("boot with iommu=pt (or IOMMU off in the firmware, where no virtual machine needs it)")
    if host.acs:
        steps.append("switch ACS off in the firmware, or clear it after each boot: setpci -s BRIDGE ECAP_ACS+6.w=0000")
    return "; ".join(steps)


def _remedy(host: Host, lacking: list[Link]) -> str:
    if host.topology.peer_access_off:
        return "unset these variables, unless peer transfers hang or are wrong here; then `sglang-patches nccl check`"
    reasons = {refusal.reason for refusal in host.refusals}
    steps = [f"{cause}" for reason, cause in _PRIME_SUSPECTS.items() if reason in reasons]
    if "disabled by a driver option" in reasons:
        steps.append(
            "look in /etc/modprobe.d for NVreg_RegistryDwords and remove what names P2P, then reload the module"
        )
    if way := _open_the_way(host):
        steps.append(way)
    if host.container and host.acs is None:
        steps.append("run doctor as root on the host itself, where IOMMU and ACS can be read")
    steps.append("without it keep the profile of pcie-nccl-allreduce and run `sglang-patches nccl tune`")
    return "; ".join(steps)


def pcie_link(host: Host) -> Iterator[Finding]:
    """Each GPU's link against the best that slot and GPU allow."""
    name = "PCIe link"
    if not host.topology.gpus:
        yield Finding(name, "ok", "not needed: no GPU")
        return
    if not host.gpus:
        yield Finding(
            name,
            "note",
            "the links' present state could not be read",
            "a link of half the lanes doubles the time of every large all-reduce, and would not be noticed here (0 "
            "read)",
            "nvidia-smi -q -d PERFORMANCE, and `could not be read` below",
        )
        return
    narrow: list[tuple[int, int, int, int]] = []  # position, lanes now, lanes possible, generation
    slow: list[tuple[int, int, int, int]] = []  # position, generation when busy, generation possible, lanes
    idle = 0
    for index, (gpu, slot) in enumerate(zip(host.gpus, host.topology.gpus, strict=True)):
        lanes = max(filter(None, (slot.pcie_width, gpu.own_width)), default=None)
        best = max(filter(None, (slot.pcie_generation, gpu.own_generation)), default=None)
        if gpu.width and lanes and gpu.width < lanes:
            narrow.append((index, gpu.width, lanes, slot.pcie_generation or best or 0))
        if gpu.generation and best and gpu.generation < best:
            busy = gpu.performance_state is not None and gpu.performance_state <= _BUSY_STATES
            # A link that rests says nothing of the generation it will serve with; what the slot allows does.
            serves = gpu.generation if busy else max(gpu.generation, slot.pcie_generation or best)
            if serves < best:
                slow.append((index, serves, best, gpu.width or lanes or 16))
            else:
                idle += 1
    if narrow:
        _, now, lanes, generation = min(narrow, key=lambda entry: entry[1])
        yield Finding(
            name,
            "warning",
            "fewer lanes than possible: " + ", ".join(f"GPU {i} x{have} of x{able}" for i, have, able, _ in narrow),
            _bandwidth(host, (generation, now), (generation, lanes)),
            "reseat the card and its riser, look for the slot's lanes in the board's manual and the firmware's "
            "bifurcation",
        )
    if slow:
        _, generation, best, lanes = min(slow, key=lambda entry: entry[1])
        yield Finding(
            name,
            "warning",
            "slower than possible: " + ", ".join(f"GPU {i} generation {have} of {able}" for i, have, able, _ in slow),
            _bandwidth(host, (generation, lanes), (best, lanes)),
            "set the slot's link speed to automatic or the highest in the firmware; a bad riser makes a link fall "
            "back: dmesg | grep -i aer",
        )
    if not narrow and not slow:
        shown = sorted({f"generation {slot.pcie_generation} x{slot.pcie_width}" for slot in host.topology.gpus})
        resting = f"; {idle} at a lower generation while idle, which is normal" if idle else ""
        yield Finding(name, "ok", ", ".join(shown) + resting)


def _bandwidth(host: Host, now: tuple[int, int], best: tuple[int, int]) -> str:
    have, able = (_LANE.get(generation, 0) * lanes for generation, lanes in (now, best))
    if not have or not able:
        return "every transfer of this GPU, and every all-reduce of all of them, has less bandwidth"
    tp = max(2, host.serving.tp)
    # A ring sends 2 (n - 1) / n times the data over each link (Patarasuk and Yuan, 2009).
    data = 2 * (tp - 1) / tp * _CHUNK * _HIDDEN * 2 / 1e9
    return (
        f"{have:.0f} of {able:.0f} GB/s a direction, and a ring runs at its slowest link: all-reduce of a prefill "
        f"chunk of {_CHUNK} tokens (Kimi-K2.5, {tp} GPUs) takes {data / have * 1000:.1f} ms in place of "
        f"{data / able * 1000:.1f}, {_REDUCES_A_LAYER} times a layer (reckoned from link rates)"
    )


def numa(host: Host) -> Iterator[Finding]:
    """Whether this process may run next to its GPUs."""
    name = "NUMA"
    used = serving_gpus(host).gpus
    places = {gpu.numa_node for gpu in used if gpu.numa_node is not None}
    if not used or len(host.nodes) < 2 or not places:
        yield Finding(name, "ok", f"{len(host.nodes) or 'unknown number of'} node(s), nothing to place")
        return
    allowed = {node.number for node in host.nodes if set(node.cpus) & set(host.cpus)}
    far = [
        position
        for position, gpu in zip(positions(host), used, strict=True)
        if gpu.numa_node is not None and gpu.numa_node not in allowed
    ]
    if far:
        yield Finding(
            name,
            "warning",
            f"this process may use CPUs of node {_list(sorted(allowed))} only; GPUs {_list(far)} are on node "
            f"{_list(sorted(places - allowed))}",
            f"{len(far)} of {len(used)} ranks launch kernels and stage host memory across sockets, where passes that "
            "no CUDA graph holds are bound by the host: 32.6 ms a cycle against 3.67 with graphs (docs/measured.md)",
            "widen taskset, --cpuset-cpus or the Slurm allocation to both nodes, or choose GPUs of the allowed node",
        )
    if host.numa_balancing:
        yield Finding(
            name,
            "warning",
            "the kernel's automatic NUMA balancing is on",
            f"it unmaps pages of the {len(used)} ranks' staging buffers to watch their use, and a rank that faults "
            "holds up all others at the next all-reduce (NVIDIA and AMD tuning guides switch it off)",
            "sysctl kernel.numa_balancing=0",
        )
    if not far and not host.numa_balancing:
        yield Finding(name, "ok", f"GPUs on node {_list(sorted(places))}, CPUs allowed on {_list(sorted(allowed))}")


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"
