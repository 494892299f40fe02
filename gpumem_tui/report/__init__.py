"""What every report is made of: text tables, Markdown, JSON, and the one way to print them."""
