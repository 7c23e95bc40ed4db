"""The rule for what a run does when an environment or a reward fails."""

from __future__ import annotations

import attrs

from hybridflow.core.validators import non_negative, setting, share


@attrs.frozen
class FailureRule:
    """What happens when an episode or the score of a response fails. By default the run ends."""

    retries: int = setting(0, non_negative)
    """Number of further tries of what failed."""
    mask: bool = False
    """Whether a row whose tries have all failed is left out: it has no score, nobody is trained on
    it, and its group does without it. False ends the run."""
    max_failed: float = setting(0.5, share)
    """Share of a step's rows. If more of them than that are left out, the run ends."""
