"""One entry of a checkpoint's file: what ``torch.save`` wrote, read so that it takes no memory but its own.

``torch.load(weights_only=True)`` runs no code. But it believes the entry: one that is compressed may grow a
thousandfold, and a tensor that claims more bytes than were stored reads the memory behind them.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import torch

__all__ = ["load_entry"]

_BLOCK = 1 << 20  # bytes that are read at a time


def load_entry(data: BinaryIO, *, verify: bool = False) -> Any:
    """What an entry holds. Raises :class:`ValueError`, or what torch raises.

    ``verify`` compares the checksum that ``torch.save`` has written of each record, which torch does not look at.
    """
    stored = _stored(data, verify)
    data.seek(0)
    value = torch.load(data, map_location="cpu", weights_only=True)
    for tensor in _tensors(value):
        if tensor.layout is torch.strided and tensor.untyped_storage().nbytes() > stored:
            raise ValueError(f"a tensor claims {tensor.untyped_storage().nbytes()} bytes, and {stored} are stored")
    return value


def _stored(data: BinaryIO, verify: bool) -> int:
    """The size of the largest record of an archive whose records are stored as they are."""
    length = data.seek(0, 2)
    data.seek(0)
    try:
        with zipfile.ZipFile(data) as archive:
            records = archive.infolist()
            if verify:
                _check_sums(archive, records)
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise ValueError(f"it is not what torch.save writes ({error})") from error
    for record in records:
        if record.compress_type != zipfile.ZIP_STORED or record.file_size != record.compress_size:
            raise ValueError(f"its record {record.filename[:100]!r} is compressed, which torch.save does not do")
    if sum(record.file_size for record in records) > length:
        raise ValueError("its records are larger than it is")
    return max((record.file_size for record in records), default=0)


def _check_sums(archive: zipfile.ZipFile, records: Sequence[zipfile.ZipInfo]) -> None:
    """Compare the checksums of an archive's records; all are 0 where torch was told to write none."""
    for record in records if any(record.CRC for record in records) else ():
        if record.compress_type != zipfile.ZIP_STORED:
            return  # which is refused
        try:
            with archive.open(record) as file:
                while file.read(_BLOCK):
                    pass
        except (zipfile.BadZipFile, EOFError) as error:
            raise ValueError(f"{record.filename[:100]!r} is not as it was saved: its checksum differs") from error


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of nested containers, however deep."""
    todo = [value]
    while todo:
        one = todo.pop()
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, Mapping):
            todo.extend(one.keys())
            todo.extend(one.values())
        elif isinstance(one, (list, tuple, set, frozenset)):
            todo.extend(one)
