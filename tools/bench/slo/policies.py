"""The policies that are compared: configurations of threshold-controller and scheduler, and for `paper` the profile.

`fixed` is the profile's threshold, pinned in every request, a controller that does nothing, and a scheduler that fills
instances and their queue without a look at deadlines that cannot be kept any more. `paper` has that scheduler, the
published rules for thresholds, and the profile's `-plain` sibling: no opening and no quality floor, which are ours.
`ordered` has fixed thresholds and our scheduler, `unordered` our thresholds and that other scheduler. `deadline` and
`load` are ours with the other half of the controller switched off. A name may go on with settings of the controller:
`ours+plan=low_first+risk=0.8`.
"""

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from services.settings import ConfigError
from services.threshold_controller.config import ThresholdControllerConfig

_OFF = {"deadline_control": False, "load_control": False}
_NOT_IN_TURN = {"fill_share": 0.0}


class Policy(NamedTuple):
    """What is set, and else as it comes."""

    controller: dict[str, Any] = {}  # noqa: RUF012 -- never changed
    scheduler: dict[str, Any] = {}  # noqa: RUF012
    is_pinned: bool = False  # requests carry the profile's threshold, which is then nobody's to change
    is_plain: bool = False  # with the profile's `-plain` sibling

    def profile_of(self, profile: str) -> str:
        """The profile that it runs with, where the others run with this one."""
        path = Path(profile)
        return str(path.with_name(f"{path.name}-plain")) if self.is_plain else profile


POLICIES = {
    "fixed": Policy(_OFF, _NOT_IN_TURN, is_pinned=True),
    "ordered": Policy(_OFF, is_pinned=True),
    "deadline": Policy({"load_control": False}),
    "load": Policy({"deadline_control": False}),
    "paper": Policy({"policy": "paper"}, _NOT_IN_TURN, is_plain=True),
    "unordered": Policy({}, _NOT_IN_TURN),
    "ours": Policy(),
}


def policy_of(name: str) -> Policy:
    """The policy of that name, with the controller's settings as it would read them. Raises ConfigError."""
    base, *more = name.split("+")
    if base not in POLICIES:
        raise ConfigError(f"policies: {base!r} is not one of {', '.join(POLICIES)}")
    policy = POLICIES[base]
    changed = dict(policy.controller)
    for setting in more:
        key, _, value = setting.partition("=")
        changed[key] = value
    try:
        config = msgspec.convert(changed, ThresholdControllerConfig, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"policies: {name}: {error}") from None
    return policy._replace(controller={key: getattr(config, key) for key in changed})
