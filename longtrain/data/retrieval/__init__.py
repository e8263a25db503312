"""Questions about facts that are hidden in real text: needles, chains, tables and quotations."""
