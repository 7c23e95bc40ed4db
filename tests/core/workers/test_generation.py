"""Rows to requests, and completions to columns."""

from __future__ import annotations

import numpy as np
import torch
from helpers.episodes import echoing
from helpers.sources import char

from hybridflow.core.contracts.rollout import SamplingParams
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.columns import tokens
from hybridflow.core.values.seeds import row_seed
from hybridflow.core.workers.carried import Carried
from hybridflow.core.workers.generation import (
    COLLECTED,
    EPISODE_COLUMNS,
    GENERATED,
    collect_rows,
    generate_episodes,
    generate_rows,
    make_requests,
    opened_of,
    opened_requests,
    rows_of,
)
from hybridflow.core.workers.published import Published
from hybridflow.kit.testing import reference

PROMPTS = [[5, 4], [1], [9, 9, 30]]
ROWS = Batch(
    {"prompt_ids": tokens(PROMPTS), "sample_id": torch.tensor([7, 8, 9]), "meta": [{}, {}, {}]}
)


def test_each_row_gets_the_response_that_hugging_face_gives_it(speaker):
    made = generate_rows(speaker[0], ROWS, SamplingParams(max_tokens=6, temperature=0.0), 3)
    assert tuple(made.names) == GENERATED
    for prompt, response, logprobs in zip(
        PROMPTS, made["response_ids"], made["rollout_logprobs"], strict=True
    ):
        assert response.tolist() == reference().greedy(np.array(prompt), 6)
        with torch.no_grad():
            expected = reference().outputs(torch.tensor(prompt), response)["logprobs"]
        torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=0)
    assert made["loss_mask"].values.tolist() == [1] * 18
    assert made["weight_version"].values.tolist() == [5] * 18
    assert made["finish_reason"].values == ["length"] * 3


def test_the_metrics_count_tokens_and_responses_that_were_cut(speaker):
    rare = SamplingParams(max_tokens=4, stop_token_ids=(2,), logit_bias={2: -1e9})
    often = SamplingParams(max_tokens=4, stop_token_ids=(2,), logit_bias={2: 1e9})
    cut = generate_rows(speaker[0], ROWS, rare, 3).metrics
    assert cut.means["response_length"] == (12.0, 3.0) and cut.means["clipped"] == (3.0, 3.0)
    stopped = generate_rows(speaker[0], ROWS, often, 3).metrics
    assert stopped.means["response_length"] == (3.0, 3.0) and stopped.means["clipped"] == (0.0, 3.0)
    assert cut.spreads["response_length"].tolist() == [4.0, 4.0, 4.0]
    assert cut.means["generate_seconds"][0] > 0 and cut.means["generate_seconds"][1] == 1.0


def test_rows_that_are_opened_and_collected_are_those_that_are_generated_at_once(speaker):
    sampling = SamplingParams(max_tokens=6)
    whole = generate_rows(speaker[0], ROWS, sampling, 3)
    carried = Carried()
    published = Published()
    carried.open(opened_requests(ROWS, sampling, 3))
    published.add({3: 5})
    assert [row.made.id for row in carried.unfinished()] == [7, 8, 9]
    two = collect_rows(speaker[0], ROWS.take(slice(1, 3)), 4, carried, published)
    carried.stop(speaker[0])
    assert tuple(two.names) == COLLECTED
    # Row 7, which is complete as well, travels as it was made.
    again = Carried()
    again.load(opened_of(rows_of(carried.unfinished())))
    again.open(opened_requests(ROWS.take(slice(0, 1)), sampling, 3))
    published.add({4: 6})
    one = collect_rows(speaker[0], ROWS.take(slice(0, 1)), 5, again, published)
    for name in ("response_ids", "weight_version"):
        made = [*one[name], *two[name]]
        assert [row.tolist() for row in made] == [row.tolist() for row in whole[name]]
    logprobs = [*one["rollout_logprobs"], *two["rollout_logprobs"]]
    for found, expected in zip(logprobs, whole["rollout_logprobs"], strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    # Its tokens are of the weights after step 3, version 5, and step 4 has made version 6.
    assert one["lag"].values.tolist() == [1] * 6 and two["lag"].values.tolist() == [0] * 12
    assert one.metrics.means["staleness"] == (6.0, 6.0)
    assert two.metrics.means["versions_per_sequence"] == (2.0, 2.0)
    assert (one.metrics.maxima["staleness_max"], two.metrics.maxima["staleness_max"]) == (1.0, 0.0)
    assert opened_of(rows_of([])) == []
    empty = collect_rows(speaker[0], ROWS.take(slice(0, 0)), 5, again, published)
    assert empty.rows == 0 and empty.metrics.maxima["staleness_max"] == 0.0


def test_no_rows_give_empty_columns(speaker):
    made = generate_rows(speaker[0], ROWS.take(slice(0, 0)), SamplingParams(max_tokens=4), 3)
    assert made.rows == 0
    assert made["response_ids"].values.dtype == torch.int64
    assert made["rollout_logprobs"].values.dtype == torch.float32


def test_the_tokens_of_an_environment_are_no_part_of_the_response_length(speaker):
    sampling = SamplingParams(max_tokens=12, logit_bias={14: 3.0})
    made = generate_episodes(speaker[0], ROWS, sampling, 3, echoing(char()), speaker[1])
    assert set(made.names) == set(EPISODE_COLUMNS)
    each = [int(mask.sum()) for mask in made["loss_mask"]]
    own = sum(each)
    assert own < len(made["response_ids"].values)
    assert made.metrics.means["response_length"] == (own, 3.0)
    assert made.metrics.spreads["response_length"].tolist() == each
    assert made.metrics.means["turns"][0] == sum(map(len, made["turn_rewards"].values))


def test_a_column_limits_each_row_s_response():
    limited = ROWS.with_columns(max_tokens=torch.tensor([20, 10, 20]))
    asked = make_requests(limited, SamplingParams(max_tokens=50), 3)
    assert [request.sampling.max_tokens for request in asked] == [20, 10, 20]
    free = make_requests(ROWS, SamplingParams(max_tokens=50), 3)
    assert {request.sampling.max_tokens for request in free} == {50}
    assert [request.id for request in asked] == [0, 1, 2]
    assert [request.prompt_ids.tolist() for request in asked] == PROMPTS
    assert [request.seed for request in asked] == [row_seed(3, sample) for sample in (7, 8, 9)]


def test_an_engine_gets_the_columns_that_it_declares_where_the_batch_has_them():
    rows = ROWS.with_columns(image=["a", "b", "c"], size=torch.tensor([1, 2, 3]))
    asked = make_requests(rows, SamplingParams(max_tokens=5), 3, ("image", "sound"))
    assert [request.extras for request in asked] == [{"image": "a"}, {"image": "b"}, {"image": "c"}]
