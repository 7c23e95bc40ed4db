"""Drawing data, numerical work on whole batches, and reward functions."""

from __future__ import annotations

import json
import math
import sys

import pytest
import torch
from helpers.sources import char

from hybridflow.algorithms.grpo import GRPO, GRPOConfig
from hybridflow.algorithms.ppo import PPO, PPOConfig
from hybridflow.core.contracts.data_source import DataConfig
from hybridflow.core.contracts.reward import RewardFailureRule
from hybridflow.core.contracts.worker import RankContext
from hybridflow.core.errors import DataError, HybridFlowError, RewardError
from hybridflow.core.job.sections import RewardPart
from hybridflow.core.values.batch import Batch
from hybridflow.core.values.columns import tokens
from hybridflow.core.values.metrics import Metrics
from hybridflow.core.values.parallel import ParallelLayout
from hybridflow.core.workers.tasks import (
    DataWorker,
    RewardWorker,
    TaskWorker,
    drawn,
    reward_columns,
    run_on_columns,
)
from hybridflow.kit.testing import TinyRun

DIGITS = char()
END = DIGITS.eos_id
CONTEXT = RankContext("tasks", 0, ParallelLayout(), torch.device("cpu"))


def sums(**changes) -> DataConfig:
    """Row i is "aa+bb=" of the two digits pairs of i."""
    return DataConfig(
        **{"source": "arithmetic", "options": {"split": "all"}, "shuffle": False, **changes}
    )


def worker(**sets: DataConfig) -> DataWorker:
    return DataWorker(CONTEXT, sets, DIGITS)


def test_what_was_generated_is_kept_with_its_prompts_and_given_out_for_no_others(tmp_path):
    tasks = worker(train=sums())
    prompts = tasks.draw("train", 2)
    columns = {"response_ids": tokens([torch.tensor([5]), torch.tensor([6, 7])])}
    made = Batch(columns, Metrics({"length": (3.0, 2.0)}))
    rows = drawn(prompts).join(made)
    kept = tasks.kept(str(tmp_path / "rows"), tasks.keep(rows, str(tmp_path / "rows")))
    again = tasks.matched(prompts, kept)
    assert again.names == ("response_ids",) and again["response_ids"].values.tolist() == [5, 6, 7]
    assert again.metrics.means == {"length": (3.0, 2.0)}
    for others in (tasks.draw("train", 2), prompts.take([0]), prompts.take([1, 0])):
        with pytest.raises(HybridFlowError, match="have changed since"):
            tasks.matched(others, kept)


def texts(batch: Batch, name: str = "prompt_ids") -> list[str]:
    return [DIGITS.decode(row.numpy()) for row in batch[name]]


def test_rows_are_drawn_on_and_on_and_each_drawing_is_a_group_of_its_own():
    tasks = worker(train=sums(limit=3, bos=True))
    first, second = tasks.draw("train", 2), tasks.draw("train", 2)
    assert texts(first) + texts(second) == ["00+00=", "00+01=", "00+02=", "00+00="]
    assert first["group"].values.tolist() + second["group"].values.tolist() == [0, 1, 2, 3]
    assert first["prompt_ids"].values[0] == DIGITS.bos_id
    assert first["meta"].values[1] == {"a": 0, "b": 1, "prompt": "00+01=", "answer": "001"}
    assert set(first.names) == {"prompt_ids", "group", "meta"}
    assert tasks.size("train") == 3


def test_rows_by_position_leave_the_order_of_drawing_alone():
    tasks = worker(train=sums(), held_out=sums(options={"split": "all", "rows": 10}))
    tasks.draw("train", 5)
    assert texts(tasks.rows("held_out", 3, 5)) == ["00+03=", "00+04="]
    assert texts(tasks.rows("train", 205, 206)) == ["02+05="]
    assert texts(tasks.draw("train", 1)) == ["00+05="]


def test_a_state_goes_on_where_it_was_taken_and_knows_its_data():
    tasks = worker(train=sums(shuffle=True, seed=4, limit=7))
    tasks.draw("train", 5)
    state = tasks.state()
    expected = texts(tasks.draw("train", 6))
    again = worker(train=sums(shuffle=True, seed=4, limit=7), more=sums())
    again.set_state(state)
    assert texts(again.draw("train", 6)) == expected
    assert texts(again.draw("more", 1)) == ["00+00="]
    with pytest.raises(DataError, match="seed was 4 and is 5"):
        worker(train=sums(shuffle=True, seed=5, limit=7)).set_state(state)


def test_rows_with_a_response_have_it_and_a_mask_of_ones():
    batch = worker(train=sums(response="{answer}")).rows("train", 102, 104)
    assert texts(batch) == ["01+02=", "01+03="]
    assert texts(batch, "response_ids") == ["003", "004"]
    assert [row.tolist()[-1] for row in batch["response_ids"]] == [END, END]
    assert [row.tolist() for row in batch["loss_mask"]] == [[1] * 4, [1] * 4]


def test_a_preference_is_two_rows_the_better_one_first():
    batch = worker(train=sums(response="{answer}", rejected="{a}")).rows("train", 102, 104)
    assert texts(batch) == ["01+02=", "01+02=", "01+03=", "01+03="]
    assert texts(batch, "response_ids") == ["003", "1", "004", "1"]
    assert batch["pair"].values.tolist() == batch["group"].values.tolist() == [102, 102, 103, 103]
    assert batch["preferred"].values.tolist() == [True, False, True, False]
    assert [len(row) for row in batch["loss_mask"]] == [4, 2, 4, 2]
    assert "unsafe" not in batch


def test_a_preference_says_which_of_the_two_is_unsafe(tmp_path):
    rows = [
        {"p": "1", "good": "2", "bad": "3", "mine": unsafe, "theirs": True}
        for unsafe in (False, True)
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    config = DataConfig(
        "jsonl", str(tmp_path / "pairs.jsonl"), "{p}", "{good}", "{bad}", ("mine", "theirs")
    )
    assert worker(pairs=config).rows("pairs", 0, 2)["unsafe"].values.tolist() == [0, 1, 1, 1]


# --- compute ---

RAGGED = Batch({"x": tokens([[1.0, 2.0], [5.0]]), "y": torch.tensor([10, 20]), "names": ["a", "b"]})


def test_a_function_gets_the_columns_that_it_names_and_gives_columns_and_figures():
    def work(x, y, names, more=None):
        assert more is None and names == ["a", "b"]
        return {
            "shifted": x + y[:, None],
            "sum": x.sum(-1),
            "labels": [n * 2 for n in names],
            "mean": x.mean(),
            "n": 2,
        }

    made = TaskWorker(CONTEXT).compute(RAGGED, work)
    assert [row.tolist() for row in made["shifted"]] == [[11.0, 12.0], [25.0]]  # padding falls away
    assert made["sum"].values.tolist() == [3.0, 5.0]
    assert made["labels"].values == ["aa", "bb"]
    assert made.metrics.means == {"mean": (2.0, 1.0), "n": (2.0, 1.0)}


def test_a_parameter_with_a_default_is_given_where_the_batch_has_it():
    made = run_on_columns(RAGGED, lambda x, y=None, z=7: {"found": y + z})
    assert made["found"].values.tolist() == [17, 27]


def test_what_is_no_dict_is_refused_by_name():
    def work(x):
        return x

    with pytest.raises(TypeError, match="got Tensor"):
        run_on_columns(RAGGED, work)


# --- rewards ---


def own_number(sample) -> list[float]:
    return [float(token) for token in sample.response_ids]


def nothing(sample) -> list[float]:
    return [0.0] * len(sample.response_ids)


def third(sample) -> float:
    return 3.0


def sizes(sample, scale: float = 1.0) -> float:
    assert sample.prompt == "1+1="
    return scale * len(sample.response)


def odd_fails(sample) -> float:
    if len(sample.response) % 2:
        raise ValueError("odd")
    return 1.0


def always_odd(sample) -> float:
    raise ValueError("odd")


HEARD: list[tuple[str, list[int]]] = []


def hears(sample) -> float:
    HEARD.append((sample.response, sample.response_ids.tolist()))
    return 1.0


def cut(sample) -> float:
    return float(sample.finish_reason == "length") + (sample.episode_return or 0.0)


def part(function, **settings) -> RewardPart:
    return RewardPart(
        **{"name": function.__name__, "function": f"{__name__}:{function.__name__}", **settings}
    )


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """This module by its name, whichever way pytest imported it."""
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])


ANSWERS = Batch({
    "prompt_ids": tokens([DIGITS.encode("1+1=")] * 3), "meta": [{}, {}, {}],
    "response_ids": tokens([DIGITS.encode("2"), DIGITS.encode("12"), [END]]),
})  # fmt: skip


def scored(batch: Batch, *parts: RewardPart) -> Batch:
    made = RewardWorker(CONTEXT, parts, DIGITS).score(batch, "scores")
    assert reward_columns("scores", parts) == made.names  # as its group promises
    return made


def test_a_function_sees_texts_and_its_options():
    made = scored(ANSWERS, part(sizes, options={"scale": 0.5}))
    assert made["scores"].values.tolist() == [0.5, 1.0, 0.0]
    assert made["scores"].values.dtype == torch.float32
    assert made.metrics.means == {"scores": (1.5, 3.0)}
    assert list(made.names) == ["scores"]


def test_parts_are_weighed_and_each_has_its_column():
    made = scored(ANSWERS, part(sizes, weight=2.0), part(third, name="x", weight=-1.0))
    assert made["rewards/sizes"].values.tolist() == [1.0, 2.0, 0.0]
    assert made["rewards/x"].values.tolist() == [3.0, 3.0, 3.0]
    assert made["scores"].values.tolist() == [-1.0, 1.0, -3.0]


def test_a_function_hears_how_a_response_ended_and_what_its_environment_gave():
    batch = ANSWERS.with_columns(
        finish_reason=["length", "stop", "stop"], episode_return=torch.tensor([0.0, 2.5, 0.0])
    )
    assert scored(batch, part(cut))["scores"].values.tolist() == [1.0, 2.5, 0.0]


def test_a_reward_is_tried_on_the_expected_answer_or_the_row_s_response_and_on_a_wrong_one():
    HEARD.clear()
    worker = RewardWorker(CONTEXT, [part(hears)], DIGITS)
    row = Batch({"prompt_ids": tokens([[4]], torch.int64), "meta": [{"answer": "12"}]})
    worker.try_out(row, "train")
    worker.try_out(row.with_columns(meta=[{"answer": "twelve"}]), "train")  # no such characters
    worker.try_out(row.join(Batch({"response_ids": tokens([[7, END]], torch.int64)})), "train")
    right = [("12", [4, 5, END]), ("", [END]), ("4", [7, END])]
    wrong = ("1", [4])  # the prompt
    assert [right[0], wrong, right[1], wrong, right[2], wrong] == HEARD


def test_a_reward_that_fails_when_it_is_tried_names_the_set():
    row = Batch({"prompt_ids": tokens([[4]], torch.int64), "meta": [{"answer": "12"}]})
    with pytest.raises(RewardError, match=r"tried on row 3 of train.*odd"):
        RewardWorker(CONTEXT, [part(always_odd)], DIGITS).try_out(row, "row 3 of train")
    forgiven = part(always_odd, on_failure=RewardFailureRule(score=0.0))
    RewardWorker(CONTEXT, [forgiven], DIGITS).try_out(row, "row 3 of train")


def test_a_failure_ends_the_run_or_is_counted():
    with pytest.raises(RewardError, match=r"'odd_fails' raised ValueError: odd \[row 0"):
        scored(ANSWERS, part(odd_fails))
    made = scored(ANSWERS, part(odd_fails, on_failure=RewardFailureRule(score=-1.0)))
    assert made["scores"].values.tolist() == [-1.0, 1.0, 1.0]
    assert made.metrics.means["odd_fails_failed"] == (1.0, 3.0)


def test_rows_that_fail_are_left_out_where_the_rule_says_so():
    rule = RewardFailureRule(mask=True)
    made = scored(ANSWERS, part(odd_fails, on_failure=rule, weight=2.0), part(third, name="x"))
    nan, *kept = made["scores"].values.tolist()
    assert math.isnan(nan) and kept == [5.0, 5.0]
    assert math.isnan(made["rewards/odd_fails"].values[0]) and made["rewards/x"].values[0] == 3.0
    assert made["outcome"].values == ["failed_reward", "complete", "complete"]
    assert [row.tolist() for row in made["loss_mask"]] == [[0], [1, 1], [1]]
    assert made.metrics.means == {"scores": (10.0, 2.0), "odd_fails_failed": (1.0, 3.0)}


def test_a_row_that_failed_before_is_not_scored():
    HEARD.clear()
    batch = ANSWERS.with_columns(
        outcome=["complete", "failed_tool", "truncated_turns"],
        loss_mask=tokens([[1], [0, 0], [1]], torch.uint8),
    )
    made = scored(batch, part(hears))
    assert [heard[0] for heard in HEARD] == ["2", ""]
    assert torch.isnan(torch.as_tensor(made["scores"].values)).tolist() == [False, True, False]
    assert made.metrics.means["scores"][1] == 2.0 and "outcome" not in made

    # It keeps its own outcome, and in token scores nothing stands for it.
    rule = RewardFailureRule(mask=True)
    made = scored(batch, part(own_number, per_token=True, on_failure=rule))
    assert made["outcome"].values == ["complete", "failed_tool", "truncated_turns"]
    assert [row.tolist() for row in made["loss_mask"]] == [[1], [0, 0], [1]]
    assert list(made["token_scores"])[1].tolist() == [0.0, 0.0]


def test_no_rows_have_no_scores():
    made = scored(ANSWERS.take(slice(0, 0)), part(sizes), part(own_number, per_token=True))
    assert made["scores"].values.shape == (0,) and made["token_scores"].rows == 0


def test_parts_of_tokens_and_of_responses_add_up():
    made = scored(ANSWERS, part(own_number, per_token=True, weight=0.5), part(third, weight=2.0))
    two, one, end = DIGITS.encode("2")[0], DIGITS.encode("1")[0], END
    expected = [[two / 2 + 6], [one / 2, two / 2 + 6], [end / 2 + 6]]
    assert [row.tolist() for row in made["token_scores"]] == expected
    assert made["scores"].values.tolist() == [sum(row) for row in expected]
    assert made["rewards/own_number"].values.tolist() == [two, one + two, end]


def test_what_counts_for_a_whole_response_is_at_the_last_token_that_the_model_wrote():
    batch = ANSWERS.with_columns(
        loss_mask=tokens([[1], [1, 0], [0]], torch.uint8)
    )  # the others are an environment's
    made = scored(batch, part(nothing, per_token=True), part(third, weight=2.0))
    assert [row.tolist() for row in made["token_scores"]] == [[6.0], [6.0, 0.0], [0.0]]


def test_ppo_counts_each_at_its_token_and_grpo_their_sum():
    tables = {
        "reward": {"function": f"{__name__}:own_number", "per_token": True},
        "data": {"limit": 0},
    }
    with TinyRun(
        PPO(PPOConfig(prompts_per_step=4, kl_coef=0.0, gamma=1.0, lam=1.0)), tables
    ) as run:
        batch = run.ctx.actor.generate(run.ctx.prompts(4))
        batch = batch.join(run.ctx.reward.score(batch), run.ctx.critic.values(batch))
        found = run.ctx.compute(run.algorithm.advantages, batch)
        for returns, row in zip(found["returns"], batch["response_ids"], strict=True):
            torch.testing.assert_close(
                returns, row.float().flip(0).cumsum(0).flip(0)
            )  # lambda 1: the rewards to go
    with TinyRun(GRPO(GRPOConfig(group_size=2, prompts_per_step=2)), tables) as run:
        batch = run.ctx.actor.generate(run.ctx.prompts(2).repeat(2))
        batch = batch.join(run.ctx.reward.score(batch))
        assert "token_scores" in batch
        sums = [float(row.sum()) for row in batch["response_ids"]]
        torch.testing.assert_close(torch.as_tensor(batch["scores"].values), torch.tensor(sums))
