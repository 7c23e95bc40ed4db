"""A judge behind a server: what it is asked, grades, equal questions, the budget, and what goes wrong."""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from helpers.templates import family

from hybridflow.algorithms.grpo import GRPO, GRPOConfig
from hybridflow.backends.rewards.judge import Judge
from hybridflow.core.contracts.reward import RewardFailureRule, RewardSample
from hybridflow.core.errors import ConfigError, RewardError
from hybridflow.core.workers.failures import score_by_rule
from hybridflow.kit.chat.conversation import Reply
from hybridflow.kit.chat.endpoint import endpoint
from hybridflow.kit.chat.rendering import PlainRenderer
from hybridflow.kit.testing import TinyRun

TOKENIZER = family("qwen2.5")


class Grader:
    """Answers in the place of a model; counts how many questions are under way together."""

    def __init__(self, says, wait: float = 0.0):
        self.renderer = PlainRenderer(TOKENIZER)
        self.says, self.wait = says, wait
        self.asked: list[list[dict]] = []
        self.together = self.most = 0

    def several(self, count, messages, tools=(), max_tokens=None, stop=()) -> list[Future]:
        self.asked.append(list(messages))
        self.together += 1
        self.most = max(self.most, self.together)
        text, made = self.says(messages[-1]["content"]), Future()
        made.set_running_or_notify_cancel()
        ids = TOKENIZER.encode(text)
        message = {"role": "assistant", "content": text}
        reply = Reply(message, "stop", None, ids, np.zeros(len(ids), np.float32), 10)

        def answer():
            self.together -= 1
            made.set_result(reply)

        timer = threading.Timer(self.wait, answer)
        timer.daemon = True
        timer.start()
        return [made]


@pytest.fixture
def judged(monkeypatch):
    """From a grader and options to the judge's rewards of some texts."""
    keys = []

    def made(grader, texts, rule=None, **options):
        keys.append(endpoint().open(grader))
        monkeypatch.setenv("JUDGE_KEY", keys[-1])
        judge = Judge(model="any", url=f"{endpoint().url}/v1", key="JUDGE_KEY", **options)
        samples = [RewardSample("2+2?", text, np.array([5]), {"answer": "4"}) for text in texts]
        return judge, score_by_rule(judge, samples, "judge", rule or RewardFailureRule())

    yield made
    for key in keys:
        endpoint().close(key)


def test_grades_become_numbers_from_0_to_1(judged):
    grades = {
        "four": "Right. Score: 10",
        "3": "Score: 1 is too little.\nScore: 0",
        "4?": "score:2.5",
    }
    grader = Grader(lambda asked: next(v for k, v in grades.items() if f"\n{k}\n" in asked))
    judge, (scores, failed) = judged(grader, list(grades))
    assert scores.tolist() == [1.0, 0.0, 0.25] and not failed.any()
    assert all(len(one) == 1 for one in grader.asked)
    assert (
        "Task: 2+2?" in grader.asked[0][0]["content"]
        and "from 0 (useless) to 10" in grader.asked[0][0]["content"]
    )
    # Ten tokens read each time, and those of the answers.
    said = sum(len(TOKENIZER.encode(text)) for text in grades.values())
    assert judge.spent == 3 * 10 + said


def test_the_template_the_grades_and_the_system_message_are_options(judged):
    grader = Grader(lambda asked: "I give it <4>" if asked == "4 or 4" else "?")
    options = {
        "prompt": "{response} or {answer}",
        "score": "<(.*?)>",
        "grades": [1, 5],
        "system": "Be fair.",
    }
    _, (scores, _) = judged(grader, ["4"], **options)
    assert scores.tolist() == [0.75]
    assert grader.asked == [
        [{"role": "system", "content": "Be fair."}, {"role": "user", "content": "4 or 4"}]
    ]


def test_equal_questions_are_asked_once_and_others_together(judged):
    grader = Grader(lambda asked: "Score: 5", wait=0.3)
    texts = ["a", "b", "a", "c", "a"] * 3
    judge, (scores, _) = judged(grader, texts)
    assert scores.tolist() == [0.5] * 15 and len(grader.asked) == 3 and grader.most == 3
    # Again, in another call with a loop of its own.
    samples = [RewardSample("2+2?", text, np.array([5]), {"answer": "4"}) for text in "abd"]
    score_by_rule(judge, samples, "judge", RewardFailureRule())
    assert len(grader.asked) == 4
    grader = Grader(lambda asked: "Score: 5")
    judge, _ = judged(grader, ["a"], cache=0)
    score_by_rule(judge, samples[:1], "judge", RewardFailureRule())
    assert len(grader.asked) == 2


@pytest.mark.parametrize(
    ("says", "said"),
    [
        ("Good!", "gave no grade that options.score finds: 'Good!'"),
        ("Score: 11", "gave 11, which is not from 0 to 10"),
    ],
)
def test_an_answer_without_a_grade_fails_by_the_rule_and_is_asked_anew(judged, says, said):
    grader = Grader(lambda asked: says)
    with pytest.raises(RewardError, match=said):
        judged(grader, ["a"], RewardFailureRule(retries=1))
    assert len(grader.asked) == 2
    _, (scores, failed) = judged(Grader(lambda asked: says), ["a"], RewardFailureRule(score=0.25))
    assert scores.tolist() == [0.25] and failed.tolist() == [True]


class Slow(BaseHTTPRequestHandler):
    """Hangs where `hangs` says so, and else answers; our own endpoint would give out what it was asked for before."""

    hangs: list[bool] = []
    gone = threading.Event()

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        if Slow.hangs.pop(0):
            Slow.gone.wait(30)
            return
        message = {"role": "assistant", "content": "Score: 5"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        head = {"id": "1", "object": "chat.completion", "created": 0, "model": "m"}
        body = json.dumps({**head, "choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def test_a_judge_that_is_too_late_is_asked_anew():
    Slow.hangs = [False, True, True, False]
    with ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        judge = Judge(model="any", url=f"http://127.0.0.1:{server.server_port}/v1")
        made, late = (RewardSample("2+2?", text, np.array([5]), {}) for text in "ab")
        score_by_rule(
            judge, [made], "judge", RewardFailureRule()
        )  # makes the client, which takes a second
        rule = RewardFailureRule(timeout_s=1.0, retries=2)
        assert score_by_rule(judge, [late], "judge", rule)[0].tolist() == [0.5]
        Slow.gone.set()
        server.shutdown()
    assert Slow.hangs == []


def test_who_gives_up_leaves_the_answer_to_the_others_who_wait(judged):
    grader = Grader(lambda asked: "Score: 5")
    judge, _ = judged(grader, ["the client is made"])
    grader.wait = 3.0
    sample = RewardSample("2+2?", "a", np.array([5]), {"answer": "4"})
    found = []

    def score(timeout_s):
        rule = RewardFailureRule(timeout_s=timeout_s, score=0.0)
        found.append(score_by_rule(judge, [sample], "judge", rule)[0].tolist())

    threads = [threading.Thread(target=score, args=(limit,)) for limit in (1.0, 30.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[0.0], [0.5]] and len(grader.asked) == 2


def test_beyond_its_budget_a_rank_asks_nothing(judged):
    grader = Grader(lambda asked: "Score: 5")
    rule = RewardFailureRule(score=0.0, at_once=1)
    judge, (_, failed) = judged(grader, ["a", "b", "c", "a"], rule, budget_tokens=25)
    # Held grades cost nothing.
    assert failed.tolist() == [False, False, True, False] and len(grader.asked) == 2
    with pytest.raises(RewardError, match=r"of this rank's budget \(options.budget_tokens = 25\)"):
        score_by_rule(
            judge, [RewardSample("", "d", np.array([5]), {})], "judge", RewardFailureRule()
        )


def test_a_server_that_is_not_there_and_a_wrong_key_are_told(judged, monkeypatch):
    judge = Judge(model="any", url="http://127.0.0.1:9/v1")
    sample = RewardSample("2+2?", "a", np.array([5]), {})
    with pytest.raises(RewardError, match="raised APIConnectionError: Connection error"):
        score_by_rule(judge, [sample], "judge", RewardFailureRule())
    judge = Judge(model="any", url=f"{endpoint().url}/v1", key="NO_SUCH_VARIABLE")
    with pytest.raises(
        RewardError, match=r"raised AuthenticationError: .*this key is of no episode"
    ):
        score_by_rule(judge, [sample], "judge", RewardFailureRule())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "needs options.model"),
        ({"model": "m", "prompt": "{answer}"}, r"options.prompt has no \{response\}"),
        ({"model": "m", "prompt": "{response"}, "options.prompt is no template"),
        ({"model": "m", "score": "("}, "options.score is no pattern"),
        ({"model": "m", "score": "x"}, "options.score has 0 groups; give one"),
        ({"model": "m", "grades": [3, 1]}, "options.grades is .3, 1.; give the lowest"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        Judge(**options)


def test_a_row_without_a_field_of_the_template_fails_with_its_name(judged):
    with pytest.raises(
        RewardError,
        match=r"options.prompt names 'rubric', and the row has prompt, response, lowest, highest, answer",
    ):
        judged(Grader(lambda asked: "Score: 5"), ["a"], prompt="{response} {rubric}")


def test_a_run_is_paid_by_its_judge(monkeypatch):
    grader = Grader(lambda asked: f"Score: {len(asked) % 11}")
    key = endpoint().open(grader)
    monkeypatch.setenv("JUDGE_KEY", key)
    options = {
        "model": "any",
        "url": f"{endpoint().url}/v1",
        "key": "JUDGE_KEY",
        "prompt": "{response}",
    }
    reward = {"function": "judge", "options": options, "on_failure": {"retries": 1}}
    with TinyRun(GRPO(GRPOConfig(prompts_per_step=4, group_size=4)), {"reward": reward}) as run:
        metrics = run.step()
    endpoint().close(key)
    # The data's first row was graded before anything was built.
    given = [len(messages[0]["content"]) % 11 / 10 for messages in grader.asked[1:]]
    assert 0.0 < metrics["reward/scores"] < 1.0
    assert min(given) <= metrics["reward/scores"] <= max(given)
