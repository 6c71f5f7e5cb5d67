"""Every command of README.md and docs/ is run here, or the page says what it needs or which test runs it; and every
subcommand, option, variable, make target, module and route that a page names is one that exists.

What a new page has to do is in docs/writing-docs.md.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sglang_patches.cli import app

from . import commands, known
from .commands import ROOT, Command, Marker, Stage

# Run as they stand: offline, in seconds, without a server, writing only where they stand or below /tmp.
RUN = (
    "list",
    "show",
    "status",
    "verify",
    "doctor",
    "draft check",
    "launch",
    "bench report",
    "bench factorial",
    "nccl check",
    "spec plan",
    "diff",
)
PAGES = {page: commands.read(page) for page in commands.pages()}
COMMANDS = [command for page in PAGES.values() for command in page.commands]


def runs_here(stage: Stage) -> bool:
    """Whether the command is one of those that this test runs."""
    words = stage.arguments
    if stage.program == "make":
        return words == ["help"]
    if stage.program == "python":
        return words[:1] == ["-c"] or words[:2] == ["-m", "sglang_patches.bench.shard"]
    if stage.program != "sglang-patches":
        return not stage.program or stage.program in (".", "source")
    name = commands.signature(stage)
    if name not in RUN:
        return words[-1:] == ["--help"]
    return {
        "launch": "--dry-run" in words,
        "bench factorial": "--plan" in words,
        "nccl check": "gloo" in words,
        "doctor": words.count("8") == 0 or "--recorded" in words,
    }.get(name, True)


def unmarked(command: Command) -> bool:
    return all(marker.kind == "exits" for marker in commands.applying(command))


def wanted_exit(command: Command) -> int:
    return next((int(marker.what) for marker in commands.applying(command) if marker.kind == "exits"), 0)


@pytest.mark.parametrize("page", PAGES)
def test_blocks_are_commands_or_say_what_they_are(page: str) -> None:
    assert not PAGES[page].problems


@pytest.mark.parametrize("page", PAGES)
def test_what_commands_name_exists(page: str) -> None:
    wrong = [f"{command.where}: {problem}" for command in PAGES[page].commands for problem in known.problems(command)]
    wrong += [
        f"{page}:{line}: `{text}`: {problem}"
        for line, text in PAGES[page].spans
        for problem in known.span_problems(text)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_run_or_marked(page: str) -> None:
    wrong = []
    for command in PAGES[page].commands:
        if unmarked(command) and not all(runs_here(stage) for stage in command.stages):
            wrong.append(
                f"{command.where}: {command.text.splitlines()[0]}\n    nothing runs this: put a line above the block, "
                f"<!-- needs: {' | '.join(commands.NEEDS)} --> or <!-- covered by: test/... -->"
            )
        wrong += [f"{command.where}: {problem}" for m in commands.applying(command) for problem in _wrong(m, command)]
        for marker in command.markers:
            block = [other for other in PAGES[page].commands if other.markers is command.markers]
            missing = [text for text in marker.only if not any(text in other.text for other in block)]
            wrong += [
                f"{command.where}: a marker is for {text!r}, which no command of the block has" for text in missing
            ]
    assert not wrong, "\n".join(dict.fromkeys(wrong))


def _wrong(marker: Marker, command: Command) -> Iterator[str]:
    if marker.kind == "needs":
        if marker.what not in commands.NEEDS:
            yield f"needs: {marker.what!r} is not one of {', '.join(commands.NEEDS)}"
        return
    if marker.kind == "exits":
        if not marker.what.isdecimal():
            yield f"exits: {marker.what!r} is no exit code"
        return
    target = ROOT / marker.what
    if not target.is_file() or not marker.what.startswith("test/"):
        yield f"covered by: {marker.what} is no file of test/"
        return
    source = target.read_text(encoding="utf-8")
    for stage in command.stages:
        name = commands.signature(stage)
        if not runs_here(stage) and name not in ("jq", ".") and not commands.mentions(source, name):
            yield f"covered by: {marker.what} does not mention `{name}`"


@functools.cache
def sources_of(folder: str) -> str:
    """All tests below a folder of test/, but for these."""
    files = sorted((ROOT / "test" / folder).rglob("*.py"))
    return "\n".join(file.read_text(encoding="utf-8") for file in files if file.parent != Path(__file__).parent)


def test_commands_in_tables_and_text_are_run_by_some_test() -> None:
    """A code span may be a command's beginning only, so it is not run as it stands: some test mentions what it runs."""
    sources = "\n".join(
        file.read_text(encoding="utf-8")
        for file in (ROOT / "test").rglob("*.py")
        if file.parent != Path(__file__).parent
    )
    wrong = []
    for page, found in PAGES.items():
        for line, text in found.spans:
            if not text.startswith("sglang-patches "):
                continue
            name = commands.signature(commands.split(text)[0])
            group, _, last = name.partition(" ")
            inside = last and f'"{last}"' in sources_of(group)
            if name and name not in RUN and "..." not in name and not inside and not commands.mentions(sources, name):
                wrong.append(f"{page}:{line}: no test mentions `{name}`")
    assert not wrong, "\n".join(wrong)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like the checkout, and takes what commands write."""
    made = tmp_path_factory.mktemp("checkout")
    for entry in ROOT.iterdir():
        if entry.name not in ("docs", ".git", "report.html") and not entry.name.startswith((".venv", "site")):
            (made / entry.name).symlink_to(entry)
    shutil.copytree(ROOT / "docs", made / "docs")
    return made


# Once each, whatever number of pages has it.
HERE = {
    (command.text.partition("  #")[0].strip(), command.prints): command
    for command in COMMANDS
    if unmarked(command) and all(runs_here(stage) for stage in command.stages)
}.values()


@pytest.mark.parametrize("command", HERE, ids=lambda command: f"{command.where} {command.text.splitlines()[0][:60]}")
def test_command(command: Command, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workplace)
    printed = "".join(_run(stage, command, workplace) for stage in command.stages)
    shown = [line.strip() for line in command.prints if line.strip() not in ("", "...")]
    missing = [line for line in shown if line not in printed]
    assert not missing, f"{command.where} shows lines that are not printed:\n" + "\n".join(missing) + f"\n\n{printed}"


def _run(stage: Stage, command: Command, workplace: Path) -> str:
    """What one program prints; it must end as the page says."""
    if stage.program in ("", ".", "source"):
        return ""  # variables, which were looked at above, and the environment, which this is
    if stage.program == "sglang-patches":
        words = list(stage.arguments)
        if words[0] == "doctor" and not {"--port", "--recorded"} & set(words):
            # A server of this machine may hold the default one, which doctor rightly finds fault with.
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                words += ["--port", str(probe.getsockname()[1])]
        done = CliRunner().invoke(app, words, env=stage.variables, prog_name="sglang-patches")
        code, printed = done.exit_code, done.output
    elif stage.program == "python":
        run = subprocess.run([sys.executable, *stage.arguments], text=True, capture_output=True, timeout=120)
        code, printed = run.returncode, run.stdout + run.stderr
        target = command.text.rpartition("> ")[2].strip()
        if code == 0 and target.startswith("docs/"):
            assert run.stdout == (ROOT / target).read_text(encoding="utf-8"), f"{target} is not what the command makes"
    else:
        run = subprocess.run([stage.program, *stage.arguments], text=True, capture_output=True, timeout=120)
        code, printed = run.returncode, run.stdout + run.stderr
    assert code == wanted_exit(command), f"{command.where}: exit code {code}\n{printed}"
    return printed


def test_messages_that_troubleshooting_quotes_are_our_code_s() -> None:
    """First column of the table of what does not start: each quoted message, up to its `...`, is in some literal."""
    text = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    table = text.partition("| the log says |")[2].partition("\n\n")[0]
    rows = [line.split(" | ")[0] for line in table.splitlines()[2:]]
    quoted = [part.strip() for row in rows for span in re.findall(r"`([^`]+)`", row) for part in span.split("...")]
    # Python's own.
    messages = [part for part in quoted if len(part) > 3 and not part.startswith("No module named")]
    assert len(messages) > 12
    sources = re.sub(r'"\s*\n\s*f?"', "", known.our_sources())  # literals in a row are one
    assert not [message for message in messages if message not in sources]


def test_the_reader_of_pages() -> None:
    page = commands.read(
        "x.md",
        "\n".join(
            [
                "<!-- needs: 8 gpus; for: --tp 8, tune -->",
                "",
                "    A=1 sglang-patches list  # all",
                "    curl -s localhost:1/x -d '{",
                '      "a": 1}\' | python -m json.tool > out',
                "",
                "- item",
                "",
                "  ```console",
                "  $ sglang-patches \\",
                "      nccl tune --tp 8",
                "  output",
                "  ```",
                "",
                "```text",
                "no command",
                "```",
                "",
                "    make help",
            ]
        ),
    )
    assert page.problems == []
    listed, asked, tuned, helped = page.commands
    assert (listed.stages, listed.line) == ([Stage({"A": "1"}, "sglang-patches", ["list"])], 3)
    assert [stage.program for stage in asked.stages] == ["curl", "python"]
    assert asked.stages[1].arguments == ["-m", "json.tool"]
    assert (tuned.prints, tuned.markers) == (("output",), ())
    assert commands.signature(tuned.stages[0]) == "nccl tune"
    assert commands.signature(asked.stages[0]) == "/x"
    assert helped.markers == ()
    assert commands.applying(listed) == []
    assert listed.markers[0].only == ("--tp 8", "tune")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("sglang-patches bench speed", "has no command 'speed'"),
        ("sglang-patches list --jsom", "has no option --jsom"),
        ("sglang-patches stop --port many", "valid integer"),
        ("sglang-patches draft check one", "Missing parameter"),
        ("sglang-patches bench ab --a default --b none -- --mem-fraction 0.9", "no option --mem-fraction"),
        ("sglang-patches launch tiny-cpu --no-such 1", "has no option --no-such"),
        ("SGLANG_PATCHES=typo make serve", "unknown patch: typo"),
        ("SGLANG_PATCHES_TYPO=1 make serve", "no variable that our code reads"),
        ("make sevre", "no target sevre"),
        ("make serve MODLE=x", "no variable MODLE"),
        ("make serve ARGS='--hots 0.0.0.0'", "no option --hots"),
        ("python -m sglang.launch_server --speculative-nun-steps 3", "no option --speculative-nun-steps"),
        ("python -m benchmark.oea.kernels", "no module benchmark.oea.kernels"),
        ("python -m benchmark.oea.kernel --nothing", "no option --nothing"),
        ("python -c 'print('", "does not read it"),
        ("curl -s localhost:30000/v1/complete", "the server has no /v1/complete"),
        ("curl -s localhost:30000/generate -d '{\"a\": }'", "no JSON"),
        ("applied: all is well", "no program that the documentation uses"),
    ],
)
def test_wrong_commands_are_found(text: str, problem: str) -> None:
    found = known.problems(Command("x.md", 1, text))
    assert any(problem in one for one in found), found


@pytest.mark.parametrize(
    "text", ["--mem-fraction", "SGLANG_PATCHES_NOTHING", "sglang-patches bench speed", "make sevre"]
)
def test_wrong_code_spans_are_found(text: str) -> None:
    assert known.span_problems(text)


#: Pages on which the server was started by a recipe that wants an API key.
WITH_A_KEY = ("docs/pcie.md", "docs/image.md")


def test_requests_carry_the_key_and_never_on_a_command_line() -> None:
    asking = [(command, stage) for command in COMMANDS for stage in command.stages if stage.program == "curl"]
    for command, stage in asking:
        assert not re.search(r"(?i)authorization|bearer", " ".join(stage.arguments)), (
            f"{command.where}: every user sees it"
        )
        if command.page in WITH_A_KEY:
            assert "@-" in stage.arguments, f"{command.where} is answered with 401: -H @-, from the file with the key"
    assert {command.page for command, _ in asking} >= set(WITH_A_KEY)
    for page in WITH_A_KEY:
        for line, span in PAGES[page].spans:
            assert "Bearer" not in span or "sed " in span, (
                f"{page}:{line}: shown as an argument, it ends up on a command line"
            )


def test_the_environment_of_commands_is_that_of_this_checkout() -> None:
    """What is run above is this checkout's code, whatever else is installed."""
    import sglang_patches

    assert Path(sglang_patches.__file__).is_relative_to(ROOT), os.environ.get("PYTHONPATH")
