from __future__ import annotations

from typing import Any

import pytest

from hpc_det.errors import UsageError
from hpc_det.pytorch import PyTorchCallback
from hpc_det.pytorch.trial.callback import HOOKS, Callbacks
from tests.facts import each_names, warned


class Recorder(PyTorchCallback):
    def __init__(self) -> None:
        self.received: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return {"received": list(self.received)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.received = list(state_dict["received"])

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        self.received.append(metrics)


def test_a_hook_calls_those_that_override_it() -> None:
    first, second = Recorder(), Recorder()
    callbacks = Callbacks({"first": first, "plain": PyTorchCallback(), "second": second})
    callbacks.call("on_validation_end", {"loss": 1.0})
    callbacks.call("on_training_start")
    assert first.received == second.received == [{"loss": 1.0}]


def test_only_overridden_hooks_cost_anything() -> None:
    callbacks = Callbacks({"recorder": Recorder()})
    assert callbacks.overrides("on_validation_end")
    assert callbacks.overrides("on_training_start", "on_validation_end")
    assert not callbacks.overrides(*(hook for hook in HOOKS if hook != "on_validation_end"))


def test_a_hook_that_does_not_exist_is_a_mistake() -> None:
    with pytest.raises(KeyError):
        Callbacks({}).call("on_full_moon")


def test_what_is_no_callback_is_refused_with_all_its_peers() -> None:
    strange: Any = {"a": object(), "good": PyTorchCallback(), "b": Recorder}
    with pytest.raises(UsageError) as error:
        Callbacks(strange)
    facts = [
        ["build_callbacks: ", "'a'", "object", "PyTorchCallback"],
        ["build_callbacks: ", "'b'", "type", "PyTorchCallback"],
    ]
    each_names(error.value.problems, *facts)


def test_state_comes_back_under_its_name() -> None:
    before, after = Recorder(), Recorder()
    before.received = [1]
    Callbacks({"recorder": after}).restore(Callbacks({"recorder": before}).state())
    assert after.received == [1]


def test_a_callback_without_state_in_the_checkpoint_is_warned_about_if_it_has_any() -> None:
    with warned(UserWarning, "callback 'new'", "checkpoint"):
        Callbacks({"new": Recorder()}).restore({})
    Callbacks({"stateless": PyTorchCallback()}).restore({})


class FormerNames(PyTorchCallback):
    def __init__(self) -> None:
        self.received: list[Any] = []

    def on_checkpoint_end(self, folder: str) -> None:
        self.received.append(folder)

    def on_validation_step_end(self, metrics: dict[str, Any]) -> None:
        self.received.append(metrics)


def test_former_names_are_heard_with_a_warning() -> None:
    callback = FormerNames()
    with warned(DeprecationWarning, "FormerNames") as given:
        callbacks = Callbacks({"old": callback})
    names = [
        ["FormerNames.on_validation_step_end", "on_validation_end"],
        ["FormerNames.on_checkpoint_end", "on_checkpoint_write_end"],
    ]
    each_names([str(warning.message) for warning in given], *names)
    callbacks.call("on_checkpoint_write_end", "folder")
    callbacks.call("on_validation_end", {"loss": 1.0})
    assert callback.received == ["folder", {"loss": 1.0}]


class WithoutEpoch(PyTorchCallback):
    starts = 0

    def on_training_epoch_start(self) -> None:  # type: ignore[override]
        self.starts += 1


def test_an_epoch_start_without_argument_is_tolerated_with_a_warning() -> None:
    callback = WithoutEpoch()
    with warned(DeprecationWarning, "WithoutEpoch.on_training_epoch_start", "epoch_idx"):
        callbacks = Callbacks({"old": callback})
    callbacks.call("on_training_epoch_start", 3)
    assert callback.starts == 1
