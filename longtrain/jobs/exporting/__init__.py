"""Parts of the job `export`: formats of other tools, comparison, evidence on the card, and uploads."""
