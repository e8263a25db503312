"""Benchmarks behind the tables of recipes/results; they are in the repository, but not in the package."""

SUITES = {
    "cycle_parts": "benchmarks.cycle_parts",
    "draft_loss": "benchmarks.draft_loss",
    "elastic": "benchmarks.elastic.suite",
    "importance": "benchmarks.importance_kernels",
    "kernels": "benchmarks.decoding_attention",
    "linears": "benchmarks.linears",
    "node_choice": "benchmarks.node_choice",
    "quantise": "benchmarks.quantise",
    "quantspec": "benchmarks.speculation",
    "roofline": "benchmarks.roofline",
    "rows": "benchmarks.rows",
}
"""Name of a benchmark -> module with its `BENCH`, as in `longtrain.bench.suites`."""
