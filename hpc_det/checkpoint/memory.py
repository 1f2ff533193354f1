"""Copies in memory during which other threads of this process run: slices of a memoryview keep them waiting."""

from __future__ import annotations

import ctypes
import mmap


class _Buffer(ctypes.Structure):
    """Py_buffer, part of Python's stable interface (its C API, "Buffer Protocol")."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_SIMPLE = 0
"""PyBUF_SIMPLE: bytes one after the other."""


def copy_into(memory: mmap.mmap, offset: int, data: memoryview) -> None:
    """All of `data`, which may be read-only, to `offset` bytes from the beginning of `memory`.

    Raises ValueError where it has no room there.
    """
    if offset < 0 or offset + data.nbytes > len(memory):
        raise ValueError(f"{data.nbytes} bytes at {offset} are outside of {len(memory)} bytes")
    source = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(data), ctypes.byref(source), _SIMPLE)
    try:
        target = ctypes.c_char.from_buffer(memory, offset) if data.nbytes else None
        if target is not None:
            ctypes.memmove(ctypes.addressof(target), source.buf, source.len)
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(source))
