"""Keep the bytes of tensor storages outside of torch's allocator: in NumPy arrays, in a file, or not at all."""

from __future__ import annotations

import ctypes
import tempfile
from io import FileIO
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Bytes = npt.NDArray[np.uint8]
TensorsIn = Literal["memory", "disk", "nowhere"]

_PIECE_BYTES = 256 * 1024**2  # one read or write; some systems refuse more than 2 GiB


class _Kept(NamedTuple):
    storage: Any
    """The storage itself: written back in place."""
    num_bytes: int
    """Its size."""
    contents: Bytes | None
    """What was in it; ``None`` if that is in the file."""
    offset: int
    """Where in the file."""


class TensorVault:
    """Storages and their contents, each once.

    Args:
        tensors_in: ``"memory"``, ``"disk"`` for a file in the system's temporary directory, or ``"nowhere"`` where
            nothing writes to the storages, so that their contents need not be kept.

    Attributes:
        num_bytes: bytes of the storages kept.
    """

    def __init__(self, tensors_in: TensorsIn) -> None:
        self.num_bytes = 0
        self._keeps_contents = tensors_in != "nowhere"
        self._kept: dict[int, _Kept] = {}
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._file: FileIO | None = None
        if tensors_in == "disk":
            self._directory = tempfile.TemporaryDirectory(prefix="memfit-")
            self._file = FileIO(str(Path(self._directory.name) / "tensors.bin"), "w+")

    def keep(self, storage: Any) -> None:
        """Keep the contents of a storage; one that is kept already, or is empty, is passed over."""
        if not self._keeps_contents or storage._cdata in self._kept:
            return
        if storage.device.type == "meta" or storage.nbytes() == 0:
            return
        on_host = storage if storage.device.type == "cpu" else storage.cpu()
        contents = _bytes_of(on_host)
        in_memory = None
        if self._file is None:
            in_memory = contents.copy()
        else:
            self._write(contents)
        self._kept[storage._cdata] = _Kept(storage, len(contents), in_memory, self.num_bytes)
        self.num_bytes += len(contents)

    def restore(self) -> None:
        """Write every kept storage back in place, resized if its size changed."""
        for kept in self._kept.values():
            storage = kept.storage
            if storage.nbytes() != kept.num_bytes:
                storage.resize_(kept.num_bytes)
            if storage.device.type == "cpu":
                self._fill(_bytes_of(storage), kept)
            else:
                on_host: Any = torch.empty(kept.num_bytes, dtype=torch.uint8).untyped_storage()
                self._fill(_bytes_of(on_host), kept)
                storage.copy_(on_host, False)

    def close(self) -> None:
        """Let go of everything and delete the file."""
        self._kept.clear()
        if self._file is not None:
            self._file.close()
        if self._directory is not None:
            self._directory.cleanup()

    def _fill(self, into: Bytes, kept: _Kept) -> None:
        if kept.contents is None:
            self._read(kept.offset, into)
        elif not np.array_equal(into, kept.contents):  # memory that cannot be written is left alone
            into[:] = kept.contents

    def _write(self, contents: Bytes) -> None:
        assert self._file is not None
        view = contents.data
        while len(view):
            view = view[self._file.write(view[:_PIECE_BYTES]) :]

    def _read(self, offset: int, into: Bytes) -> None:
        assert self._file is not None
        self._file.seek(offset)
        view = into.data
        while len(view):
            count = self._file.readinto(view[:_PIECE_BYTES])
            if not count:
                raise OSError(
                    f"The snapshot's file ends {len(view)} bytes too early: something else wrote to the temporary "
                    "directory. Restart the run, or set TMPDIR to a directory of its own."
                )
            view = view[count:]


def _bytes_of(storage: Any) -> Bytes:
    """The memory of a host storage itself, not a copy; the caller keeps the storage alive.

    Not ``Tensor.numpy()``: that makes the storage refuse ``resize_`` for ever.
    """
    memory = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    return np.ctypeslib.as_array(memory)
