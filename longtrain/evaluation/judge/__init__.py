"""Answers marked by a judge model behind an OpenAI-compatible endpoint: client, rubrics, marking."""
