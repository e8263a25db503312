"""From records to numbers: intervals, the figures of every system, comparisons, and excerpts of examples."""
