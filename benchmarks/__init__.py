"""Measurements behind the tables of recipes/results; they are part of a checkout and not of the package."""

SUITES = {
    "elastic": "benchmarks.elastic.suite",
    "importance": "benchmarks.importance_kernels",
    "kernels": "benchmarks.decoding_attention",
    "linears": "benchmarks.linears",
    "quantise": "benchmarks.quantise",
    "quantspec": "benchmarks.speculation",
    "roofline": "benchmarks.roofline",
    "rows": "benchmarks.rows",
}
"""Name of a measurement -> the module that holds its `BENCH`, as in `longtrain.bench.suites`."""
