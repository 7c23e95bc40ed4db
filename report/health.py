"""What is probably wrong with a run, by rules over what it logged and recorded.

Each rule is a function that returns findings: a sentence with its steps, and a remedy. A rule that
explains another one's symptoms comes first, and names it in EXPLAINS.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import attrs

from hybridflow.core.values.outcomes import failed
from hybridflow.core.values.units import seconds as of_seconds
from hybridflow.kit.recording import Row
from hybridflow.kit.runs import FoundRun

ALARM = "alarm"
"""Something is wrong: the result cannot be trusted, or could be much better."""
NOTE = "note"
"""Something that is worth knowing."""

LEAST_STEPS = 10
"""Trends are judged from so many steps on."""
NOT_MADE = -1
"""The value of `turn` and `weight_version` for tokens of an environment."""


@attrs.frozen
class Finding:
    """What a rule has found."""

    rule: str
    level: str
    first: int
    """The first step of which it is true, and the last."""
    last: int
    text: str
    remedy: str
    where: str = "overview"
    """The page's tab that shows it."""

    def shown(self) -> dict[str, Any]:
        """Return it as plain values."""
        return attrs.asdict(self)


@attrs.frozen(slots=False)
class Facts:
    """What the rules look at."""

    run: FoundRun
    steps: Sequence[Row]
    """The metrics of each step."""
    validations: Sequence[Row]
    samples: Mapping[str, Any]
    """What `samples_contents` returns."""
    timeline: Mapping[str, Any]
    """What `timeline_contents` returns."""

    def series(self, name: str) -> list[tuple[int, float]]:
        """Return (step, value) of a metric."""
        return [
            (row["step"], row[name])
            for row in self.steps
            if isinstance(row.get(name), int | float) and math.isfinite(row[name])
        ]

    def named(self, ending: str) -> list[str]:
        """Return the metrics whose names are ROLE/ending, a regular expression."""
        names = dict.fromkeys(name for row in self.steps for name in row)
        return [name for name in names if re.fullmatch(ending, name.partition("/")[2])]

    def setting(self, key: str, default: Any = None) -> Any:
        value = self.run.settings.get(key)
        return default if value is None else value

    @cached_property
    def first(self) -> int:
        return self.steps[0]["step"] if self.steps else 0

    @cached_property
    def last(self) -> int:
        return self.steps[-1]["step"] if self.steps else 0

    @cached_property
    def window(self) -> int:
        """The number of steps at the beginning and at the end that are compared."""
        return max(LEAST_STEPS // 2, len(self.steps) // 5)

    def ends(self, name: str) -> tuple[float, float] | None:
        """Return the mean of a metric over the first steps, and over the last ones."""
        values = [value for _, value in self.series(name)]
        if len(values) < LEAST_STEPS:
            return None
        return statistics.fmean(values[: self.window]), statistics.fmean(values[-self.window :])

    @cached_property
    def last_steps(self) -> tuple[int, int]:
        """The first and the last of the last steps."""
        return self.steps[-min(self.window, len(self.steps))]["step"], self.last

    @cached_property
    def scores(self) -> tuple[float, float, float, float] | None:
        """The reward at the beginning and at the end, the lowest score and the highest one."""
        for name in self.named("scores"):
            ends = self.ends(name)
            low = [value for _, value in self.series(f"{name}_min")]
            high = [value for _, value in self.series(f"{name}_max")]
            if ends and low and high:
                return *ends, min(low), max(high)
        return None

    @property
    def reward_share(self) -> float:
        """How much of the highest score there is at the end, from 0 to 1."""
        if self.scores is None:
            return 0.0
        _, end, low, high = self.scores
        return (end - low) / (high - low) if high > low else 0.0

    def rows(self, data: str = "train") -> list[dict[str, Any]]:
        return [row for row in self.samples["rows"] if row["data"] == data]


Rule = Callable[[Facts], list[Finding]]


def findings(
    run: FoundRun,
    steps: Sequence[Row],
    validations: Sequence[Row],
    samples: Mapping[str, Any],
    timeline: Mapping[str, Any],
) -> list[Finding]:
    """Return what the rules find, alarms first."""
    facts = Facts(run, steps, validations, samples, timeline)
    found: list[Finding] = []
    explained: set[str] = set()
    for rule in RULES:
        new = [one for one in rule(facts) if one.rule not in explained]
        found += new
        for one in new:
            if one.level == ALARM:
                explained.update(EXPLAINS.get(one.rule, ()))
    return sorted(found, key=lambda one: (one.level != ALARM, one.first))


# --- rules ---


def ended(facts: Facts) -> list[Finding]:
    """The run is over, and did not reach its end."""
    if facts.run.state not in ("ended", "damaged"):
        return []
    step, total = facts.run.step, facts.setting("run.steps", 0)
    text = f"The run ended after step {step} of {total} without having finished."
    remedy = "Read the last lines of console.log (tab Overview), and go on with --resume."
    return [Finding("ended", NOTE, step, step, text, remedy)]


def started_again(facts: Facts) -> list[Finding]:
    """Engines were started again."""
    found = []
    for name in facts.named("engine_restarts"):
        restarts = [(step, value) for step, value in facts.series(name) if value]
        if restarts:
            steps = ", ".join(str(step) for step, _ in restarts[:5])
            count = sum(value for _, value in restarts)
            text = (
                f"A rollout engine died and was started again, {count:g} times, in step {steps}"
                f"{' and others' if len(restarts) > 5 else ''}. Its tokens are the same as without."
            )
            remedy = (
                "Look at logs/ in the run's folder for why it died: memory is the usual reason "
                "(rollout.kv_memory_gb, rollout.max_sequences)."
            )
            first, last = restarts[0][0], restarts[-1][0]
            found.append(Finding("engine restarts", ALARM, first, last, text, remedy, "time"))
    return found


def mismatch_limit(facts: Facts, role: str) -> float:
    """Return the mean difference, in nats, from which rollouts do not match the trainer."""
    warn = float(facts.setting("run.mismatch_warn", math.inf))
    stop = float(facts.setting("run.mismatch_stop", math.inf))
    # A check that is switched off says nothing of what is expected.
    if math.isfinite(warn) or math.isfinite(stop):
        return min(warn, stop / 5)
    exact = facts.setting(f"{role}.backend.precision", "fp32") in ("fp32", "float32")
    exact = exact and facts.setting("rollout.dtype", "float32") == "float32"
    return 0.0002 if exact else 0.01


def mismatch(facts: Facts) -> list[Finding]:
    """Engine and trainer compute different logprobs for the same tokens."""
    found = []
    for name in facts.named("mismatch_mean"):
        role = name.partition("/")[0]
        values = facts.series(name)
        limit = mismatch_limit(facts, role)
        above = [(step, value) for step, value in values if value > limit]
        if not above:
            continue
        worst = max(value for _, value in above)
        told = (
            f"differ by up to {worst:.3g} nats on average over a step's tokens, in {len(above)} of "
            f"{len(values)} steps; {limit:g} is expected at most."
        )
        first, last = above[0][0], above[-1][0]
        if values[0][1] > limit:
            text = f"The engine's logprobs and those of {role}'s trainer {told}"
            remedy = (
                "They differ from the first step on, so the engine computes something else: "
                "compare precision, sampling (temperature, top_p) and attention of both. Tab "
                "Samples, colour by mismatch, shows which tokens. algorithm.correction weighs them."
            )
            found.append(Finding("mismatch", ALARM, first, last, text, remedy, "samples"))
        else:
            text = f"From step {first} on the engine's logprobs and {role}'s {told}"
            remedy = (
                "They were equal before, so the engine's weights are probably not the newest ones: "
                f"{role}.sync.verify = true compares all weights at each sync."
            )
            found.append(Finding("stale weights", ALARM, first, last, text, remedy, "samples"))
    return found


def stale(facts: Facts) -> list[Finding]:
    """The versions of the weights that generated do not follow the steps."""
    newest: dict[int, float] = {}
    for row in facts.rows():
        versions = [v for v in _each(row["tokens"].get("weight_version")) if v is not None]
        made = [version for version in versions if version != NOT_MADE]
        if made:
            newest[row["step"]] = max(newest.get(row["step"], -math.inf), *made)
    steps = sorted(newest)
    old = [after for before, after in pairwise(steps) if newest[after] <= newest[before]]
    if len(old) < 2:
        return []
    text = (
        f"In {len(old)} of {len(steps)} recorded steps, from step {old[0]} on, the responses were "
        "generated by the same weights as those of an earlier step."
    )
    remedy = "The engine does not get the trained weights. Look at the sync of the role."
    return [Finding("stale weights", ALARM, old[0], old[-1], text, remedy, "samples")]


def wrong_mask(facts: Facts) -> list[Finding]:
    """Tokens that the model did not write are trained on, or those that it wrote are not."""
    foreign: Counter[int] = Counter()
    left_out: Counter[int] = Counter()
    written: Counter[int] = Counter()
    for row in facts.rows():
        tokens, length = row["tokens"], len(row["response"])
        if "rollout_logprobs" not in tokens or failed(str(row["values"].get("outcome", ""))):
            continue
        mask = _spread(tokens.get("loss_mask", 1.0), length)
        by = _spread(tokens.get("turn", tokens.get("weight_version", 0.0)), length)
        for trained, maker in zip(mask, by, strict=True):
            if maker == NOT_MADE:
                foreign[row["step"]] += bool(trained)
            else:
                written[row["step"]] += 1
                left_out[row["step"]] += not trained
    found = []
    if total := sum(foreign.values()):
        steps = [step for step, count in foreign.items() if count]
        text = (
            f"{total} recorded tokens that the environment wrote are trained on, as if the model "
            f"had written them (steps {min(steps)} to {max(steps)})."
        )
        remedy = "Their loss_mask must be 0. Tab Samples, colour by mask, shows them."
        found.append(Finding("mask", ALARM, min(steps), max(steps), text, remedy, "samples"))
    share = sum(left_out.values()) / max(sum(written.values()), 1)
    if share > 0.1:
        steps = [step for step, count in left_out.items() if count]
        text = (
            f"{share:.0%} of the recorded tokens that the model wrote are not trained on: their "
            "loss_mask is 0, though their rows have not failed."
        )
        remedy = (
            "Where that is meant (a filter of overlong responses), all is well. Tab Samples, "
            "colour by mask, shows them."
        )
        found.append(Finding("mask", ALARM, min(steps), max(steps), text, remedy, "samples"))
    return found


def small_batch(facts: Facts) -> list[Finding]:
    """An update has too few groups to learn more than noise from."""
    size = facts.setting("algorithm.group_size")
    prompts = facts.setting("algorithm.prompts_per_step")
    if not size or size < 2 or not prompts or not facts.named("equal_groups"):
        return []
    rows = facts.setting("algorithm.mini_batch_size") or size * prompts
    groups = min(rows, size * prompts) / size
    if groups >= 4:
        return []
    text = (
        f"An update averages over {groups:g} groups of {size} responses. Its direction is mostly "
        "chance, and the reward moves up and down."
    )
    remedy = (
        "Raise algorithm.prompts_per_step (and algorithm.mini_batch_size where it is set), or "
        "lower the actor's learning rate."
    )
    return [Finding("small batch", ALARM, facts.first, facts.last, text, remedy)]


def hacked(facts: Facts) -> list[Finding]:
    """The reward rises by something that was not meant."""
    if facts.scores is None:
        return []
    begin, end, low, high = facts.scores
    if high <= low or (end - begin) / (high - low) < 0.1:
        return []
    signs = []
    shares = _repeated(facts)
    if shares is not None and shares[1] >= 0.8 and shares[0] <= 0.75 * shares[1]:
        signs.append(f"{shares[1]:.0%} of the responses are given to other prompts too")
    for name in facts.named("response_length"):
        lengths = facts.ends(name)
        if lengths and min(lengths) > 0 and not 1 / 3 < lengths[1] / lengths[0] < 3:
            signs.append(f"responses went from {lengths[0]:.0f} to {lengths[1]:.0f} tokens")
    for name in _parts(facts):
        own = facts.ends(name)
        spread = _spread_of(facts, name)
        if own and spread and (own[0] - own[1]) / spread > 0.2:
            signs.append(
                f"its part {name.partition('/')[2]} fell from {own[0]:.3g} to {own[1]:.3g}"
            )
    if not signs:
        return []
    text = f"The reward rose from {begin:.3g} to {end:.3g}, but {', and '.join(signs)}."
    remedy = (
        "The policy may have found what the reward pays for without having been meant. Read the "
        "responses with the highest scores (tab Samples)."
    )
    first, last = facts.last_steps
    return [Finding("reward hacked", ALARM, first, last, text, remedy, "samples")]


def entropy(facts: Facts) -> list[Finding]:
    """The policy has become sure of itself without being good."""
    found = []
    for name in facts.named("entropy"):
        ends = facts.ends(name)
        if ends is None or ends[0] <= 0 or ends[1] > 0.1 * ends[0] or facts.reward_share > 0.8:
            continue
        text = (
            f"Entropy fell from {ends[0]:.3g} to {ends[1]:.3g} nats per token, while the reward is "
            f"at {facts.reward_share:.0%} of the highest score: the policy has stopped to explore."
        )
        remedy = (
            "Go back to a checkpoint before that, and raise algorithm.clip_high, set "
            "algorithm.entropy_coef or algorithm.kl_coef, or lower the learning rate."
        )
        first, last = facts.last_steps
        found.append(Finding("entropy collapsed", ALARM, first, last, text, remedy))
    return found


def no_spread(facts: Facts) -> list[Finding]:
    """Most groups have equal scores, of which nothing is learned."""
    found = []
    for name in facts.named("equal_groups"):
        ends = facts.ends(name)
        if ends is None or ends[1] < 0.8 or facts.reward_share > 0.9:
            continue
        text = (
            f"{ends[1]:.0%} of the groups have equal scores in the last steps. Their advantages "
            "are 0, so nothing is learned from them."
        )
        remedy = (
            "The prompts are too hard or too easy, or the reward has too few values: choose "
            "others, sample more responses of each (algorithm.group_size), or use DAPO, which "
            "draws until groups differ."
        )
        first, last = facts.last_steps
        found.append(Finding("groups without spread", ALARM, first, last, text, remedy, "samples"))
    return found


@attrs.frozen
class Limit:
    """A share, or another figure, whose mean over the last steps is not to be above a limit."""

    rule: str
    ending: str
    """How the names of the metrics end, as a regular expression."""
    most: float
    text: str
    """What is said; {value} is the mean, and {name} the metric."""
    remedy: str
    where: str = "overview"
    solved: float = math.inf
    """From this share of the highest score on nothing is said."""


LIMITS = (
    Limit(
        "clipping",
        "clip_fraction",
        0.3,
        "{value:.0%} of the tokens' ratios are clipped in the last steps.",
        "Lower the learning rate, or take fewer updates a step.",
    ),
    Limit(
        "truncated",
        "clipped",
        0.5,
        "{value:.0%} of the responses run into the limit of tokens in the last steps.",
        "Raise sampling.max_tokens, or look at what they are (tab Samples).",
        "samples",
        solved=0.8,
    ),
    Limit(
        "divergence",
        "approx_kl",
        0.2,
        "A step moves the policy by {value:.2g} nats per token in the last steps.",
        "Lower the learning rate, or take fewer updates a step.",
    ),
    Limit(
        "failures",
        "failed_.+|.+_failed",
        0.02,
        "{value:.1%} of the rows fail in the last steps ({name}).",
        "The log of the run says why; on_failure has retries and rules.",
        "samples",
    ),
)


def limits(facts: Facts) -> list[Finding]:
    """Figures of the last steps are above their limits."""
    found = []
    for limit in LIMITS:
        for name in facts.named(limit.ending):
            ends = facts.ends(name)
            if ends is None or ends[1] <= limit.most or facts.reward_share >= limit.solved:
                continue
            text = limit.text.format(value=ends[1], name=name)
            first, last = facts.last_steps
            found.append(Finding(limit.rule, ALARM, first, last, text, limit.remedy, limit.where))
    return found


def grown_gradient(facts: Facts) -> list[Finding]:
    """The gradient's norm is many times what it was."""
    found = []
    for name in facts.named("grad_norm"):
        ends = facts.ends(name)
        if ends and ends[0] > 0 and ends[1] > 20 * ends[0]:
            text = f"The gradient's norm grew from {ends[0]:.3g} to {ends[1]:.3g}."
            remedy = "Lower the learning rate, or look at rows with extreme advantages."
            first, last = facts.last_steps
            found.append(Finding("divergence", ALARM, first, last, text, remedy))
    return found


def slow_tool(facts: Facts) -> list[Finding]:
    """Generation waits for environments."""
    found = []
    for name in facts.named("environment_wait_seconds"):
        role = name.partition("/")[0]
        waits = facts.series(name)
        whole = dict(facts.series("seconds/step"))
        shares = [(step, value / whole[step]) for step, value in waits if whole.get(step)]
        if len(shares) < 3:
            continue
        share = statistics.median(value for _, value in shares)
        each = statistics.median(value for _, value in waits)
        if share > 0.4 and each > 0.3:
            text = (
                f"In {of_seconds(each)} of each step, {share:.0%} of it, {role}'s engine waits for "
                "environments to answer."
            )
            remedy = (
                "Make the tool faster or give it a limit (environment.timeout_s), let more answer "
                "at once (environment.at_once), or let each episode go on by itself "
                "(environment.free = true)."
            )
            first, last = shares[0][0], shares[-1][0]
            found.append(Finding("slow tool", ALARM, first, last, text, remedy, "time"))
    return found


def slow_rank(facts: Facts) -> list[Finding]:
    """One process of several takes longer than the others with the same call."""
    texts = facts.timeline["texts"]
    slow: Counter[tuple[str, str]] = Counter()
    lost: dict[tuple[str, str], float] = defaultdict(float)
    where: dict[tuple[str, str], list[int]] = defaultdict(list)
    counted = 0
    for step, spans in sorted(facts.timeline["steps"].items()):
        if int(step) == 0:
            continue
        counted += 1
        total = sum(span[4] for span in spans if "/" not in texts[span[2]])
        calls: dict[tuple[str, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for process, role, name, _start, length, *_ in spans:
            if texts[process] != "controller" and "/" not in texts[name]:
                calls[texts[role], texts[name]][texts[process]] += length
        for (role, name), own in calls.items():
            if len(own) < 2:
                continue
            slowest = max(own, key=lambda process: own[process])
            others = statistics.median(value for key, value in own.items() if key != slowest)
            excess = own[slowest] - others
            if own[slowest] > 2 * others and excess > 0.1 * total / len(own):
                key = slowest, f"{role}/{name}"
                slow[key] += 1
                lost[key] += excess / 1e3
                where[key].append(int(step))
    found = []
    for key, count in slow.items():
        if count >= 3 and count >= 0.3 * counted:
            process, call = key
            text = (
                f"{process} takes more than twice as long as the others with {call}, in {count} of "
                f"{counted} shown steps: {of_seconds(lost[key])} in all, in which they wait."
            )
            remedy = (
                "If its rows are not longer than those of the others, its device is slower: look "
                "for other programs on it, its clock and its links."
            )
            first, last = min(where[key]), max(where[key])
            found.append(Finding("slow rank", ALARM, first, last, text, remedy, "time"))
    return found


def stall(facts: Facts) -> list[Finding]:
    """Single steps took many times as long as the others."""
    values = facts.series("seconds/step")[1:]  # the first one warms up
    if len(values) < LEAST_STEPS:
        return []
    usual = statistics.median(value for _, value in values)
    long = [(step, value) for step, value in values if value > 6 * usual and value > usual + 2.0]
    if not long:
        return []
    step, worst = max(long, key=lambda one: one[1])
    by = _longest_call(facts, step)
    text = (
        f"{'Step' if len(long) == 1 else f'{len(long)} steps, among them step'} {step} took "
        f"{of_seconds(worst)}, where {of_seconds(usual)} is usual{by}."
    )
    remedy = "Tab Time shows what each process did in it; whoever was waited for is to blame."
    return [Finding("stall", ALARM, long[0][0], long[-1][0], text, remedy, "time")]


def idle(facts: Facts) -> list[Finding]:
    """A process waits for more than half of the time."""
    whole = facts.timeline["seconds"]
    found = []
    if not whole or len(facts.steps) < 3:
        return []
    for process, busy in facts.timeline["busy"].items():
        if busy > 0.5 * whole:
            continue
        waits = [wait for wait in facts.timeline["waits"] if wait[0] == process]
        most = f", most of it for {waits[0][1]}" if waits else ""
        text = f"{process} works in {busy / whole:.0%} of the time and waits in the rest{most}."
        remedy = "`hybridflow plan` says which pools would be busier."
        found.append(Finding("idle", NOTE, facts.first, facts.last, text, remedy, "time"))
    return found[:3]


def prediction(facts: Facts) -> list[Finding]:
    """A step takes another time than was predicted."""
    predicted = [value for _, value in facts.series("seconds/predicted")]
    values = [value for _, value in facts.series("seconds/step")[1:]]
    if not predicted or len(values) < 3:
        return []
    took = statistics.median(values)
    if 0.67 < predicted[-1] / took < 1.5:
        return []
    text = f"A step takes {of_seconds(took)}, and {of_seconds(predicted[-1])} were predicted."
    remedy = "`hybridflow plan --calibrate` measures this machine; then look at what differs."
    return [Finding("prediction", NOTE, facts.first, facts.last, text, remedy, "time")]


RULES: tuple[Rule, ...] = (
    ended,
    started_again,
    mismatch,
    stale,
    wrong_mask,
    small_batch,
    hacked,
    entropy,
    no_spread,
    limits,
    grown_gradient,
    slow_tool,
    slow_rank,
    stall,
    idle,
    prediction,
)
EXPLAINS: dict[str, tuple[str, ...]] = {
    "engine restarts": ("stall",),
    "mismatch": ("divergence",),
    "stale weights": ("divergence", "clipping"),
    "reward hacked": ("entropy collapsed", "groups without spread", "truncated"),
    "entropy collapsed": ("groups without spread",),
    "slow tool": ("idle",),
    "slow rank": ("idle", "stall"),
}
"""Rule -> the rules whose findings it explains, which are then left out."""


# --- details ---


def _each(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _spread(value: Any, length: int) -> list[Any]:
    return value if isinstance(value, list) else [value] * length


def _repeated(facts: Facts) -> tuple[float, float] | None:
    """Return the share of responses that another prompt gets too: at first, and at last."""
    by_step: dict[int, list[tuple[int, tuple[int, ...]]]] = defaultdict(list)
    for row in facts.rows():
        by_step[row["step"]].append((row["prompt"], tuple(row["response"])))
    steps = sorted(by_step)
    if len(steps) < LEAST_STEPS:
        return None
    size = max(LEAST_STEPS // 2, len(steps) // 5)

    def share(chosen: Sequence[int]) -> float:
        rows = [row for step in chosen for row in by_step[step]]
        makers: dict[tuple[int, ...], set[int]] = defaultdict(set)
        for prompt, response in rows:
            makers[response].add(prompt)
        return sum(len(makers[response]) > 1 for _, response in rows) / len(rows)

    return share(steps[:size]), share(steps[-size:])


def _parts(facts: Facts) -> list[str]:
    """Return the metrics of the reward's parts, beside the sum."""
    found = []
    for name in facts.named("scores"):
        role = name.partition("/")[0]
        names = dict.fromkeys(key for row in facts.steps for key in row)
        found += [
            key.removesuffix("_max")
            for key in names
            if key.startswith(f"{role}/") and key.endswith("_max") and key != f"{name}_max"
        ]
    return found


def _spread_of(facts: Facts, name: str) -> float:
    low = [value for _, value in facts.series(f"{name}_min")]
    high = [value for _, value in facts.series(f"{name}_max")]
    return max(high) - min(low) if low and high else 0.0


def _longest_call(facts: Facts, step: int) -> str:
    row = next((row for row in facts.steps if row["step"] == step), {})
    calls = {
        name.removeprefix("seconds/"): value
        for name, value in row.items()
        if name.startswith("seconds/") and name not in ("seconds/step", "seconds/predicted")
    }
    if not calls:
        return ""
    name = max(calls, key=lambda key: calls[key])
    return f", most of it in {name} ({of_seconds(calls[name])})"
