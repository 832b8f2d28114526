"""The images: what they install is what their containers need, pinned; the Dockerfile is linted."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.processes import ROOT
from tests.unit.deploy.distributions import EXTRAS, closure
from tests.unit.deploy.files import COMPOSE_OVERRIDES, DEPLOY, SERVICES, compose

DOCKERFILE = DEPLOY / "images" / "Dockerfile"
TARGETS = ("control", "denoiser-cpu", "denoiser-cuda")


def stages() -> dict[str, list[str]]:
    """The instructions of each stage, those of the stages that it starts from first."""
    found: dict[str, list[str]] = {}
    text = re.sub(r"\\\n\s*", "", DOCKERFILE.read_text())
    for line in text.splitlines():
        if match := re.fullmatch(r"FROM (\S+) AS (\S+)", line):
            current = found[match[2]] = list(found.get(match[1], [f"BASE {match[1]}"]))
        elif line and not line.startswith("#") and found:
            current.append(line)
    return found


def extras_of(target: str) -> list[str]:
    """That its image installs."""
    [copied] = [line for line in stages()[target] if line.startswith("COPY --from=")]
    source = re.search(r"--from=(\S+)", copied)
    assert source is not None
    install = re.search(r'"\.\[([\w,-]+)\]"', " ".join(stages()[source[1]]))
    assert install is not None
    return install[1].split(",")


def pinned(file: str) -> dict[str, str]:
    """Versions by distribution."""
    lines = (DEPLOY / "images" / file).read_text().splitlines()
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(wanted.name): str(wanted.specifier).removeprefix("==") for wanted in requirements}


def constraints_of(target: str) -> str:
    """The file that its image is installed with, each time that something is installed into it."""
    [source] = re.findall(r"COPY --from=(\S+)", " ".join(stages()[target]))
    installs = [line for line in stages()[source] if "install --constraint" in line]
    [name] = {found[1] for line in installs if (found := re.search(r"--constraint (\S+)", line))}
    return str(name)


def test_the_dockerfile_has_no_faults_that_hadolint_knows() -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("hadolint"), str(DOCKERFILE)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_is_built_in_stages_from_a_pinned_base_and_runs_as_nobody(target: str) -> None:
    instructions = stages()[target]
    assert instructions[0] == "BASE ${PYTHON_IMAGE}"
    assert re.search(r"^ARG PYTHON_IMAGE=python:3\.\d+\.\d+-slim-\w+$", DOCKERFILE.read_text(), re.MULTILINE)
    assert [line for line in instructions if line.startswith("USER")] == ["USER 10001:10001"]
    assert instructions[-1] == "USER 10001:10001"
    assert not any("pip" in line for line in instructions), "what builds is not shipped"


@pytest.mark.parametrize("service", SERVICES, ids=lambda service: service.name)
def test_a_container_finds_what_its_service_needs(service) -> None:  # type: ignore[no-untyped-def]
    for overrides in [(), *((name,) for name in COMPOSE_OVERRIDES)]:
        build = compose(*overrides)["services"][service.name]["build"]
        assert ROOT / build["dockerfile"] == DOCKERFILE
        installed = _flat(extras_of(build["target"]))
        assert service.extra in installed, build["target"]


def _flat(extras: list[str]) -> set[str]:
    """With those that they include."""
    included = [
        extra
        for name in extras
        for requirement in map(Requirement, EXTRAS[name])
        if requirement.name == "tediserve"
        for extra in requirement.extras
    ]
    return set(extras) | (_flat(included) if included else set())


def test_only_the_denoisers_images_hold_torch() -> None:
    assert [("torch" in closure(*extras_of(target))) for target in TARGETS[:2]] == [False, True]
    assert "denoiser" in _flat(extras_of("denoiser-cuda"))


@pytest.mark.parametrize("target", TARGETS)
def test_every_distribution_is_pinned_to_a_version_that_is_accepted(target: str) -> None:
    versions = pinned(constraints_of(target))
    extras = [extra for extra in extras_of(target) if extra != "gpu"] + ["denoiser"] * ("gpu" in extras_of(target))
    assert all(re.fullmatch(r"[\w.]+", version) for version in versions.values())
    for name, requirements in closure(*extras).items():
        assert name in versions, f"{name} is missing in {constraints_of(target)}"
        for requirement in requirements:
            accepted = requirement.specifier.contains(versions[name], prereleases=True)
            assert accepted, f"{name} {versions[name]}: {requirement}"


def test_vllm_is_pinned_to_a_release_that_we_know() -> None:
    [vllm] = [requirement for requirement in map(Requirement, EXTRAS["gpu"]) if requirement.name == "vllm"]
    assert vllm.specifier.contains(pinned("constraints-cuda.txt")["vllm"])


def test_torch_is_the_version_of_the_makefile() -> None:
    makefile = re.search(r"^TORCH \?= torch==(\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert makefile is not None
    assert {pinned(constraints_of(target)).get("torch", makefile[1]) for target in TARGETS} == {makefile[1]}


def test_what_is_copied_exists_and_is_not_ignored() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE.read_text(), re.MULTILINE)
    assert {name for names in copied for name in names.split()} == kept
    assert all((ROOT / name).exists() for name in kept)


def test_the_images_are_called_what_compose_calls_them() -> None:
    text = DOCKERFILE.read_text()
    for overrides in [(), *((name,) for name in COMPOSE_OVERRIDES)]:
        for container in compose(*overrides)["services"].values():
            if build := container.get("build"):
                name, _, version = container["image"].rpartition(":")
                assert name == f"tediserve/{build['target']}"
                assert f"-t tediserve/control:{version}" in text
