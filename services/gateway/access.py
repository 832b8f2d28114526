"""Who may call: the holders of the keys in `[gateway] key_file`, or everybody where there is none."""

import logging
import math
import time
from pathlib import Path

from prometheus_client import Counter

from services.gateway.config import GatewayConfig
from services.gateway.keys import ANYONE, ApiKey, KeyFault, KeyLimits, KeyRing, Limiter, read_keys
from services.gateway.openai_api import ApiError
from services.settings import ConfigError

logger = logging.getLogger(__name__)

REFUSALS = Counter("tediserve_gateway_key_refusals", "Calls refused for their API key or its limits", ["reason"])

_FAULTS: dict[KeyFault, str] = {
    "missing": "No API key: send one as 'Authorization: Bearer KEY'.",
    "unknown": "This API key is not known here.",
    "expired": "This API key has expired.",
}


class Access:
    """Checks keys and keeps account of them. `read` the key file before the first call."""

    def __init__(self, config: GatewayConfig) -> None:
        self._path = config.key_file
        self._limits = KeyLimits(
            calls_per_s=config.key_calls_per_s, burst=config.key_burst, max_open=config.key_max_open
        )
        self._ring: KeyRing | None = None
        self._limiter = Limiter()

    @property
    def needs_key(self) -> bool:
        return bool(self._path)

    def read(self) -> None:
        """The key file, if there is to be one, in place of what was read before. Raises ConfigError."""
        if not self._path:
            return
        try:
            self._ring = read_keys(Path(self._path).read_text(encoding="utf-8"), self._limits)
        except UnicodeDecodeError:
            raise ConfigError(f"key_file {self._path}: it is not valid UTF-8") from None
        except ValueError as error:
            raise ConfigError(f"key_file {self._path}: {error}") from None
        except OSError as error:
            raise ConfigError(f"key_file {self._path} cannot be read: {error.strerror}") from None
        self._limiter.keep(self._ring.names)

    def identify(self, authorization: str) -> ApiKey:
        """Whose call it is, by its `Authorization` header. Raises ApiError."""
        if not self.needs_key:
            return ANYONE
        assert self._ring is not None
        found = self._ring.find(authorization, time.time())
        if isinstance(found, ApiKey):
            return found
        REFUSALS.labels(found).inc()
        raise ApiError(401, _FAULTS[found], code="invalid_api_key")

    def take_call(self, key: ApiKey) -> None:
        """Counts a call against the key's rate. Raises ApiError."""
        wait_s = self._limiter.take_call(key, time.monotonic())
        if wait_s > 0:
            REFUSALS.labels("rate").inc()
            raise ApiError(
                429,
                f"This API key may make {key.calls_per_s:g} calls a second, and {key.burst} at once after a pause.",
                type="rate_limit_error",
                code="rate_limit_exceeded",
                retry_after_s=math.ceil(wait_s),
            )

    def check_room(self, key: ApiKey, num_requests: int) -> None:
        """Raises ApiError where the key cannot have so many more requests open."""
        if self._limiter.has_room(key, num_requests):
            return
        REFUSALS.labels("open").inc()
        if num_requests > key.max_open:
            raise ApiError(
                400,
                f"This call asks for {num_requests} requests (prompts x n); this API key may have {key.max_open} open.",
                param="n",
                code="invalid_value",
            )
        raise ApiError(
            429,
            f"This API key has as many requests open as it may have, {key.max_open}. Wait for some to end.",
            type="rate_limit_error",
            code="too_many_open_requests",
            retry_after_s=1,
        )

    def enter(self, key: ApiKey, num_requests: int) -> None:
        """They are open until they `leave`. Raises ApiError."""
        self.check_room(key, num_requests)
        self._limiter.enter(key, num_requests)

    def leave(self, key: ApiKey, num_requests: int) -> None:
        """They have ended."""
        self._limiter.leave(key, num_requests)
