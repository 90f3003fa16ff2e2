"""What was granted and who voted, recorded and judged."""
