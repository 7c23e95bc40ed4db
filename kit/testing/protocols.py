"""ProtocolConformance: every row of a batch reaches some replica once, in order, and comes back.

batch  --  distribute  -->  one piece per rank
                              |  the called ranks work; the sources' results count
batch  <--  collect  --  results of the sources
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from hybridflow.core.contracts.protocol import TransferProtocol
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.columns import Column, tokens
from hybridflow.core.values.metrics import Metrics
from hybridflow.core.values.parallel import GenerationLayout, ParallelLayout, generation_layout
from hybridflow.kit.testing.checks import missing_fixture, require


@attrs.define
class GroupShape:
    """A group of ranks as protocols see it: its layouts."""

    layout: ParallelLayout
    generation: GenerationLayout | None

    def __str__(self) -> str:
        text = f"layout {self.layout} ({self.layout.order})"
        if self.generation:
            text += f", generation tp {self.generation.tp} pp {self.generation.pp}"
        return text


def numbered_rows(rows: int, start: int = 0) -> Batch:
    """Return rows whose numbers, from `start` on, stand in a column of each kind.

    The columns are number (int64 per row), ids (int64 per token: the row of number n has n % 4
    tokens n), and meta (objects).
    """
    # Lengths differ from row to row, so that a wrong cut of the tokens shows.
    numbers = np.arange(start, start + rows)
    ids = [np.full(number % 4, number) for number in numbers]
    return Batch(
        {
            "number": torch.from_numpy(numbers.copy()),
            "ids": tokens(ids, torch.int64),
            "meta": [{"number": int(number)} for number in numbers],
        }
    )


def row_numbers(batch: Any) -> list[int]:
    """Return the numbers of the rows of a piece.

    Raises AssertionError where `batch` is no Batch, or its columns disagree.
    """
    if not isinstance(batch, Batch):
        raise AssertionError(f"expected a Batch, got {type(batch).__name__}")
    # An empty piece need not have columns.
    if batch.rows == 0:
        return []

    numbers = torch.as_tensor(batch["number"].values).tolist()
    ids: Column = batch["ids"]
    assert ids.lengths is not None
    in_objects = [meta["number"] for meta in batch["meta"].values]
    lengths = [number % 4 for number in numbers]
    require(
        in_objects == numbers and ids.lengths.tolist() == lengths,
        got="columns whose rows are in different orders",
        expected="every column split at the same rows",
        likely="the piece was put together column by column; use Batch.split, take and concat",
    )
    return numbers


class ProtocolConformance:
    """Subclass it and give a fixture `protocol`: an instance of your TransferProtocol."""

    splits: bool | None = None
    """Whether a batch is cut into parts; None: what the protocol itself says."""
    returns_input: bool | None = None
    """Whether collect(distribute(x)) is x; None: as `splits`."""
    balanced = True
    """Whether parts differ by at most one row."""
    layouts: Sequence[ParallelLayout] = (
        ParallelLayout(),
        ParallelLayout(dp=4),
        ParallelLayout(dp=3, tp=2),
        ParallelLayout(pp=2, tp=2, dp=2),
        ParallelLayout(pp=2, tp=2, dp=2, order="tp-cp-dp-pp"),
        ParallelLayout(tp=4, dp=2, cp=2),
        ParallelLayout(pp=4, dp=2),
    )
    """The layouts that the protocol must work with."""
    generations: Sequence[tuple[int, int]] = ((1, 1), (1, 2))
    """(pp, tp) of generation; sizes that do not fit a layout are left out."""
    row_counts: Sequence[int] = (0, 1, 3, 16, 17)
    """Sizes of the batches."""

    @pytest.fixture
    def protocol(self) -> TransferProtocol:
        """The author's protocol."""
        return missing_fixture(self, "protocol", "an instance of your TransferProtocol")

    def argument(self, value: Any, shape: GroupShape) -> Any:
        """Return the argument with which a caller makes the ranks work on `value`.

        Override it where it is another one: ALL_TO_ALL wants a list with one entry per rank.
        """
        return value

    def shapes(self) -> Iterator[GroupShape]:
        """Yield each layout with each generation layout that fits it."""
        for layout in self.layouts:
            for pp, tp in self.generations:
                if layout.world % (pp * tp) == 0:
                    yield GroupShape(layout, generation_layout(layout, pp, tp))

    def _splits(self, protocol: TransferProtocol) -> bool:
        return protocol.splits if self.splits is None else self.splits

    def _cases(self, protocol: TransferProtocol) -> Iterator[tuple[GroupShape, int, Sequence[Any]]]:
        """Yield (shape, rows, pieces of a batch with so many rows), for every shape and size."""
        for shape in self.shapes():
            for rows in self.row_counts:
                argument = self.argument(numbered_rows(rows), shape)
                yield shape, rows, protocol.distribute(shape, argument)

    def test_there_is_one_piece_for_each_rank(self, protocol):
        """`distribute` returns as many pieces as the layout has ranks."""
        for shape, rows, pieces in self._cases(protocol):
            require(
                len(pieces) == shape.layout.world,
                got=f"{len(pieces)} pieces of {rows} rows for {shape}",
                expected=f"{shape.layout.world}, one per rank, also for ranks that are not called",
                likely="distribute returns one piece per part; index the parts with each rank's "
                "part",
            )

    def test_results_count_once_and_come_from_ranks_that_are_called(self, protocol):
        """Sources are distinct ranks among the called ones, and these are ranks of the group."""
        # No batch is needed: sources and called ranks follow from the layout.
        for shape in self.shapes():
            sources = list(protocol.sources(shape))
            called = list(protocol.called(shape))
            distinct = len(set(sources)) == len(sources)
            require(
                sources and distinct and set(sources) <= set(called),
                got=f"sources {sources} of called ranks {called} for {shape}",
                expected="at least one source, each once, each of them called",
                likely="two ranks of a replica both give its result, or a rank is asked that got "
                "no call",
            )
            require(
                set(called) <= set(range(shape.layout.world)),
                got=f"called ranks {called} for {shape}",
                expected=f"ranks from 0 to {shape.layout.world - 1}",
                likely="called was written for another layout",
            )

    def test_rows_keep_their_order_and_none_is_lost_or_doubled(self, protocol):
        """The sources' pieces, one after the other, are the batch."""
        if not self._splits(protocol):
            pytest.skip("it does not split batches")

        for shape, rows, pieces in self._cases(protocol):
            parts = [row_numbers(pieces[rank]) for rank in protocol.sources(shape)]
            numbers = list(chain.from_iterable(parts))
            require(
                numbers == list(range(rows)),
                got=f"the sources work on rows {numbers} for {shape}",
                expected=f"rows 0 to {rows - 1} in order" if rows else "no rows",
                likely="a part is dropped or doubled, uneven batches are rounded down, or sources "
                "are in another order",
            )

    def test_every_rank_works_on_a_part_that_some_source_has(self, protocol):
        """Every called rank's rows are those of one source: of its replica's."""
        if not self._splits(protocol):
            pytest.skip("it does not split batches")

        for shape, _, pieces in self._cases(protocol):
            parts = [row_numbers(pieces[rank]) for rank in protocol.sources(shape)]
            for rank in protocol.called(shape):
                require(
                    row_numbers(pieces[rank]) in parts,
                    got=f"rank {rank} got rows {row_numbers(pieces[rank])} for {shape}",
                    expected=f"one of the parts whose results are collected: {parts}",
                    likely="ranks of one replica must work on the same rows; part_of differs "
                    "within a replica",
                )

    def test_parts_differ_by_one_row_at_most(self, protocol):
        """An uneven batch is spread evenly, unless `balanced` is off."""
        if not (self._splits(protocol) and self.balanced):
            pytest.skip("its parts are not balanced")

        for shape, rows, pieces in self._cases(protocol):
            sizes = [pieces[rank].rows for rank in protocol.sources(shape)]
            require(
                max(sizes) - min(sizes) <= 1,
                got=f"parts of {sizes} rows of {rows} for {shape}",
                expected="sizes that differ by at most one row",
                likely="the rest of an uneven batch goes to one rank; use Batch.split",
            )

    def test_units_stay_whole(self, protocol):
        """Five units of three rows are never cut."""
        if not self._splits(protocol):
            pytest.skip("it does not split batches")

        for shape in self.shapes():
            # 15 rows over 2, 3 or 4 parts: cut evenly, some units would be split.
            units = np.arange(15) // 3
            batch = numbered_rows(15).whole(units)
            pieces = protocol.distribute(shape, self.argument(batch, shape))
            for rank in protocol.sources(shape):
                numbers = row_numbers(pieces[rank])
                require(
                    len(numbers) % 3 == 0 and (not numbers or numbers[0] % 3 == 0),
                    got=f"rank {rank} got rows {numbers} of pairs or groups of three for {shape}",
                    expected="whole units only",
                    likely="rows are cut by index; Batch.split keeps the units that a loss "
                    "declared together",
                )

    def test_collect_undoes_distribute(self, protocol):
        """Collecting the pieces gives the batch; or a list of results where nothing is split."""
        identity = self._splits(protocol) if self.returns_input is None else self.returns_input
        for shape, rows, pieces in self._cases(protocol):
            # As if each source had returned its rows unchanged.
            results = [pieces[rank] for rank in protocol.sources(shape)]
            collected = protocol.collect(shape, results)
            if identity:
                numbers = row_numbers(collected)
                require(
                    numbers == list(range(rows)),
                    got=f"collect(distribute(x)) has rows {numbers} for {shape}",
                    expected=f"the {rows} rows of x, in order",
                    likely="collect concatenates in another order than distribute splits, or "
                    "drops a piece",
                )
                continue

            sources = list(protocol.sources(shape))
            require(
                isinstance(collected, list) and len(collected) == len(sources),
                got=f"collect gave {type(collected).__name__} for {shape}",
                expected="a list with the result of each source",
                likely="set splits (or returns_input) of the conformance class to what the "
                "protocol does",
            )

    def test_what_is_no_batch_reaches_every_rank(self, protocol):
        """Settings, for instance, are not split."""
        for shape in self.shapes():
            pieces = protocol.distribute(shape, self.argument({"temperature": 1.0}, shape))
            for rank in protocol.called(shape):
                require(
                    pieces[rank] == {"temperature": 1.0},
                    got=f"rank {rank} got {pieces[rank]!r} for {shape}",
                    expected="the value itself, as every rank",
                    likely="only Batches are split; settings go to all ranks",
                )

    def test_metrics_of_the_parts_add_up(self, protocol):
        """`collect` merges results that are all Metrics."""
        if not self._splits(protocol):
            pytest.skip("it does not split batches")

        for shape in self.shapes():
            # Part i reports i: the mean of 0 ... n - 1 is (n - 1) / 2, the maximum n - 1.
            sources = list(protocol.sources(shape))
            last = len(sources) - 1
            parts = []
            for i in range(len(sources)):
                value = float(i)
                parts.append(Metrics({"loss": (value, 1.0)}, {"longest": value}))

            merged = protocol.collect(shape, parts)
            good = isinstance(merged, Metrics) and merged["loss"] == last / 2
            require(
                good and merged["longest"] == last,
                got=f"{merged!r} of {len(sources)} parts for {shape}",
                expected="Metrics.merge of the parts: (sum, count) pairs added, maxima taken",
                likely="collect handles Batches alone; merge results that are all Metrics",
            )
