"""Which devices a node has."""

import ctypes
import os
import subprocess
import sys

import pytest

from services.denoiser import devices
from services.denoiser.devices import Devices, environment_of, find_devices, pin, visible_gpus
from services.settings import ConfigError


class FakeNvml:
    """A driver's library that knows that many GPUs."""

    def __init__(self, count: int) -> None:
        self.count = count

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetCount_v2(self, found: object) -> int:
        ctypes.cast(found, ctypes.POINTER(ctypes.c_uint))[0] = self.count  # type: ignore[arg-type]
        return 0

    def nvmlShutdown(self) -> int:
        return 0


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.ctypes, "CDLL", lambda name: FakeNvml(4))


@pytest.fixture
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(devices.ctypes, "CDLL", missing)


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("text", "environ", "numbers"),
    [
        ("auto", {}, (0, 1, 2, 3)),
        ("cuda", {}, (0, 1, 2, 3)),
        ("auto", {"CUDA_VISIBLE_DEVICES": "3, 1"}, (3, 1)),
        ("auto", {"CUDA_VISIBLE_DEVICES": "2,7"}, (2,)),
        ("cuda:5,6", {}, (5, 6)),
    ],
)
def test_gpus_are_found_less_those_that_are_hidden(text: str, environ: dict[str, str], numbers: tuple[int]) -> None:
    assert find_devices(text, environ) == Devices("cuda", numbers)


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("environ", [{"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "-1"}])
def test_where_all_are_hidden_there_are_cores(environ: dict[str, str]) -> None:
    assert find_devices("auto", environ).kind == "cpu"
    with pytest.raises(ConfigError, match="no GPU"):
        find_devices("cuda", environ)


@pytest.mark.usefixtures("no_gpus")
def test_without_a_driver_there_are_the_cores_that_this_process_may_run_on() -> None:
    assert find_devices("auto", {}) == Devices("cpu", tuple(sorted(os.sched_getaffinity(0))))
    core = max(os.sched_getaffinity(0))
    assert find_devices(f"cpu:{core}", {}) == Devices("cpu", (core,))
    with pytest.raises(ConfigError, match="no core 4095 here"):
        find_devices(f"cpu:{core},4095", {})


def test_gpus_that_are_not_named_by_number_are_refused() -> None:
    with pytest.raises(ConfigError, match="GPU-8f"):
        visible_gpus(2, {"CUDA_VISIBLE_DEVICES": "GPU-8f"})


def test_a_process_sees_its_own_gpus_in_the_order_of_its_ranks() -> None:
    assert environment_of("cuda", [3, 1]) == {"CUDA_VISIBLE_DEVICES": "3,1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert environment_of("cuda", []) == environment_of("cpu", [0]) == {}


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system pins no processes")
def test_a_pinned_process_stays_on_its_cores() -> None:
    core = max(os.sched_getaffinity(0))
    code = "import os, sys; sys.stdin.readline(); print(os.sched_getaffinity(0))"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        pin(process.pid, [core])
        out, _ = process.communicate(b"\n", timeout=30)
    assert out.decode().strip() == f"{{{core}}}"
    pin(process.pid, [core])  # it is gone: nothing happens
