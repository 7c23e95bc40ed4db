"""Other processes, as they are seen from outside: working, stopped, gone."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import textwrap
import time

import attrs
import pytest
from helpers.waiting import eventually

from hybridflow.core.processes import look as module
from hybridflow.core.processes.look import (
    Frame,
    Look,
    descendants,
    kill,
    look_at,
    looks,
    name_of,
    spied,
    state_of,
)
from hybridflow.core.processes.page import born, page_of, write_page

PROGRAM = """
import re, signal, sys, threading, time
from hybridflow.core.processes.page import begin, doing

begin(sys.argv[1], "rank 0 of pool 'main'")

def waits_here():
    print("begun", flush=True)
    time.sleep(60)

def beside():
    with doing("environment: episode 2"):
        threading.Event().wait()

if "own signal" in sys.argv:
    signal.signal(signal.SIGUSR2, lambda number, frame: sys.exit(7))
    time.sleep(1.2)
if "in C" in sys.argv:
    with doing("reward/score"):
        re.match("(a+)+$", "a" * 60 + "b")  # for years, without giving up Python's lock
if "threads" in sys.argv:
    threading.Thread(target=beside, daemon=True).start()
    time.sleep(0.2)
else:
    with doing("reward/score"):
        waits_here()
waits_here()
"""


@pytest.fixture
def start(tmp_path):
    """Starts the program with a page in tmp_path; returns the process."""
    started = []

    def begin(*arguments: str) -> subprocess.Popen:
        command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path), *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        eventually(lambda: [one for one in looks(tmp_path) if one.pid == process.pid and one.notes])
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def test_the_stacks_of_a_process_say_where_it_is(start, tmp_path):
    process = start()
    assert process.stdout.readline() == "begun\n"
    time.sleep(0.2)  # from the line that prints it to the next one
    [look] = looks(tmp_path, stacks=True)
    assert look.state == "" and look.pid == process.pid
    inner, outer = look.thread.frames
    assert inner == Frame("<string>", 9, "waits_here") and outer.function == "<module>"
    # Again: what was written before is not read for the answer.
    [again] = looks(tmp_path, stacks=True)
    assert again.threads == look.threads
    assert process.poll() is None


def test_the_thread_that_works_is_told_from_the_main_one(start, tmp_path):
    process = start("threads")
    assert process.stdout.readline() == "begun\n"
    [look] = looks(tmp_path, stacks=True)
    assert len(look.threads) == 2 and look.notes[-1].text == "environment: episode 2"
    assert "beside" in [frame.function for frame in look.thread.frames]
    bare = attrs.evolve(look, notes=())
    assert bare.thread.frames[0].function == "waits_here"  # the main one's


def test_a_process_whose_other_threads_get_no_turn_is_seen_by_faulthandler(start, tmp_path):
    process = start("in C")
    for _ in range(2):
        [look] = looks(tmp_path, stacks=True)
        functions = [frame.function for frame in look.thread.frames]
        assert functions == ["match", "<module>"]
    assert process.poll() is None and not list(tmp_path.glob("*.ask"))


def test_a_program_that_takes_the_signal_for_itself_does_not_get_ours(start, tmp_path):
    process = start("own signal")
    eventually(lambda: not list(tmp_path.glob("*.fault")))
    process.send_signal(signal.SIGSTOP)  # so that its thread does not answer
    eventually(lambda: state_of(process.pid) == "stopped")
    file = tmp_path / f"{platform.node()}-{process.pid}.page"
    assert module._faults(process.pid, file.with_suffix(".fault")) == ""
    process.send_signal(signal.SIGCONT)
    assert eventually(lambda: looks(tmp_path, stacks=True)[0].threads) and process.poll() is None


def test_what_another_one_put_there_is_not_taken_for_ours(start, tmp_path):
    """A link to a page, a folder, the page of a process of another user, stacks that are a link."""
    process = start()
    page = tmp_path / f"{platform.node()}-{process.pid}.page"
    secret = tmp_path / "secret"
    secret.write_text('Thread 0x1 (most recent call first):\n  File "x", line 1 in secret\n')
    (tmp_path / "link.page").symlink_to(page)
    (tmp_path / "folder.page").mkdir()
    assert [look.pid for look in looks(tmp_path)] == [process.pid]
    page.with_suffix(".fault").unlink()
    page.with_suffix(".fault").symlink_to(secret)
    page.with_suffix(".ask").symlink_to(secret)  # no thread is asked
    [look] = looks(tmp_path, stacks=True)
    assert "secret" not in str(look.threads) and "secret" in secret.read_text()


def test_a_page_of_one_user_does_not_name_the_process_of_another(tmp_path, monkeypatch):
    write_page(tmp_path / "x.page", os.getpid(), "mine")
    assert [look.name for look in looks(tmp_path)] == ["mine"]
    monkeypatch.setattr(module, "_owner", lambda pid: os.getuid() + 1)
    assert looks(tmp_path) == []
    monkeypatch.undo()
    monkeypatch.setattr(module.os, "geteuid", lambda: os.getuid() + 1)  # and no root
    assert looks(tmp_path) == []


def test_a_stopped_process_is_seen_so_and_answers_when_it_goes_on(start, tmp_path):
    process = start()
    process.send_signal(signal.SIGSTOP)
    eventually(lambda: state_of(process.pid) == "stopped")
    began = time.monotonic()
    [look] = looks(tmp_path, stacks=True)
    assert look.state == "stopped" and look.threads == ()
    assert [note.text for note in look.notes] == ["reward/score"]  # it had written that before
    assert time.monotonic() - began < module.ANSWER_S
    process.send_signal(signal.SIGCONT)
    eventually(lambda: state_of(process.pid) == "")
    eventually(lambda: looks(tmp_path, stacks=True)[0].threads)


def test_a_process_that_ended_is_gone_also_where_its_number_is_used_again(start, tmp_path):
    process = start()
    [look] = looks(tmp_path)
    kill(attrs.evolve(look, host="another machine"))
    kill(attrs.evolve(look, born="another birth"))
    assert process.poll() is None
    kill(look)
    assert process.wait() == -signal.SIGKILL
    kill(look)  # no error
    [look] = looks(tmp_path, stacks=True)
    assert look.state == "gone" and look.threads == ()
    assert state_of(os.getpid(), born(os.getpid())) == ""
    assert state_of(os.getpid(), "another birth") == "gone"


def test_a_zombie_is_gone():
    child = subprocess.Popen(["true"])
    eventually(lambda: state_of(child.pid) == "gone")
    child.wait()


def test_a_process_that_has_no_handler_is_not_sent_the_signal(tmp_path):
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        file = page_of(tmp_path, sleeper.pid)
        write_page(file, sleeper.pid, "the raylet")
        file.with_suffix(".fault").touch()
        [look] = looks(tmp_path, stacks=True)
        assert look.name == "the raylet" and look.threads == () and look.state == ""
        time.sleep(0.1)
        assert sleeper.poll() is None  # the signal would have ended it
    finally:
        sleeper.kill()
        sleeper.wait()


def test_of_a_process_on_another_machine_the_name_alone_is_known(start, tmp_path, monkeypatch):
    start()
    monkeypatch.setattr(module, "here", lambda: "another machine")
    [look] = looks(tmp_path, stacks=True)
    assert look.name == "rank 0 of pool 'main'" and (look.notes, look.threads) == ((), ())


@pytest.mark.parametrize(
    "content", [b"", b"no json" + bytes(5000), b"[1]" + bytes(4093), b'{"name": "x"}' + bytes(5000)]
)
def test_what_is_no_page_is_passed_over(tmp_path, content):
    (tmp_path / "vm-1.page").write_bytes(content)
    assert look_at(tmp_path / "vm-1.page") is None and looks(tmp_path) == []
    assert look_at(tmp_path / "not there.page") is None


def test_a_process_is_named_by_its_page_and_its_children_are_found(start, tmp_path):
    process = start()
    assert name_of(str(tmp_path), process.pid) == "rank 0 of pool 'main'"
    assert name_of(str(tmp_path), 1) == "process 1" and name_of(None, 1) == "process 1"
    found = dict(descendants(os.getpid()))
    assert process.pid in found and sys.executable in found[process.pid]
    shell = subprocess.Popen(["sh", "-c", "sleep 60; true"])
    try:
        eventually(lambda: [c for _, c in descendants(shell.pid) if c == "sleep 60"])
        assert shell.pid in dict(descendants(os.getpid()))
    finally:
        for pid, _ in descendants(shell.pid):
            os.kill(pid, signal.SIGKILL)
        shell.wait()


def test_py_spy_is_asked_where_it_is_installed(tmp_path, monkeypatch):
    """Its arguments and its failure; what it finds out is its own matter."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert spied(os.getppid()) == ""
    program = tmp_path / "py-spy"
    program.write_text('#!/bin/sh\n[ "$4" = 7 ] && echo "$@" || exit 1\n')
    program.chmod(0o755)
    assert spied(7) == "dump --nonblocking --pid 7\n"
    assert spied(8) == ""


def test_frames_are_shown_by_the_end_of_their_path():
    frame = Frame("/home/me/project/rewards/mine.py", 12, "fetch")
    assert str(frame) == "fetch (/home/me/project/rewards/mine.py:12)"
    assert frame.short == "fetch (rewards/mine.py:12)"
    assert Look("controller", 7, "vm", "", 0.0).where == "controller (pid 7 on vm)"
