"""Runs programs that a model wrote, and agents, isolated from this machine.

    run_program, Sandbox -- settings, standard files --> jail.py   kept, and used again
         ^                                                 `- keep       namespaces; an own root
         |                                                     `- supervise   process 1 of a program
         `-- output, errors, exit status                           `- program limits, no privileges

programs.py   a program alone: run_program
session.py    programs one after the other, whose files stay, with folders to read: Sandbox
process.py    the process of jail.py, and how a program is run in it
jail.py       the script that isolates

It needs Linux: namespaces (as root, or by user namespaces), a filter of system calls by libseccomp,
and a root directory that holds Python's standard library, read-only, and a small tmpfs. A bug in
the kernel could still let a program escape: docs/security.md says what holds one back.
"""
