"""The steps of a run as pages: each is written by the algorithm, has its turn, and ends.

A page is what `algorithm.step` writes: the calls of one step. Without run.max_staleness a page has
its turn from the start, and the next one is written when it has ended. With k, the k pages after it
are written before it ends (core/groups/outbox.py has which calls do not wait for the turn).

Engines in a pool of their own generate the next page, k = 1, while one is trained:

    trainer     page s trained ........................ |  page s + 1 trained ...
    engines     page s + 1 generated, by the weights    |  page s + 2 generated, by the
                after page s - 1 ...................... |  weights after page s ...
                                                        |
                   page s ended, page s + 1 generated; weights to the engines,
                   validation, checkpoint: the turn of page s + 1

So page 1 is trained on tokens of the present weights, and each later one on tokens of the weights
of one page before.

Where engines take turns with the training, the responses of pages s to s + k are generated beside
each other until those of page s are complete; the others go on in the next page's turn, with its
weights (core/workers/carried.py):

    ranks       generated: page s to its end, s + 1 in part | page s trained | page s + 1 to its ...

Engines in a pool of their own that take newer weights while they generate (run.in_flight) do both:
they work on the pages s + 1 to s + k while page s is trained (core/running/serving.py), and what is
under way at the end of page s goes on by its weights.

A page that reads a result of its own turn while it is written takes the turn there; what it
generates after that is by the present weights.
"""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any

import attrs

from hybridflow.core.context import Generation, GroupStepContext
from hybridflow.core.contracts.algorithm import Algorithm
from hybridflow.core.contracts.observer import SampleRow
from hybridflow.core.contracts.runtime import Traffic
from hybridflow.core.errors import HybridFlowError, WorkerDied, WorkerError
from hybridflow.core.groups.group import Future, WorkerGroup
from hybridflow.core.groups.outbox import Call
from hybridflow.core.plugins import registry
from hybridflow.core.running.checkpoint import Ahead
from hybridflow.core.running.journal import Journal, Replay
from hybridflow.core.running.probes import Probes
from hybridflow.core.running.run import Run
from hybridflow.core.running.serving import Serving
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.metrics import Metrics
from hybridflow.core.workers.gradients import OLDEST, WEIGHT
from hybridflow.core.workers.model_worker import OPTIMIZER_STEPS
from hybridflow.core.workers.tasks import drawn

TOLD_S = 0.1
"""Waits that are shorter, in seconds, are not told of."""


class PageDropped(BaseException):
    """Leaves the algorithm's step whose page will not have its turn, as the run ends before.

    It is no Exception, so that a step does not catch it.
    """


@attrs.define(eq=False)
class Before:
    """The state of a run before a page was written, from which it can be written again."""

    algorithm: dict[str, Any]
    counters: dict[str, int]
    _data: Future

    @property
    def data(self) -> dict[str, Any]:
        """The position in each data set."""
        return self._data.result()


@attrs.frozen(eq=False)
class Kept:
    """What a checkpoint has of the pages after it."""

    staleness: int
    """The bound of the run that wrote it."""
    published: dict[str, list[tuple[int, int]]]
    """Role -> (step, version of its weights after it), of those that later pages are made by."""
    replays: list[Batch | None]
    """For each `generate` of the page, its prompts and responses; None: it is to be made."""
    carried: dict[str, Batch]
    """Role -> its responses that outlive a generation phase."""


@attrs.define(eq=False)
class Page:
    """One step's calls."""

    step: int
    ctx: GroupStepContext
    traffic: Traffic
    """The bytes of its calls."""
    began: float
    """When its time began, by time.perf_counter."""
    before: Before | None = None
    """The state before it was written; None where nothing is written ahead."""
    turned: bool = True
    """Whether it has had its turn."""
    error: Exception | None = None
    """What its writing ended with, to be raised at its turn."""

    def recorded(self, metrics: Metrics) -> list[SampleRow]:
        """Return its rows that are to be recorded; metrics: its own."""
        recorder = self.ctx.recorder
        return [] if recorder is None else recorder.take(self.step, metrics.recorded)


class Pages:
    """Writes the pages of a run in order."""

    def __init__(
        self,
        run: Run,
        algorithm: Algorithm,
        end: Callable[[Page], bool],
        say: Callable[[str], None] = lambda text: None,
    ):
        """Begin; nothing is written yet.

        end: ends a page whose calls have all been sent, and returns whether the run goes on. It
        calls `finish` and `publish`.
        """
        self.run = run
        self.algorithm = algorithm
        self.say = say
        self.lag = 0 if run.job.replayed else run.job.run.max_staleness
        """The number of pages by which the engines' weights may be behind; 0: none is written
        ahead."""
        self.carried = run.job.carried
        """The roles whose responses may outlive a generation phase, or newer weights."""
        self.written: deque[Page] = deque()
        """The pages that have not ended, from the oldest one; each has been written, or is."""
        self._journal = Journal(run.job.folder) if run.job.run.journal else None
        if self._journal is not None:
            self._journal.begin(run.step)
        if (replayed := run.job.replayed) is not None:
            run.ctx.replay = Replay(Journal(replayed), run.session.data)
        rollouts = run.session.rollouts
        for rollout in rollouts.values():
            rollout.ahead = self.lag > 0
        self._end = end
        self._outbox = run.session.outbox
        apart = {role: rollouts[role] for role in sorted(self.carried & rollouts.keys())}
        # Where one call is made after the other, nothing is done while the controller waits.
        can = registry().runtime_capabilities(run.job.runtime)
        how = (run.session.data, self._outbox, can.max_ranks != 1, can.replaces, say)
        self._serving = Serving(apart, *how) if apart else None
        self._published: dict[tuple[str, int], int] = {}
        """(role, step) -> the version of its weights after the step, by which engines generate."""
        self._trained: dict[str, int] = {}
        """Role -> the version of its weights after the last page that has ended."""
        self._probes = Probes(run)
        self._found = Metrics()
        """What was found of engines between two pages, for the metrics of the next one to end."""
        self._published_at = 0.0
        self._replays: list[Batch | None] = []
        self._read_early: tuple[int, str] | None = None
        """The step ahead that has last read a result of its own before it went on, and the verb."""
        self._told: set[str] = set()
        self._failure: Exception | None = None
        """What the end of a page raised while a later one was being written."""

    # --- the order of pages ---

    def all(self) -> None:
        """Write every page of the run, until `end` says that it does not go on."""
        try:
            while True:
                if not self.written:
                    self._write()
                page = self.written[0]
                # Rows of later pages must be open before a page generates, to go on beside it;
                # engines of their own are not to wait for the writing.
                if self.carried:
                    self._write_ahead()
                if page is self.written[0]:
                    self._turn(page)
                    self._write_ahead()
                # A later page may have brought about its own turn, and so the end of this one.
                if page is self.written[0]:
                    self._end_page()
        except PageDropped:
            pass
        finally:
            self._outbox.serving = None
        if self._failure is not None:
            raise self._failure

    def _write(self) -> None:
        """Write the next page; in its turn, if none is before it that it could be ahead of."""
        last = self.written[-1].step if self.written else self.run.step
        page = self._page(last + 1)
        page.turned = not self.carried and not self.written
        if self.lag:
            page.before = self._now()
        self.written.append(page)
        try:
            with self.charged(page):
                if page.turned:
                    self.algorithm.step(page.ctx)
                else:
                    with self._outbox.holding(lambda read: self._demanded(page, read)):
                        self.algorithm.step(page.ctx)
            self._serve()
        except Exception as error:
            if page.turned:
                raise
            page.error = error  # the pages before it come first

    def _write_ahead(self) -> None:
        """Write pages until `lag` of them are after the oldest one, or the run has no more."""
        while len(self.written) <= self.lag:
            last = self.written[-1]
            if last.step >= self.run.job.run.steps or last.error is not None:
                return
            self._write()

    def _demanded(self, page: Page, read: Call) -> None:
        """Bring about the turn of a held call that a page reads while it is written.

        A call that need not have its turn is sent, beside the turn of the oldest page. Raises
        PageDropped if the page will not have its turn.
        """
        began = time.perf_counter()
        try:
            if self._serving is not None:
                self._turn(self.written[0])
                self._serving.complete(read.step)
                self._outbox.free(read.step)
                if not self._outbox.has(read):
                    self._read_early = (page.step, _name(read))
                    return
            while self.written[0].step < read.step:
                self._turn(self.written[0])
                self._end_page()
            self._turn(self.written[0])
        except Exception as error:  # no concern of this page, which may catch what it raises
            self._failure = error
            raise PageDropped from None
        self._tell_of(read, page, time.perf_counter() - began)

    def _turn(self, page: Page) -> None:
        """Send the calls of the oldest page that were held. Raises what its writing raised."""
        if page.turned:
            return
        page.turned = True
        if page.error is not None:
            self._outbox.drop()
            raise page.error
        with self.charged(page):
            for generation in page.ctx.generations:
                if generation.version is None:
                    generation.version = generation.rollout.version
            if self._serving is not None:
                self._serving.complete(page.step)
            self._outbox.release(page.step)
        self._serve()

    def _serve(self) -> None:
        """Have the engines work on what is opened, while the controller waits."""
        if self._serving is not None:
            self._serving.wake()

    def _end_page(self) -> None:
        """End the oldest page, all calls of which are on their way.

        Raises PageDropped if the run ends with it.
        """
        page = self.written.popleft()
        with self._aside():
            goes_on = self._end(page)
        if self.ahead is not None:
            # Validation and checkpoint are no time of the step.
            self.ahead.began += time.perf_counter() - self._published_at
        if not goes_on:
            self._outbox.drop()
            raise PageDropped
        # Engines need not wait until the next page is written.
        self._serve()

    @property
    def ahead(self) -> Page | None:
        """The page after the one that ends, where it is written already."""
        return self.written[0] if self.written else None

    def before(self) -> Before:
        """Return the state of the run after the last page that has ended."""
        ahead = self.ahead
        return self._now() if ahead is None or ahead.before is None else ahead.before

    def _now(self) -> Before:
        return Before(
            copy.deepcopy(self.algorithm.state_dict()),
            dict(self.run.ctx.counters),
            self.run.session.data.state(),
        )

    def _page(self, step: int) -> Page:
        ctx = self.run.ctx.page(step, self.carried)
        if self._serving is not None:
            ctx.complete = self._serving.complete
        ctx.replays, self._replays = self._replays, []
        return Page(step, ctx, Traffic(), time.perf_counter())

    # --- in a checkpoint ---

    def keep(self, folder: Path) -> Ahead | None:
        """Write into a folder what is generated of the page that is written ahead, if one is.

        The weights that it was generated by are gone when a run goes on from there.
        """
        page = self.ahead
        if page is None or page.error is not None:
            return None
        data = self.run.session.data
        writes: list[Future] = []
        for number, generation in enumerate(page.ctx.generations):
            if generation.ahead:
                rows = drawn(generation.prompts).join(generation.responses)
                writes.append(data.keep(rows, Ahead.file(folder, number)))
            else:
                writes.append(Future(str))
        carried = {
            role: data.keep_opened(role, self._unfinished(role), Ahead.file(folder, role))
            for role in self.carried
        }
        published: dict[str, list[tuple[int, int]]] = {}
        for (role, step), version in self._published.items():
            published.setdefault(role, []).append((step, version))
        return Ahead(
            self.lag,
            published,
            [write.result() for write in writes],
            {role: write.result() for role, write in carried.items()},
        )

    def go_on(self, kept: Kept) -> None:
        """Write the next pages with what a checkpoint has of them."""
        for role, pairs in kept.published.items():
            self._published |= {(role, step): version for step, version in pairs}
        if not self.carried:
            self._replays = kept.replays
        # With a smaller bound than theirs, responses are made anew.
        for role in self.carried & kept.carried.keys() if kept.staleness <= self.lag else ():
            self._group(role).carry_on(kept.carried[role]).result()
            self._tell_versions(role, dict(kept.published[role])).result()

    def _unfinished(self, role: str) -> list[Batch]:
        """Return what there is of a role's open rows."""
        if self._serving is not None and role in self._serving.rollouts:
            return self._serving.unfinished(role)
        return [self._group(role).unfinished()]

    def _tell_versions(self, role: str, versions: Mapping[int, int]) -> Future:
        """Tell who computes the lags of a role's tokens step -> the version after it."""
        session = self.run.session
        told: Future
        if role in session.rollouts:
            told = session.data.publish(role, versions)
        else:
            told = self._group(role).publish(versions)
        return told

    def _group(self, role: str) -> WorkerGroup:
        """Return the group that generates for a role."""
        rollout = self.run.session.rollouts.get(role)
        return self.run.session.groups[role][1] if rollout is None else rollout.engines

    @contextmanager
    def charged(self, page: Page) -> Iterator[None]:
        """Count the calls and bytes of the body as those of a page."""
        with self._counted(page.traffic, page.step):
            yield

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Count the calls and bytes of the body as those of no page."""
        with self._counted(Traffic(), 0):
            yield

    @contextmanager
    def _counted(self, traffic: Traffic, step: int) -> Iterator[None]:
        runtime = self.run.session.runtime
        earlier = runtime.traffic, self._outbox.step
        runtime.traffic, self._outbox.step = traffic, step
        try:
            yield
        finally:
            runtime.traffic, self._outbox.step = earlier

    def _tell_of(self, read: Call, page: Page, seconds: float) -> None:
        """Report that a page has read a result of its own turn, and what that costs."""
        with self.charged(page):
            page.ctx.log(turn_wait_seconds=seconds)
        name = _name(read)
        if name in self._told:
            return
        self._told.add(name)
        waited = f"step {page.step} waited {seconds:.1f} s for ctx.{name}"
        if read.step < page.step:
            self.say(
                f"{waited} of step {read.step}, whose result it reads before it generates: nothing "
                "of it is generated beside that step"
            )
        else:
            self.say(
                f"{waited}, whose result it reads in its own turn: step {page.step + 1} is not "
                "generated before it has it"
            )

    # --- the end of a page ---

    def finish(self, page: Page) -> Metrics:
        """Wait for every call of a page; return its metrics.

        Raises the error of the first call that failed, and HybridFlowError where tokens are not of
        the weights that they should be of.
        """
        if page.step != self.run.step + 1:
            raise HybridFlowError(
                f"step {page.step} ends after step {self.run.step}; this is an error in hybridflow"
            )
        with self.charged(page):
            generations, updates = page.ctx.generations, page.ctx.updates
            generated = page.ctx.generated
            began = time.time()
            metrics = page.ctx.finish()
            lags = [self._lag(page, generation) for generation in generations]
            for role, update in updates:
                self._look_at(page, role, update.result())
        if self._journal is not None:
            with self._aside():
                self._journal.write(page.step, generated, self.run.session.data)
        waited = self._waited(page, began, [update for _, update in updates])
        _reduce_weights(metrics)
        found, self._found = self._found, Metrics()
        return Metrics.merge([metrics, *lags, waited, found])

    def _waited(self, page: Page, since: float, updates: Iterable[Future]) -> Metrics:
        """Return how long the end of a page had to wait for one that is ahead and reads early.

        since: when the wait for its own calls began, in seconds since the epoch.
        """
        early, self._read_early = self._read_early, None
        if early is None or self._serving is None or not self._serving.overlaps:
            return Metrics()
        ends = [reply.call.ended for update in updates for reply in update.replies]
        seconds = max(since - max(ends, default=since), 0.0)
        step, name = early
        if seconds > TOLD_S and name not in self._told:
            self._told.add(name)
            self.say(
                f"step {page.step} ended {seconds:.1f} s after its last update: step {step} reads "
                f"ctx.{name} before it goes on, and no newer weights reach the engines meanwhile"
            )
        return Metrics.of(end_wait_seconds=seconds)

    def _look_at(self, page: Page, role: str, update: Metrics) -> None:
        """Check that an update's tokens are not too old, and note the version that it has made."""
        if not self.lag or (role not in self.run.session.rollouts and role not in self.carried):
            return
        self._trained[role] = int(update.maxima[OPTIMIZER_STEPS])
        known = {step: version for (name, step), version in self._published.items() if name == role}
        limit = known.get(page.step - 1 - self.lag, min(known.values()))
        oldest = -update.maxima.get(OLDEST, -inf)
        if oldest < limit:
            raise HybridFlowError(
                f"step {page.step} has trained {role} on tokens of its weights after "
                f"{oldest:g} updates, and those of {self.lag} step before have {limit} "
                f"(run.max_staleness = {self.lag}): train on what the step itself generates"
            )

    def _lag(self, page: Page, generation: Generation) -> Metrics:
        """Check that tokens are of the weights that the engines had; return by how much those lag.

        The lag of a token counts pages: 0 if the page before has made the weights that it is of.
        """
        if not self.lag:
            return Metrics()
        found = generation.responses.metrics
        total, tokens = found.means.get("weight_version", (0.0, 0.0))
        if not tokens:
            return Metrics()

        # What was generated ahead is of the weights before those of the page before.
        newest = page.step - 1
        expected = generation.version
        if generation.ahead:
            expected = self._published[generation.role, newest - 1]
        versions = {total / tokens, found.maxima["weight_version_max"]}
        before = [
            step
            for (role, step), version in self._published.items()
            if role == generation.role and version <= min(versions)
        ]
        lag = newest - max(before, default=-1)
        if versions != {expected} or lag > self.lag:
            listed = " to ".join(f"{version:g}" for version in sorted(versions))
            raise HybridFlowError(
                f"step {page.step} has tokens of the weights of version {listed}, and they should "
                f"be of {expected}, at most {self.lag} step behind; nothing of this step counts: "
                "its engines were given weights at another time than a step's end"
            )
        figures = {f"{generation.role}/staleness": (lag * tokens, tokens)}
        return Metrics(figures, {f"{generation.role}/staleness_max": lag})

    def publish(self) -> None:
        """Give the engines the weights of the page that has ended, where pages are written ahead.

        First the page that is written ahead is generated to its end, by the weights before.
        """
        if not self.lag:
            return
        page = self.ahead
        if page is None:
            self._sync()
            return
        page.began = time.perf_counter()
        with self.charged(page):
            try:
                for generation in page.ctx.generations:
                    if not generation.held:
                        _ = generation.responses.metrics
            except WorkerDied:
                raise
            except HybridFlowError as error:
                page.error = page.error or error  # the step that has ended is complete
            self._sync()
        self._published_at = time.perf_counter()

    def _sync(self) -> None:
        """Give all engines the newest weights, those too that take the place of lost ones."""
        serving = self._serving
        while serving is not None:
            try:
                serving.pause()
                serving.regain()
                self._give_weights()
                serving.resume()
                return
            except WorkerError as error:
                if not serving.find_lost(error):
                    raise
        self._give_weights()

    def _give_weights(self) -> None:
        for name, rollout in self.run.session.rollouts.items():
            stopped = rollout.engines.stop() if name in self.carried else None
            before = rollout.version
            rollout.sync()
            version = rollout.version
            assert version is not None, f"the engines of {name} have no weights"
            if version != before:
                self._find(self._probes.compare(name, rollout))
            if self._trained.setdefault(name, version) != version:
                raise HybridFlowError(
                    f"after step {self.run.step} the engines of {name} got the weights of version "
                    f"{version}, and the step ended with {self._trained[name]}: a later step was "
                    "trained before its turn; this is an error in hybridflow"
                )
            if stopped is not None:
                figures = [Metrics(maxima=one) for one in stopped.result()]
                self._find(Metrics.merge(figures).prefixed(f"{name}/"))
                self._tell_versions(name, {self.run.step: version})
            self._publish(name, version)
        # Engines that take turns with the training get the weights as they generate.
        for name in self.carried - self.run.session.rollouts.keys():
            version = self._trained.get(name)
            self._publish(
                name, self._group(name).version().result() if version is None else version
            )

    def _find(self, found: Metrics) -> None:
        self._found = Metrics.merge([self._found, found])

    def _publish(self, role: str, version: int) -> None:
        self._published[role, self.run.step] = version
        self._published.pop((role, self.run.step - self.lag - 1), None)


def _name(call: Call) -> str:
    """Return a call's name on a page."""
    return call.method if call.role == "tasks" else f"{call.role}.{call.method}"


def _reduce_weights(metrics: Metrics) -> None:
    """Replace the squares of importance weights by the effective sample size, ROLE/ess.

    It is a share of the tokens, (mean w)^2 / mean w^2: 1 where all weigh the same.
    """
    ending = f"{WEIGHT}_square"
    for name in [name for name in metrics.means if name.endswith(ending)]:
        total, tokens = metrics.means.pop(name)
        role = name.removesuffix(ending)
        if total:
            ess = metrics[f"{role}{WEIGHT}"] ** 2 / (total / tokens)
            metrics.means[f"{role}ess"] = (ess, 1.0)
    for name in [name for name in metrics.maxima if name.endswith(f"/{OLDEST}")]:
        del metrics.maxima[name]


def read_kept(run: Run, folder: Path, ahead: Ahead) -> Kept:
    """Read what a checkpoint has of the steps after it. Raises DamagedError."""
    data = run.session.data
    replays = [
        data.kept(Ahead.file(folder, number), digest) if digest else None
        for number, digest in enumerate(ahead.sums)
    ]
    carried = {
        role: data.kept(Ahead.file(folder, role), digest) for role, digest in ahead.carried.items()
    }
    for batch in (*replays, *carried.values()):
        if batch is not None:
            _ = batch.metrics  # waits, and raises
    return Kept(ahead.staleness, ahead.published, replays, carried)
