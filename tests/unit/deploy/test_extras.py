"""Each service needs no more than its extra installs: all its modules can be imported with everything else hidden."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT
from tests.unit.deploy.distributions import closure, environment_with_only
from tests.unit.deploy.files import SERVICES

# With what they need beside the extra: who has it can use them, and nothing else imports them.
_OPTIONAL = {
    "services.denoiser.latency_plot": "matplotlib",
    "services.denoiser.kernels_vllm": "vllm",
}


def modules_of(package: str) -> list[str]:
    folder = ROOT.joinpath(*package.split("."))
    paths = [*sorted(folder.rglob("*.py")), *sorted((ROOT / "services").glob("*.py"))]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths]
    return [name for name in names if name not in _OPTIONAL]


def imports(modules: list[str], extra: str, folder: Path) -> subprocess.CompletedProcess[str]:
    code = f"import importlib\nfor name in {modules!r}:\n    importlib.import_module(name)\n"
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,  # not ours: as in an image, where the services are installed
        env=environment_with_only([extra]),
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.parametrize("service", SERVICES, ids=lambda service: service.extra)
def test_a_service_needs_no_more_than_its_extra(service, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    done = imports(modules_of(service.package), service.extra, tmp_path)
    assert done.returncode == 0, done.stderr


def test_what_is_not_in_the_extra_cannot_be_imported(tmp_path: Path) -> None:
    done = imports(["services.gateway.__main__"], "scheduler", tmp_path)
    assert "belongs to no distribution that is installed here" in done.stderr


def test_the_control_plane_carries_a_solver_and_no_torch() -> None:
    assert "highspy" in closure("control")
    assert "torch" not in closure("control")
    assert "torch" in closure("denoiser")


def test_all_folders_with_modules_are_packages_which_an_installation_takes_along() -> None:
    for path in (ROOT / "services").rglob("*.py"):
        assert (path.parent / "__init__.py").exists(), path
