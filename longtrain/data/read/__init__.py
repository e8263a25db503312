"""Reads corpora and local files, from disk or the Hub, into documents."""
