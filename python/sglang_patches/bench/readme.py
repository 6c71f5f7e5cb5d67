"""README.md of a result folder, made from its result."""

from __future__ import annotations

import re

from sglang_patches.bench import findings, words
from sglang_patches.bench.model import Result
from sglang_patches.bench.tables import Table


def text(result: Result, samples: dict[str, int], plot: bool) -> str:
    """The page as Markdown.

    Args:
        samples: raw samples by arm.
        plot: whether the folder has a plot.png.
    """
    parts = [f"# {escaped(result.name)}", f"**{escaped(result.headline)}**"]
    document = words.any_document(result)
    where = escaped(words.machine(document)) if document else "a machine that told nothing about itself"
    parts.append(f"`bench {result.kind}`, {escaped(result.when)}, on {where}.")
    if plot:
        parts.append("![plot](plot.png)")
    parts.append("## Finding")
    parts += [markdown(table) for table in findings.tables(result)] or ["No analysis."]
    parts += list(filter(None, [_bullets(list(map(escaped, findings.notes(result))))]))
    parts += ["## How to read it", words.HOW_TO_READ[result.kind]]
    parts += ["## Make it again", fenced(words.command(result.command))]
    if asked := words.workload(result):
        parts.append(f"Every server is asked the same: {escaped(asked)}.")
    parts.append("## Code state")
    parts += _arms(result)
    parts += ["## Allowed", _bullets([f"`--allow {entry}`" for entry in result.allowed]) or _nothing_allowed(result)]
    parts += ["## Files", _files(result, samples, plot)]
    return "\n\n".join(parts) + "\n"


def _arms(result: Result) -> list[str]:
    parts = []
    for arm in result.arms:
        document = words.document_of(result, arm.name)
        adds = words.arm(arm)
        lines = [f"**{escaped(arm.name)}** ({inline(arm.spec)}): {inline(adds) if adds else 'nothing added'}"]
        lines += [escaped(line) for line in words.code(document)] if document else []
        parts.append("\n".join([lines[0], "", _bullets(lines[1:])]).strip())
    if not any(words.document_of(result, arm.name) for arm in result.arms) and result.document:
        parts.append("The measuring process:\n\n" + _bullets([escaped(line) for line in words.code(result.document)]))
    if untold := words.untold(result):
        parts.append(f"Told no code state: {escaped(', '.join(untold))}.")
    if unsteady := words.unsteady(result):
        parts.append(f"**Servers of one arm were of several patch sets:** {escaped('; '.join(unsteady))}.")
    for entry in words.apart(result):
        told = f"A is {escaped(entry.baseline)}, B is {escaped(entry.arm)}: {escaped(entry.said)}."
        telling = [escaped(str(one)) for one in entry.differences if one.matters]
        parts.append(told + (f"\n\n{_bullets(telling)}" if len(telling) > 1 else ""))
    return parts


def _nothing_allowed(result: Result) -> str:
    if len(result.arms) < 2:
        return "Nothing."
    if untold := words.untold(result):
        return f"Nothing; of {escaped(', '.join(untold))} only resolved arguments could be compared, as the notes say."
    return "Nothing: outputs were equal and nothing but the selected differences was told apart."


def _files(result: Result, samples: dict[str, int], plot: bool) -> str:
    count = words.samples(samples)
    lines = [
        "`result.json`: everything above and the code state of every server; docs/result.schema.json is its schema",
        f"`samples.jsonl`: every request, one a line ({escaped(count)})" if samples else "",
        "`plot.png`" if plot else "",
    ]
    lines += [f"{inline(turn.log)} and so on: the servers' logs" for turn in result.turns if turn.log][:1]
    return _bullets(list(filter(None, lines)))


def markdown(table: Table) -> str:
    """A table of GitHub's Markdown."""
    titled = f"### {escaped(table.title)}\n\n" if table.title else ""
    lines = ["| " + " | ".join(escaped(column) for column in table.columns) + " |"]
    numbers = [bool(column) and all(cell.number for cell in column) for column in zip(*table.rows, strict=False)]
    numbers += [False] * (len(table.columns) - len(numbers))
    lines.append("|" + "|".join("---:" if right else "---" for right in numbers) + "|")
    lines += ["| " + " | ".join(escaped(cell.text) for cell in row) + " |" for row in table.rows]
    return titled + "\n".join(lines) + (f"\n\n{escaped(table.note)}" if table.note else "")


def _bullets(lines: list[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def escaped(value: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    out = re.sub(r"([\\`*\[\]|<>#])", r"\\\1", " ".join(value.split()))
    # An underscore inside a word is one; at its edge it would be emphasis.
    return re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", out).replace("&", "&amp;")


def inline(value: str) -> str:
    """Code in a line, also where it holds backticks."""
    longest = max(map(len, re.findall(r"`+", value)), default=0)
    ticks = "`" * (longest + 1)
    space = " " if value.startswith("`") or value.endswith("`") else ""
    return f"{ticks}{space}{' '.join(value.split())}{space}{ticks}"


def fenced(value: str) -> str:
    """A block of code, also where it holds fences."""
    longest = max(map(len, re.findall(r"`+", value)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{value}\n{fence}"
