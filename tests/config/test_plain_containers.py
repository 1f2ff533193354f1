from __future__ import annotations

from collections import OrderedDict, UserDict, UserList
from types import MappingProxyType
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from hpc_det.config.plain_containers import plain_containers


class Strict(dict[str, Any]):
    """A dict of which `copy.deepcopy` fails."""

    __getattr__ = dict.__getitem__


class Pair(NamedTuple):
    first: int
    second: Any


def test_containers_of_any_class_become_plain_at_any_depth() -> None:
    given = Strict(
        a=OrderedDict(b=UserList([1, MappingProxyType({"c": 2})])),
        d=Pair(3, UserDict(e=None)),
        f=OmegaConf.create({"g": [4]}),
    )
    plain = plain_containers(given)
    assert plain == {"a": {"b": [1, {"c": 2}]}, "d": (3, {"e": None}), "f": {"g": [4]}}
    found = [plain, plain["a"], plain["a"]["b"], plain["a"]["b"][1], plain["d"], plain["d"][1], plain["f"]["g"]]
    assert [type(each) for each in found] == [dict, dict, list, dict, tuple, dict, list]


def test_other_values_stay_the_same_objects() -> None:
    odd = object()
    for value in ("text", b"bytes", 1.5, None, odd, range(3), {1, 2}):
        assert plain_containers([value])[0] is value


def test_a_copy_shares_no_container() -> None:
    given: dict[str, Any] = {"a": {"b": []}}
    plain_containers(given)["a"]["b"].append(1)
    assert given == {"a": {"b": []}}
