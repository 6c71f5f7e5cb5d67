"""What the installed SGLang wants of ``sgl_kernel`` on a CPU, read from its source, is there, or absent where it asks.

SGLang's modules reach ``sgl_kernel`` in three ways: an import that must succeed, an import or ``hasattr`` that may fail
(a probe: it then uses something else), and ``torch.ops.sgl_kernel``. What we do not implement must resolve in the first
case, so that the module loads, and must not in the second, or SGLang would take a path that cannot run.
"""

from __future__ import annotations

import ast
import functools
import importlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import lane_table
import pytest
import torch
from packaging.version import parse

import sgl_kernel_cpu
from sgl_kernel_cpu.absent import PROBED_BY, NotProvided
from sgl_kernel_cpu.ops import READ_AT_IMPORT

# How SGLang's modules spell what they branch on at import, with its value on a CPU without AMX.
ON_CPU = {
    **{f"{prefix}is_{device}": False for prefix in ("", "_") for device in ("cuda", "hip", "xpu", "musa", "npu")},
    **dict.fromkeys(["_is_cuda_alike", "_is_cpu_amx_available", "_is_amx_available", "TYPE_CHECKING"], False),
    **dict.fromkeys(["is_cpu", "_is_cpu"], True),
}


@dataclass(frozen=True)
class Use:
    """One reference; ``name`` is dotted below ``sgl_kernel``, empty for the package; ``via`` import, ops or hasattr."""

    where: str
    via: str
    name: str
    in_function: bool
    probe: bool


def on_cpu(test: ast.expr) -> bool | None:
    """What the condition is on a CPU; None if it depends on something else."""
    if isinstance(test, ast.Call) and not test.args:
        return on_cpu(test.func)
    if isinstance(test, ast.Attribute):
        return ON_CPU.get(test.attr)
    if isinstance(test, ast.Name):
        return ON_CPU.get(test.id)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        value = on_cpu(test.operand)
        return None if value is None else not value
    if isinstance(test, ast.BoolOp):
        values, decisive = [on_cpu(v) for v in test.values], isinstance(test.op, ast.Or)
        if decisive in values:
            return decisive
        return None if None in values else not decisive
    return None


def _ops_name(node: ast.expr) -> str | None:
    """``x`` of ``torch.ops.sgl_kernel.x``."""
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch.ops.sgl_kernel":
        return node.attr
    return None


def _uses(node: ast.AST, where: str, in_function: bool, probe: bool) -> Iterator[Use]:
    if isinstance(node, ast.If):
        value = on_cpu(node.test)
        branches = [node.test, *(node.body if value is not False else []), *(node.orelse if value is not True else [])]
        for child in branches:
            yield from _uses(child, where, in_function, probe)
        return
    if isinstance(node, ast.Try):
        for child in node.body:
            yield from _uses(child, where, in_function, probe=True)
        for child in [*node.handlers, *node.orelse, *node.finalbody]:
            yield from _uses(child, where, in_function, probe)
        return
    here = f"{where}:{getattr(node, 'lineno', 0)}"
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        in_function = True
    elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sgl_kernel":
        submodule = (node.module or "").partition(".")[2]
        for alias in node.names:
            yield Use(here, "import", f"{submodule}.{alias.name}".lstrip("."), in_function, probe)
    elif isinstance(node, ast.Import):
        for alias in node.names:
            root, _, rest = alias.name.partition(".")
            if root == "sgl_kernel":
                yield Use(here, "import", rest, in_function, probe)
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("hasattr", "getattr"):
        if ast.unparse(node.args[0]) == "torch.ops.sgl_kernel" and isinstance(node.args[1], ast.Constant):
            yield Use(here, "hasattr", str(node.args[1].value), in_function, True)
    elif isinstance(node, ast.expr) and (name := _ops_name(node)):
        yield Use(here, "ops", name, in_function, probe)
    for child in ast.iter_child_nodes(node):
        yield from _uses(child, where, in_function, probe)


@functools.cache
def uses() -> list[Use]:
    """Every reference in the served part of the installed SGLang that a CPU can reach."""
    spec = find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    found: list[Use] = []
    for part in ("srt", "kernels"):
        for file in sorted((root / part).rglob("*.py")):
            text = file.read_text(encoding="utf-8")
            if "sgl_kernel" in text:
                found += _uses(ast.parse(text), str(file.relative_to(root)), in_function=False, probe=False)
    return found


def resolve(name: str) -> object:
    """What ``from sgl_kernel[.submodule] import name`` gives with our build; ImportError if nothing."""
    submodule, _, last = name.rpartition(".")
    module = importlib.import_module("sgl_kernel_cpu" + f".{submodule}".rstrip("."))
    if not last:
        return module
    try:
        return getattr(module, last)
    except AttributeError:
        return importlib.import_module(f"{module.__name__}.{last}")


def test_the_scan_sees_what_is_known_to_be_there() -> None:
    names = {(use.via, use.name) for use in uses()}
    assert ("import", "build_tree_kernel_efficient_cpu") in names
    assert ("import", "merge_state_v2") in names
    assert ("ops", "murmur_hash32_cpu") in names or ("ops", "fused_gdn_gating_cpu") in names
    assert ("hasattr", "convert_weight_packed") in names
    assert len(names) > 40


def test_imports_that_must_succeed_do() -> None:
    failed = []
    for use in uses():
        if use.via == "import" and not use.probe and not use.in_function:
            try:
                resolve(use.name)
            except ImportError as error:
                failed.append((use, error))
    assert not failed


def test_probes_see_what_is_provided_and_nothing_else() -> None:
    wrong = []
    for use in uses():
        if use.via == "import" and use.probe and use.name:
            try:
                found = resolve(use.name)
            except ImportError:
                continue
            if isinstance(found, NotProvided):
                wrong.append(use)
    assert not wrong


def test_no_name_is_hidden_without_need() -> None:
    probed = [f"{use.name}." for use in uses() if use.via == "import" and use.probe]
    assert not [
        name for name in PROBED_BY[lane_table.release()] if not any(probe.startswith(f"{name}.") for probe in probed)
    ]


def test_operators() -> None:
    """Those read at import exist, those probed for do not, and those we stand in for are read at import somewhere."""
    if hasattr(torch.ops.sgl_kernel, "convert_weight_packed"):
        pytest.skip("another build of sgl_kernel has registered its operators in this process")
    read = {use.name for use in uses() if use.via == "ops" and not use.in_function and not use.probe}
    probed = {use.name for use in uses() if use.via == "hasattr"}
    assert read <= set(READ_AT_IMPORT)
    if lane_table.release() == max(PROBED_BY, key=parse):
        assert read == set(READ_AT_IMPORT)
    assert all(hasattr(torch.ops.sgl_kernel, name) for name in read)
    assert not [name for name in probed if hasattr(torch.ops.sgl_kernel, name)]


@pytest.mark.parametrize("call", ["merge_state_v2", "mamba.causal_conv1d_fn_cpu", "spatial"])
def test_what_is_missing_says_so_when_called(call: str) -> None:
    function = resolve(call)
    assert callable(function)
    with pytest.raises(NotImplementedError, match=rf"sgl_kernel\.{call} is not provided by the CPU build"):
        function(torch.zeros(1))
    with pytest.raises(NotImplementedError, match="rmsnorm_cpu"):
        torch.ops.sgl_kernel.rmsnorm_cpu(torch.zeros(1))


def test_every_public_name_is_a_function() -> None:
    assert all(callable(getattr(sgl_kernel_cpu, name)) for name in sgl_kernel_cpu.__all__)
    assert not [n for n in sgl_kernel_cpu.__all__ if isinstance(getattr(sgl_kernel_cpu, n), NotProvided)]


def test_loads_twice_in_a_process_under_two_names() -> None:
    code = (
        "import importlib.util, sys, sgl_kernel_cpu as first\n"
        "folder = first.__path__[0]\n"
        "spec = importlib.util.spec_from_file_location('sgl_kernel', folder + '/__init__.py',"
        " submodule_search_locations=[folder])\n"
        "module = sys.modules['sgl_kernel'] = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "from sgl_kernel.speculative import verify_tree_greedy_cpu, reconstruct_indices_from_tree_mask\n"
        "import sgl_kernel.mamba, torch\n"
        "torch.ops.sgl_kernel.murmur_hash32_cpu.default(torch.zeros(1), torch.zeros(1), torch.zeros(1))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
