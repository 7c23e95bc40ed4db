"""Conversations with a model in messages, as clients of OpenAI and Anthropic have them, in tokens.

rendering.py      messages -> tokens, and only those that were added
parsing.py        the model's text -> message, with its thinking and its calls of tools
conversation.py   the tree of an episode's calls; what the model has made is held as tokens
api.py            what the endpoint's formats have in common: chat_completions.py, responses.py,
                  anthropic_messages.py
endpoint.py       the server in front of conversations
"""
