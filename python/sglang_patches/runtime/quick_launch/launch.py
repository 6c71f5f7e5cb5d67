"""A ``JITFunction`` of Triton 3.8 whose ``[grid](...)`` goes straight to the native launch where it has been before.

What decides which compiled kernel serves a call is Triton's own specialisation of each argument (`triton.runtime.jit`,
``create_function_from_signature``: type, alignment, equal to 1) with constants and options. The same native function
is asked here, for the same arguments, so the key is as fine as Triton's by construction. Values are left as they come:
what is passed on is what Triton would pass.

What is skipped has no reader: options spelled out as a string, a second look-up under a long string, the dictionary of
bound arguments, launch metadata for hooks that are not there, and ``CudaLauncher``'s scratch memory of no bytes.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from triton import knobs
from triton._C.libtriton import native_specialize_impl
from triton.backends.nvidia.driver import CudaLauncher
from triton.compiler.compiler import CompiledKernel
from triton.runtime import jit
from triton.runtime.driver import driver

# More variants of one kernel than any server has; a caller whose constants never repeat is not to fill the memory.
MAX_VARIANTS = 1024
# `JITFunction.run` has arguments of these names, or takes them for more than options.
NOT_PLAIN = frozenset(("debug", "instrumentation_mode", "grid", "warmup"))

# How names begin that generated code has beside the kernel's own.
OURS = "q_"


@dataclass
class Counts:
    """Of all quick kernels of a process.

    Attributes:
        first: called when the first variant is ready.
        quick: launches that took the quick path, in a list of one that generated code adds to.
        usual: launches that Triton did, by reason.
        variants: compiled kernels that are known by what they were chosen for.
    """

    first: Callable[[], None] = lambda: None
    kernels: int = 0
    quick: list[int] = field(default_factory=lambda: [0])
    usual: Counter[str] = field(default_factory=Counter)
    variants: int = 0


def quicken(jitted: Any, counts: Counts) -> Any:
    """`jitted` itself, made quick; anything but a plain ``JITFunction`` of plain parameters is left as it is.

    So are kernels that are autotuned (Triton calls their ``run``), interpreted or written in Gluon, and parameters with
    an annotation other than ``constexpr``, for which Triton replaces types by those of the annotation.
    """
    if type(jitted) is not jit.JITFunction:
        return jitted
    kinds = {parameter.kind for parameter in jitted.signature.parameters.values()}
    if (
        kinds - {inspect.Parameter.POSITIONAL_OR_KEYWORD}
        or any(parameter.annotation_type for parameter in jitted.params if not parameter.is_constexpr)
        or any(name.startswith(OURS) for name in jitted.arg_names)
    ):
        return jitted
    counts.kernels += 1
    quick: Any = jitted
    # Not a wrapper: Triton has this very object in a registry, asks for its class, and takes it as a global of others.
    quick.__class__ = JITFunction
    quick.counts, quick.quick = counts, _generated(quick, counts, {})
    return quick


def bound(
    kernel: Any, grid: tuple[int, ...], first: int, rest: tuple[Any, ...], options: Mapping[str, Any]
) -> Callable[..., Any]:
    """A launch of `kernel` on `grid` that only the `first` arguments are left for; `rest` and `options` never change.

    Args:
        rest: numbers and tuples of numbers. How Triton specialises them does not change either, and is not asked again.
    """
    if type(kernel) is JITFunction:
        names = kernel.arg_names[first:]
        fixed = dict(zip(names, rest, strict=False)) | dict(options)
        if list(fixed) == names:
            return functools.partial(_generated(kernel, kernel.counts, fixed), grid, _padded(grid))
    return lambda *arguments: kernel[grid](*arguments, *rest, **options)


def _padded(grid: tuple[int, ...]) -> tuple[int, ...]:
    return (*grid, 1, 1)[:3]


class JITFunction(jit.JITFunction[Any]):
    """Triton's, but for ``[grid]``. Triton compares the name of the class, so this one has it, too."""

    counts: Counts
    quick: Callable[..., Any]

    def __getitem__(self, grid: Any) -> Any:
        # A grid that is called gets the bound arguments, which the quick path does not collect.
        if type(grid) is tuple and 1 <= len(grid) <= 3:
            return functools.partial(self.quick, grid, _padded(grid))
        return super().__getitem__(grid)


class Variants:
    """The compiled kernels of one ``JITFunction`` that are known by key, and the way to Triton for all else."""

    def __init__(self, function: Any, counts: Counts) -> None:
        self.function, self.counts = function, counts
        # By specialisation: what the native launch needs, in the order in which generated code takes it.
        self.known: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def usual(self, key: tuple[Any, ...] | None, grid: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Launch by Triton's own `run` and, with a `key`, keep what it chose."""
        reason = unusual(self.function, options)
        self.counts.usual[reason or "new"] += 1
        kernel = self.function.run(*arguments, grid=grid, warmup=False, **options)
        # Hooks and the like may have come while it ran.
        if key is not None and reason is None and unusual(self.function, options) is None:
            self._keep(key, kernel, arguments, options)
        return kernel

    def _keep(self, key: tuple[Any, ...], kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        device = driver.active.get_current_device()
        kernels, keys, target, _, binder = self.function.device_caches[device]
        launcher: Any = getattr(kernel, "_run", None)
        if not (
            type(kernel) is CompiledKernel
            and target.backend == "cuda"
            and type(launcher) is CudaLauncher
            and not launcher.gsan_enabled
            and launcher.global_scratch_size == launcher.profile_scratch_size == 0
        ):
            return
        debug, mode = self.function.debug or knobs.runtime.debug, knobs.compilation.instrumentation_mode
        _, specialization, rest = binder(*arguments, **options, debug=debug, instrumentation_mode=mode)
        name = jit.compute_cache_key(keys, specialization, rest)
        if key[0] != device or kernels.get(name) is not kernel:
            return
        if len(self.known) >= MAX_VARIANTS:
            self.counts.variants -= len(self.known)
            self.known.clear()
        if not self.counts.variants:
            self.counts.first()
        self.counts.variants += key not in self.known
        self.known[key] = (
            kernel,
            name,
            launcher.launch,
            kernel.function,
            launcher.launch_cooperative_grid,
            launcher.launch_pdl,
            kernel.packed_metadata,
            launcher.arg_annotations,
            launcher.kernel_signature,
        )


def unusual(function: Any, options: dict[str, Any]) -> str | None:
    """Why Triton has to launch, whatever the arguments; None where the quick path may. Generated code asks the same."""
    runtime = knobs.runtime
    if runtime.debug or function.debug or knobs.compilation.instrumentation_mode:
        return "debug"
    hooks = (runtime.launch_enter_hook, runtime.launch_exit_hook)
    if function.pre_run_hooks or runtime.add_stages_inspection_hook is not None or not all(map(_idle, hooks)):
        return "hook"
    if globals_changed(function):
        return "globals"
    return None if NOT_PLAIN.isdisjoint(options) else "options"


def _idle(hook: Any) -> bool:
    return type(hook) is knobs.HookChain and not hook.calls


def globals_changed(function: Any) -> bool:
    """Whether a global that the kernel was compiled with has another value now, for which Triton raises."""
    missing = object()
    used = function.used_global_vals.items()
    return any(variables.get(name, missing) != value for (name, _), (value, variables) in used)


def _generated(function: Any, counts: Counts, fixed: Mapping[str, Any]) -> Callable[..., Any]:
    """A function of grid, grid padded to three, and the kernel's own parameters, as Triton generates its binder.

    A look at each hook and setting a launch, since a profiler may set one at any time; no loop and no dictionary.
    Parameters that are `fixed` have their value from there, and no part in what a compiled kernel is known by.
    """
    parameters = [parameter for parameter in function.params if parameter.name not in fixed]
    declared = [
        parameter.name if parameter.default is inspect.Parameter.empty else f"{parameter.name}=default_{parameter.name}"
        for parameter in parameters
    ]
    specialized = [
        parameter.name
        if parameter.is_constexpr
        else f"q_specialize(q_backend, {parameter.name}, {parameter.is_const}, {not parameter.do_not_specialize}, "
        f"{not parameter.do_not_specialize_on_alignment})"
        for parameter in parameters
    ]
    signature, arguments = ("".join(f"{each}, " for each in several) for several in (declared, function.arg_names))
    source = f"""
def dynamic_func(q_grid, q_padded, /, {signature}**q_options):
    q_enter, q_leave = q_runtime.launch_enter_hook, q_runtime.launch_exit_hook
    if (
        q_runtime.debug
        or q_compilation.instrumentation_mode
        or q_runtime.add_stages_inspection_hook is not None
        or type(q_enter) is not q_chain or q_enter.calls
        or type(q_leave) is not q_chain or q_leave.calls
        or q_function.debug
        or q_function.pre_run_hooks
        or q_function.used_global_vals and q_changed(q_function)
        or q_options and not q_plain(q_options)
    ):
        return q_usual(None, q_grid, ({arguments}), q_options)
    q_active = q_driver.active
    q_device = q_active.get_current_device()
    q_kernels, _, _, q_backend, _ = q_function.device_caches[q_device]
    q_key = (q_device, {", ".join(specialized)})
    if q_options:
        q_key += (str(q_options),)
    q_variant = q_known.get(q_key)
    if q_variant is None:
        return q_usual(q_key, q_grid, ({arguments}), q_options)
    (
        q_kernel, q_name, q_launch, q_handle, q_cooperative, q_dependent, q_metadata, q_annotations, q_signature
    ) = q_variant
    if q_kernels.get(q_name) is not q_kernel:
        return q_usual(q_key, q_grid, ({arguments}), q_options)
    q_launch(
        *q_padded, q_active.get_current_stream(q_device), q_handle, q_cooperative, q_dependent, q_metadata,
        None, None, None, None, None, q_annotations, q_signature, ({arguments}),
    )
    q_count[0] += 1
    return q_kernel
"""
    variants = Variants(function, counts)
    namespace: dict[str, Any] = dict(fixed) | {
        f"default_{parameter.name}": parameter.default
        for parameter in parameters
        if parameter.default is not inspect.Parameter.empty
    }
    namespace |= {
        "q_runtime": knobs.runtime,
        "q_compilation": knobs.compilation,
        "q_chain": knobs.HookChain,
        "q_function": function,
        "q_changed": globals_changed,
        "q_plain": NOT_PLAIN.isdisjoint,
        "q_usual": variants.usual,
        "q_driver": driver,
        "q_specialize": native_specialize_impl,
        "q_known": variants.known,
        "q_count": counts.quick,
    }
    exec(source, namespace)
    made: Callable[..., Any] = namespace["dynamic_func"]
    return made
