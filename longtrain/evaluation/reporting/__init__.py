"""Reports of a finished evaluation: Markdown tables, pictures, and one HTML page."""
