"""Measures ways of decoding: suites say what is asked, the harness runs it, figures count, reports show."""
