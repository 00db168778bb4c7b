"""The samples of a tar file: neighbouring members with one key."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from tarfile import EmptyHeaderError, EOFHeaderError, HeaderError, ReadError  # type: ignore[attr-defined]
from typing import IO, Any, Self

from agnoload.errors import OptionError, warn


class _Member(tarfile.TarInfo):
    """A member whose damaged header is an error: to `tarfile` the archive would end there, and lose the rest unseen."""

    @classmethod
    def fromtarfile(cls, tarfile: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(tarfile)
        except (EOFHeaderError, EmptyHeaderError):
            raise
        except HeaderError as error:
            raise ReadError(f"{error}, at byte {tarfile.offset} of the archive") from error


def samples(file: IO[bytes], name: str, start: int, first_dot: bool) -> Iterator[dict[str, Any]]:
    """The samples of an open tar file from number `start` on: see `read_tar`."""
    number, warned = 0, False
    begins: dict[str, int] = {}
    sample: dict[str, Any] = {}
    with tarfile.open(fileobj=file, mode="r:*", tarinfo=_Member) as archive:
        while (member := archive.next()) is not None:
            archive.members = []  # type: ignore[attr-defined]  # else it remembers every file of the archive
            if (member.issym() or member.islnk()) and not warned:
                warned = True
                warn(
                    f"{name} holds links, which are left out: {member.name} to {member.linkname} is the first. Pack "
                    "files instead, as `tar --dereference --hard-dereference` does"
                )
            folder, _, base = member.name.rpartition("/")
            if not member.isfile() or base.startswith("."):
                continue
            dot = base.find(".") if first_dot else base.rfind(".")
            stem, suffix = (base, "") if dot < 0 else (base[:dot], base[dot + 1 :])
            key = f"{folder}/{stem}" if folder else stem
            if sample and sample["__key__"] != key:
                if number >= start:
                    yield sample
                number += 1
                sample = {}
            if not sample and begins.setdefault(key, member.offset) != member.offset:
                raise OptionError(
                    f"{name} must hold the files of a sample one after the other, but {member.name} is at byte "
                    f"{member.offset}, away from the others of {key!r} at byte {begins[key]}: sort the archive by name "
                    "(tar --sort=name)"
                )
            if suffix == "__key__":
                raise OptionError(f"{name} holds {member.name}, but __key__ is the field for the name of a sample")
            if suffix in sample:
                raise OptionError(f"{name} holds {member.name} twice within one sample")
            # What was delivered before is passed by: in a file that is not compressed nothing of it is read.
            content = archive.extractfile(member) if number >= start else None
            sample |= {"__key__": key, suffix: b"" if content is None else content.read()}
    if sample and number >= start:
        yield sample
