"""What the job `export` does beside an artifact: formats of other tools, what its card shows, and pushing."""
