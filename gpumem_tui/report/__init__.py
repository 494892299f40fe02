"""The parts of every report: text tables, Markdown, JSON, and the one way to print them."""
