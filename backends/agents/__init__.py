"""Agents: functions that chat with the model, with the tokens that it has made, never text twice.

rendering.py      messages -> tokens, and only those that the agent has added
parsing.py        the model's text -> message, with its thinking and its calls of tools
conversation.py   one episode's messages and tokens; refuses a changed history
environment.py    the environment "agent", which runs the function
"""
