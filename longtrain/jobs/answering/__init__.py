"""The parts of the job `answers`: batches that stay full, and the files that a stopped run goes on from."""
