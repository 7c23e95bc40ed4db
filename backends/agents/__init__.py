"""Agents: functions and programs that chat with the model (kit/chat), as an environment."""
