"""A campaign against runs: what goes wrong in the world, by a seeded schedule, until something is found.

__main__     which case is next; the ledger of those that were run; the table
cases        what a case is; it runs in a process of its own
shrinking    fewer of a case's items that still show what was found
configs, damages, programs, runs    the parts: what is drawn, done and checked
"""
