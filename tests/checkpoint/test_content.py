from __future__ import annotations

import io
import pickle
import zipfile
from collections import Counter, OrderedDict, defaultdict
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as np_st
from torch import nn

from hpc_det.checkpoint.checkpoints import CheckpointContext
from hpc_det.checkpoint.content import is_plain, load
from hpc_det.distributed.collectives import Distributed
from hpc_det.errors import HpcDetError
from tests.facts import refused

PLAIN = st.one_of(
    np_st.boolean_dtypes(),
    np_st.integer_dtypes(endianness="?"),
    np_st.unsigned_integer_dtypes(endianness="?"),
    np_st.floating_dtypes(endianness="?"),
    np_st.complex_number_dtypes(endianness="?"),
    np_st.unicode_string_dtypes(endianness="?"),
    np_st.byte_string_dtypes(),
)


def round_trip(value: Any, path: Path) -> Any:
    torch.save(value, path)
    return load(path)


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    assert one.dtype == other.dtype
    assert one.shape == other.shape
    assert one.tobytes("A") == other.tobytes("A")


@pytest.mark.integration
@settings(max_examples=150)
@given(array=np_st.arrays(dtype=PLAIN, shape=np_st.array_shapes(min_dims=0, min_side=0)), fortran=st.booleans())
def test_arrays_come_back_bit_for_bit(tmp_path_factory: pytest.TempPathFactory, array: Any, fortran: bool) -> None:
    array = np.asfortranarray(array) if fortran else array
    assert is_plain(array)
    back = round_trip({"nested": [(array,)]}, tmp_path_factory.getbasetemp() / "array.pth")["nested"][0][0]
    assert_same(back, array)
    assert back.flags.owndata
    assert back.flags.writeable


@pytest.mark.integration
@settings(max_examples=100)
@given(value=PLAIN.flatmap(np_st.from_dtype))
def test_scalars_come_back_bit_for_bit(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    assert is_plain(value)
    assert_same(round_trip(value, tmp_path_factory.getbasetemp() / "scalar.pth"), value)


def test_strided_arrays_come_back(tmp_path: Path) -> None:
    array = np.arange(24.0).reshape(4, 6)[::2, ::-3]
    assert np.array_equal(round_trip(array, tmp_path / "a.pth"), array)


def test_the_containers_around_are_as_they_were(tmp_path: Path) -> None:
    one = np.float32(1)
    content = {"map": OrderedDict(a=one), "counts": Counter("aab"), "size": torch.Size([2]), "rows": [one, (one, {1})]}
    back = round_trip(content, tmp_path / "a.pth")
    assert back == content
    assert [type(value) for value in back.values()] == [OrderedDict, Counter, torch.Size, list]


def test_the_generators_of_determined_come_back(tmp_path: Path) -> None:
    generator = np.random.RandomState(3)
    kind, keys, *rest = round_trip({"np_rng_state": generator.get_state()}, tmp_path / "a.pth")["np_rng_state"]
    copy = np.random.RandomState()
    copy.set_state((kind, keys, *rest))
    assert copy.randint(0, 1000, 5).tolist() == generator.randint(0, 1000, 5).tolist()


def rewritten(path: Path, old: bytes, new: bytes) -> None:
    """Replace bytes in the pickle of a torch.save file, in which names are lines of text."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    changed = {name: content.replace(old, new) for name, content in members.items()}
    assert changed != members
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, content in changed.items():
            archive.writestr(name, content)


@pytest.mark.parametrize("value", [np.arange(3, dtype=np.uint32), np.float64(0.5), np.zeros(0)])
def test_the_names_of_numpy_1_are_known(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "old.pth"
    torch.save({"value": value}, path)
    if np.__version__.startswith("2"):
        rewritten(path, b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")
    assert_same(load(path)["value"], value)


def test_what_a_trial_has_declared_safe_is_left_alone(tmp_path: Path) -> None:
    own = [Path, np.dtype, np.ndarray, np.zeros(1).__reduce__()[0]]
    with torch.serialization.safe_globals(own):  # type: ignore[arg-type]
        before = torch.serialization.get_safe_globals()
        assert_same(round_trip(np.arange(3), tmp_path / "a.pth"), np.arange(3))
        assert {*torch.serialization.get_safe_globals()} == {*before} >= {*own}


NOT_PLAIN: list[Any] = [
    np.array([{}], dtype=object),
    np.array([(1, 2.0)], dtype="i4,f8"),
    np.array([1], dtype="M8[D]"),
    np.datetime64("2024-01-01"),
    np.void(b"abc"),
]


@pytest.mark.parametrize("value", NOT_PLAIN, ids=[str(value.dtype) for value in NOT_PLAIN])
def test_what_is_no_number_and_no_text_is_not_loaded(tmp_path: Path, value: Any) -> None:
    assert not is_plain(value)
    with refused(pickle.UnpicklingError, f"dtype {np.dtype(value.dtype.str.partition('[')[0])}"):
        round_trip(value, tmp_path / "a.pth")


def test_arrays_of_derived_classes_are_not_plain() -> None:
    assert not is_plain(np.ma.masked_array([1], [True]))
    assert not is_plain(np.zeros(1).view(np.recarray))


class Pickled:
    """An object whose pickle calls `function` with `arguments`."""

    def __init__(self, function: Any, *arguments: Any, state: Any = None) -> None:
        self.reduced = (function, arguments, state) if state is not None else (function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


def pickled_array(content: bytes, shape: tuple[int, ...], dtype: Any) -> Pickled:
    reconstruct = np.zeros(1).__reduce__()[0]
    return Pickled(reconstruct, np.ndarray, (0,), b"b", state=(1, shape, dtype, False, content))


HAS_OBJECTS = (3, "<", None, None, None, -1, -1, 63)
"""The state of a dtype; the last number contains its flags."""


def test_flags_that_would_make_pointers_of_numbers_are_ignored(tmp_path: Path) -> None:
    """numpy accepts these flags (negative control) and follows the pointers when the array is freed."""
    dtype: Any = np.dtype("f8", False, True)
    dtype.__setstate__(HAS_OBJECTS)
    assert dtype.hasobject
    pointers = pickled_array(b"A" * 8, (1,), Pickled(np.dtype, "f8", False, True, state=HAS_OBJECTS))
    back = round_trip(pointers, tmp_path / "a.pth")
    assert back.dtype == np.float64
    assert not back.dtype.hasobject
    assert back.tobytes() == b"A" * 8


@pytest.mark.parametrize(
    ("forged", "facts"),
    [
        (pickled_array(b"A" * 8, (1 << 40,), np.dtype("f8")), ["8 bytes", "dtype float64", (1 << 40,)]),
        (pickled_array(b"A" * 8, (-1,), np.dtype("f8")), ["8 bytes", "dtype float64", (-1,)]),
        (pickled_array(b"A" * 64, (1,), np.dtype("f8")), ["64 bytes", "dtype float64", (1,)]),
        (pickled_array(b"A" * 8, (1,), "f8"), ["8 bytes", "dtype None", (1,)]),
        (pickled_array(b"A" * 8, (1,), np.dtype("O")), ["dtype object"]),
        (Pickled(np.float64(1).__reduce__()[0], np.dtype("f8"), b"short"), ["5 bytes", "dtype float64"]),
        (Pickled(np.float64(1).__reduce__()[0], np.dtype("O"), b"A" * 8), ["dtype object"]),
        (Pickled(np.zeros(1).__reduce__()[0], np.ndarray, (0,), b"b"), ["numpy array"]),
    ],
    ids=["huge", "negative", "too much", "no dtype", "objects", "short scalar", "object scalar", "no content"],
)
def test_forged_arrays_are_refused(tmp_path: Path, forged: Pickled, facts: list[object]) -> None:
    with refused(pickle.UnpicklingError, *facts):
        round_trip(forged, tmp_path / "a.pth")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    return folder


def saved_function() -> None:
    """A function, which a checkpoint must not contain."""


class Evil:
    """Would create a file if it were unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize(
    "write", [torch.save, lambda evil, file: pickle.dump(evil, file, protocol=2)], ids=["torch", "pickle"]
)
def test_code_in_a_checkpoint_does_not_run(tmp_path: Path, write: Any) -> None:
    victim, file = tmp_path / "executed", io.BytesIO()
    write({"weights": Evil(victim)}, file)
    (tmp_path / "planted.pth").write_bytes(file.getvalue())
    with pytest.raises(pickle.UnpicklingError):
        load(tmp_path / "planted.pth")
    assert not victim.exists()
    torch.load(tmp_path / "planted.pth", weights_only=False) if write is torch.save else pickle.loads(file.getvalue())
    assert victim.exists(), "the trap itself is dull"


class Pair(NamedTuple):
    first: int
    second: int


class Level(IntEnum):
    LOW = 0


KEPT: list[Any] = [
    {"steps": 3, "best": 0.5, "name": "ä", "none": None, "flag": True, "wave": 1j, 7: b"", "raw": b"ab"},
    [torch.ones(2), nn.Parameter(torch.ones(2)), torch.float32, torch.device("cpu"), torch.Size([2])],
    (OrderedDict(a=1), Counter("aab"), {1, 2}, bytearray(b"ab")),
    {
        "best": np.float64(0.4),
        "seen": np.int32(2),
        "flag": np.bool_(True),
        "history": np.arange(3.0),
        "name": np.str_("ä"),
    },
    torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD([torch.ones(1)]), [1, 2]).state_dict(),
]

REFUSED = {
    "pathlib.PosixPath": Path("/"),
    "collections.defaultdict": defaultdict(int, a=1),
    "tests.checkpoint.test_content.Pair": Pair(1, 2),
    "tests.checkpoint.test_content.Level": Level.LOW,
    "builtins.frozenset": frozenset([1]),
    "builtins.function": saved_function,
    "object array": np.array([{}], dtype=object),
    "numpy.datetime64": np.datetime64("2024-01-01"),
}


def rows(value: Any) -> Any:
    """Return the value in a form that == can compare."""
    if isinstance(value, dict):
        return type(value), [(key, rows(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [rows(item) for item in value]
    return type(value), value.tolist() if isinstance(value, torch.Tensor | np.ndarray) else value


@pytest.mark.parametrize("state", KEPT)
def test_what_a_save_takes_a_resume_loads(folder: Path, state: Any) -> None:
    context = CheckpointContext(folder, Distributed())
    uuid = context.save(1, {"state_dict.pth": {"callbacks": {"mine": state}}}, lambda _: None)
    back = load(folder / uuid / "state_dict.pth")["callbacks"]["mine"]
    assert rows(back) == rows(state)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_a_resume_would_not_load_is_refused_at_the_save(folder: Path, tmp_path: Path, kind: str) -> None:
    context = CheckpointContext(folder, Distributed())
    with refused(HpcDetError, "state_dict.pth: callbacks.mine.where[1]: ", kind.rpartition(".")[2]):
        context.save(1, {"state_dict.pth": {"callbacks": {"mine": {"where": [0, REFUSED[kind]]}}}}, lambda _: None)
    assert context.newest() is None
    assert not list(folder.iterdir())
    torch.save(REFUSED[kind], tmp_path / "a.pth")
    with pytest.raises(pickle.UnpicklingError):
        load(tmp_path / "a.pth")


def test_keys_are_looked_at_too(folder: Path) -> None:
    key = (1, Path("/"))
    context = CheckpointContext(folder, Distributed())
    with refused(HpcDetError, "state_dict.pth", f"key {key}[1]: ", type(key[1]).__name__):
        context.save(1, {"state_dict.pth": {key: 1}}, lambda _: None)
