"""Answers are marked by a judge model behind an OpenAI-compatible endpoint.

`client` asks the endpoint, `prompts` holds what the judge is told, `rubrics` puts a benchmark's questions
and reads the replies, `marker` marks records and keeps every judgement, `naming` says what a result may be
called.
"""
