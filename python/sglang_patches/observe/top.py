"""`sglang-patches top`: a live view of one server from its ``/metrics``, or of several, a line each."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.live import Live

from sglang_patches import api_key as keys
from sglang_patches.document.secrets import mask_text
from sglang_patches.errors import PatchError, told
from sglang_patches.observe.figures import Figures, as_json, figures
from sglang_patches.observe.scrape import Between, Scrape, fetch
from sglang_patches.observe.view import overview, screen

HERE = "http://127.0.0.1:30000"

app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)


class Watch:
    """The last reading of one server, and what it tells with the one before.

    Args:
        read: makes a reading; PatchError where the server gives none.
        url: of the server, as it may be shown.
    """

    def __init__(self, read: Callable[[], Scrape], url: str = "") -> None:
        self._read, self.url = read, url
        self.error: PatchError | None = None
        self._last: Scrape | None = None
        self.found: Figures | None = None
        self.note = ""

    def look(self) -> None:
        """Read once more. A server that gives nothing is told in `note`, and what it told before is kept on screen."""
        try:
            now = self._read()
        except PatchError as error:
            # Rates over the time that it was away would be of no use, and it may come back with counters at zero.
            self._last, self.error = None, error
            self.note = f"no answer, asking again: {str(error).splitlines()[0]}"
            return
        if self._last is not None:
            self.found = figures(Between(self._last, now))
        self._last, self.note, self.error = now, "", None


@app.command()
def top(
    url: Annotated[
        list[str] | None,
        typer.Option(help=f"The server ({HERE} if none is named). Several: give it for each; each has a line."),
    ] = None,
    interval: Annotated[float, typer.Option(help="Seconds between two readings.", min=0.1, max=3600)] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Read twice, print, and end.")] = False,
    as_document: Annotated[bool, typer.Option("--json", help="With --once: print JSON.")] = False,
    svg: Annotated[Path | None, typer.Option(help="With --once: write the screen to this file, too.")] = None,
    api_key: Annotated[
        str,
        typer.Option(help="The server's API key, of several the same; else SGLANG_API_KEY_FILE or SGLANG_API_KEY."),
    ] = "",
) -> None:
    """Watch a server: tokens/s, accept length by position, time of verify and draft, CUDA graphs, all-reduce, KV cache.

    Rates are those between two readings of /metrics (docs/metrics.md). `q` or Ctrl-C ends it. A figure that the server
    does not tell is `-`, and the last lines say why. Where output is no terminal it prints once.

    Exit code: 0 ended or printed, 2 the server cannot be read.
    """
    with told():
        if (as_document or svg) and not once:
            raise PatchError("--json and --svg are for one screen\n  remedy     add --once")
        key = keys.of_requests(api_key)
        urls = dict.fromkeys(url or [HERE])
        watches = [Watch(functools.partial(fetch, each, key), mask_text(each)) for each in urls]
        if once or not sys.stdout.isatty():
            _print_once(watches, interval, as_document, svg)
        else:
            _watch(watches, interval)


def _look(watches: Sequence[Watch]) -> None:
    """Read all once more, at the same time: one that does not answer must not hold up the others."""
    with ThreadPoolExecutor(len(watches)) as pool:
        list(pool.map(Watch.look, watches))


def _shown(watches: Sequence[Watch], width: int) -> RenderableType:
    if len(watches) == 1:
        return screen(watches[0].found, watches[0].url, width, watches[0].note)
    return overview([(watch.url, watch.found, watch.note) for watch in watches], width)


def _first(watches: Sequence[Watch]) -> None:
    """The first reading. One server that cannot be read ends the command with the reason, several if none can be."""
    _look(watches)
    errors = [watch.error for watch in watches if watch.error is not None]
    if len(errors) == len(watches):
        raise PatchError("\n".join(str(error) for error in errors))


def _print_once(watches: Sequence[Watch], interval: float, as_document: bool, svg: Path | None) -> None:
    _first(watches)
    time.sleep(interval)
    _look(watches)
    failed = [watch.error for watch in watches if watch.error is not None]
    if len(watches) == 1 and failed:
        raise failed[0]
    if svg is not None:
        drawn = Console(record=True, file=io.StringIO())
        drawn.print(_shown(watches, drawn.width))
        drawn.save_svg(str(svg), title="sglang-patches top", unique_id="top")
    if as_document:
        told = [None if watch.found is None else as_json(watch.found) for watch in watches]
        whole = told[0] if len(watches) == 1 else dict(zip([watch.url for watch in watches], told, strict=True))
        typer.echo(json.dumps(whole, indent=2))
        return
    console = Console()
    console.print(_shown(watches, console.width))


def _watch(watches: Sequence[Watch], interval: float) -> None:
    _first(watches)
    console = Console()
    with (
        contextlib.suppress(KeyboardInterrupt),
        _keys() as pressed,
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            due = time.monotonic() + interval
            while (left := due - time.monotonic()) > 0:
                # The width is asked again each time: the terminal may have been resized.
                live.update(_shown(watches, console.width), refresh=True)
                if pressed(min(left, 1.0)) == "q":
                    return
            _look(watches)


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """A function that waits so many seconds for a key and gives it, or an empty text; the terminal as it was after."""
    if not sys.stdin.isatty():

        def wait(seconds: float) -> str:
            time.sleep(seconds)
            return ""

        yield wait
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before: list[Any] = termios.tcgetattr(descriptor)

    def key(seconds: float) -> str:
        if not select.select([descriptor], [], [], seconds)[0]:
            return ""
        # Nothing to read any more: the terminal is gone.
        return os.read(descriptor, 1).decode(errors="replace").lower() or "q"

    try:
        tty.setcbreak(descriptor)
        yield key
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
