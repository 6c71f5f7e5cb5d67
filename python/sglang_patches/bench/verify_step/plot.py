"""plot.png of a verify-step folder: cycles as stacked parts, a panel for each context, beside their floors.

matplotlib is imported only here, and a folder without it has no plot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_patches.bench.plots import save
from sglang_patches.bench.verify_step import rows

# Told apart by colour-blind people too (Okabe and Ito).
_COLOURS = {
    "draft_decode": "#E69F00",
    "verify": "#0072B2",
    "decode": "#56B4E9",
    "sampling": "#CC79A7",
    "draft_extend": "#009E73",
    "host_gap": "#BBBBBB",
}


def draw(made: Sequence[Mapping[str, Any]], file: Path) -> bool:
    """Draw the rows of the first path there is, graphs if any.

    Args:
        made: as `rows.rows` gives them.
        file: a PNG, replaced.

    Returns: False where there is nothing to draw or no matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    if not made:
        return False
    mode = "graph" if any(row["mode"] == "graph" for row in made) else "eager"
    shown = [row for row in made if row["mode"] == mode]
    contexts = sorted({row["context"] for row in shown})
    widest = max(sum(row["context"] == context for row in shown) for context in contexts)
    figure = Figure(figsize=(max(7, 1.5 + 0.36 * widest), 2.9 * len(contexts) + 0.6), layout="constrained")
    panels = figure.subplots(len(contexts), 1, squeeze=False)
    for panel, context in zip(panels[:, 0], contexts, strict=True):
        _panel(panel, [row for row in shown if row["context"] == context])
        panel.set_title(f"context {context}", loc="left", fontsize=10)
    named: dict[str, Any] = {}
    for panel in panels[:, 0]:  # one context may have parts that another lacks
        handles, labels = panel.get_legend_handles_labels()
        named |= dict(zip(labels, handles, strict=True))
    figure.legend(named.values(), named.keys(), loc="outside upper center", ncols=4, fontsize=9, frameon=False)
    path = {"graph": "CUDA graphs", "eager": "eager"}[mode]
    figure.supylabel(f"ms a cycle, {path}", fontsize=10)
    figure.supxlabel("draft tokens (-: one step without speculation), below: batch size", fontsize=10)
    save(figure, file, dpi=110)
    return True


def _panel(panel: Any, shown: Sequence[Mapping[str, Any]]) -> None:
    """Bars grouped by batch size, in it by draft tokens; the whole cycle's floor as a black line."""
    sizes = sorted({row["batch_size"] for row in shown})
    ordered = sorted(shown, key=lambda row: (row["batch_size"], row["draft_tokens"]))
    at = [index + sizes.index(row["batch_size"]) * 0.8 for index, row in enumerate(ordered)]
    bottoms = [0.0] * len(ordered)
    for name in rows.PARTS:
        if name == "cycle" or not any(name in row["parts"] for row in ordered):
            continue
        heights = [row["parts"].get(name, {}).get("ms", 0.0) for row in ordered]
        panel.bar(at, heights, 0.85, bottom=bottoms, label=name.replace("_", " "), color=_COLOURS[name])
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    known = [(x, row["parts"]["cycle"]["floor_ms"]) for x, row in zip(at, ordered, strict=True) if row["bytes"]]
    if known:
        panel.hlines([y for _, y in known], [x - 0.42 for x, _ in known], [x + 0.42 for x, _ in known], "black",
                     linewidth=1.6, label="floor (bytes)")  # fmt: skip
    panel.set_xticks(at, [str(row["draft_tokens"] or "-") for row in ordered], fontsize=8)
    for size in sizes:
        middle = [x for x, row in zip(at, ordered, strict=True) if row["batch_size"] == size]
        panel.text(sum(middle) / len(middle), -0.13, f"batch {size}", ha="center", va="top", fontsize=8,
                   transform=panel.get_xaxis_transform())  # fmt: skip
    panel.spines[["top", "right"]].set_visible(False)
    panel.margins(x=0.01)
