"""A block's opening: the part of it that is committed with care, whatever threshold its request runs at. Pure.

What a block commits first decides the rest; its last tokens are often unsure and cost a step each. So a threshold that
is low throughout loses answers for steps that a lower one at the end alone would have saved. The built-in model, 1,500
held-out problems: 0.9 throughout 10.3 steps and 87.2 % correct, 0.7 throughout 5.7 and 76.8 %, 0.6 after an opening of
0.7 4.8 and 86.1 % (docs/threshold_controller.md). But openings cost steps, and an answer that comes late is worth
nothing: so a profile's lowest thresholds may be without, for requests that could not be in time with one.
"""

import msgspec


class Opening(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Until `share` (0 to 1) of a block's tokens are committed its threshold is at least `threshold`, where the request
    runs at `least` or more. Share 0: none."""

    share: float = 0.0
    threshold: float = 0.0
    least: float = 0.0

    def applied(self, threshold: float, *, committed: int, left: int) -> float:
        """The threshold of a step of a request that runs at `threshold`: with `committed` tokens of its block behind it
        and `left` still to commit; nothing behind a block's first EOS is."""
        is_open = threshold >= self.least and committed < self.share * (committed + left)
        return max(threshold, self.threshold) if is_open else threshold

    @property
    def words(self) -> str:
        """For a message."""
        if not self.share:
            return "no opening"
        return f"an opening of {self.share:g} at {self.threshold:g}" + f" from {self.least:g} on" * bool(self.least)


NO_OPENING = Opening()


class Manner(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How blocks are decoded beside thresholds: what a recording, a predictor and a profile must have in common."""

    opening: Opening = NO_OPENING
    blocks_ahead: int | None = None  # that the model sees beyond the current one; None: all

    @property
    def words(self) -> str:
        """For a message."""
        sight = "the whole canvas" if self.blocks_ahead is None else f"{self.blocks_ahead} blocks ahead"
        return f"{self.opening.words} and {sight} in sight"


PLAIN = Manner()
