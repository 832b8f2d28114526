"""The policies that are compared: configurations of threshold-controller and scheduler, nothing else differs.

`fixed` is the profile's threshold, pinned in every request, a controller that does nothing, and a scheduler that fills
instances and their queue without a look at deadlines that cannot be kept any more; so does `paper`. `ordered` has fixed
thresholds and our scheduler, `unordered` our thresholds and that other scheduler. `deadline` and `load` are ours with
the other half of the controller switched off. A name may go on with settings of the controller:
`ours+plan=low_first+risk=0.8`.
"""

from typing import Any

import msgspec

from services.settings import ConfigError
from services.threshold_controller.config import ThresholdControllerConfig

POLICIES: dict[str, dict[str, Any]] = {
    "fixed": {"deadline_control": False, "load_control": False},
    "ordered": {"deadline_control": False, "load_control": False},
    "deadline": {"load_control": False},
    "load": {"deadline_control": False},
    "paper": {"policy": "paper"},
    "unordered": {},
    "ours": {},
}


def is_pinned(name: str) -> bool:
    """Whether requests carry the profile's threshold, which is then nobody's to change."""
    return name.partition("+")[0] in ("fixed", "ordered")


def scheduler_of(name: str) -> dict[str, Any]:
    """The scheduler's settings that a policy fixes."""
    return {"fill_share": 0.0} if name.partition("+")[0] in ("fixed", "paper", "unordered") else {}


def settings_of(name: str) -> dict[str, Any]:
    """All settings that a policy fixes: the controller's, as it would read them. Raises ConfigError."""
    base, *more = name.split("+")
    if base not in POLICIES:
        raise ConfigError(f"policies: {base!r} is not one of {', '.join(POLICIES)}")
    changed = dict(POLICIES[base])
    for setting in more:
        key, _, value = setting.partition("=")
        changed[key] = value
    try:
        config = msgspec.convert(changed, ThresholdControllerConfig, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"policies: {name}: {error}") from None
    return {key: getattr(config, key) for key in changed}
